"""Hostile folders: each refused in one line that names what is wrong, at once and without memory to speak of.

Every case changes one thing in a good folder. All are loaded in one process that has imported everything and may map
little more, where the time and the memory of each are measured.
"""

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aserve import __version__
from aserve.models.headers import MAX_TENSORS
from tests.checkpoints import SHAPE, build_tokenizer, write_tokenizer

pytestmark = pytest.mark.torch

MAX_CPU_S = 2.0
SLACK_BYTES = 2**24

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", **SHAPE}
GRANITE = LLAMA | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
GPT2 = LLAMA | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
HUGE = "9" * 400
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"

Make = Callable[[Path], Any]


def tensors() -> dict[str, dict[str, Any]]:
    """The header of LLAMA's weights."""
    shapes = {"model.embed_tokens.weight": [320, 32], NORM: [32], "lm_head.weight": [320, 32]}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": [16, 32] for name in "kv"}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": [32, 32] for name in "qo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": [48, 32] for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": [32, 48]}
        shapes |= {f"{prefix}.{name}_layernorm.weight": [32] for name in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    return header


NUM_BYTES = max(tensor["data_offsets"][1] for tensor in tensors().values())


def pack(header: bytes | Mapping[str, Any], data: bytes = bytes(NUM_BYTES), length: int | None = None) -> bytes:
    """A safetensors file; length: what it claims its header has."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write_base(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / WEIGHTS).write_bytes(pack(tensors()))
    write_tokenizer(folder)


def config(base: Mapping[str, Any] = LLAMA, **changes: Any) -> Make:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**base, **changes}))


def rope(**parameters: Any) -> Make:
    return config(rope_scaling=parameters)


def text(name: str, content: str | bytes) -> Make:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(raw)


def config_text(old: str, new: str) -> Make:
    """config.json with a piece of its text exchanged."""
    return text("config.json", json.dumps(LLAMA).replace(old, new))


def weights(*args: Any, **options: Any) -> Make:
    return lambda folder: (folder / WEIGHTS).write_bytes(pack(*args, **options))


def tensor(name: str = NORM, **changes: Any) -> Make:
    header = tensors()
    header[name] = header[name] | changes
    return weights(header)


def value(number: float, base: Mapping[str, Any] = LLAMA) -> Make:
    """A number in the middle of the final norm."""

    def make(folder: Path) -> None:
        config(base)(folder)
        start = tensors()[NORM]["data_offsets"][0] + 64
        data = bytearray(NUM_BYTES)
        data[start : start + 4] = struct.pack("<f", number)
        weights(tensors(), bytes(data))(folder)

    return make


def index(weight_map: Any) -> Make:
    return text(INDEX, json.dumps({"weight_map": weight_map}))


def shards(folder: Path) -> None:
    """The same tensors in two shards."""
    for name in ("1.safetensors", "2.safetensors"):
        (folder / name).write_bytes(pack(tensors()))
    index({"a": "1.safetensors", "b": "2.safetensors"})(folder)


def instead(name: str) -> Make:
    """Weights under another name."""
    return lambda folder: (folder / WEIGHTS).rename(folder / name)


def link(name: str, target: str = "../outside") -> Make:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make


def sparse(name: str, num_bytes: int, start: bytes = b"") -> Make:
    """A file that is as long as this and takes no room."""

    def make(folder: Path) -> None:
        (folder / name).write_bytes(start)
        os.truncate(folder / name, num_bytes)

    return make


def large_vocabulary(folder: Path) -> None:
    spec = json.loads(build_tokenizer().to_str())
    spec["model"]["vocab"] |= {f"word{n}": 320 + n for n in range(100)}
    (folder / "tokenizer.json").write_text(json.dumps(spec))


def decoder(**spec: Any) -> Make:
    return text("tokenizer.json", json.dumps(json.loads(build_tokenizer().to_str()) | {"decoder": spec}))


def many_tensors(number: int) -> Make:
    entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return weights(b"{" + b",".join(b'"%d":%s' % (n, entry) for n in range(number)) + b"}", b"")


YARN = {"rope_type": "yarn", "factor": 2.0}
END = NUM_BYTES - 4 * 320 * 32  # the head's first byte

CASES: dict[str, tuple[Make, str]] = {
    # config.json: numbers
    "layers 1e9": (config(num_hidden_layers=10**9), r"num_hidden_layers must be in \[1, 2048\], got 1000000000"),
    "layers 1e30": (config(num_hidden_layers=10**30), "num_hidden_layers must be in .* an integer of 100 bits"),
    "layers 0": (config(num_hidden_layers=0), r"num_hidden_layers must be in \[1, 2048\], got 0"),
    "layers list": (config(num_hidden_layers=[2]), r"num_hidden_layers must be an integer of at least 1, got \[2\]"),
    "layers 2000": (config(num_hidden_layers=2000), "num_hidden_layers is 2000, but the weights are 21 tensors"),
    "layers 3": (config(num_hidden_layers=3), r"no tensor model\.layers\.2\.self_attn\.q_proj\.weight"),
    "layers 1": (config(num_hidden_layers=1), r"no place for 9 tensors of the checkpoint: model\.layers\.1\."),
    "hidden 1e12": (config(hidden_size=10**12), r"hidden_size must be in \[1, 262144\], got 1000000000000"),
    "hidden 64": (config(hidden_size=64), r"embed_tokens\.weight is \[320, 32\], but .* \[320, 64\] .*hidden_size"),
    "hidden text": (config(hidden_size="32"), "hidden_size must be an integer of at least 1, got '32'"),
    "hidden true": (config(hidden_size=True), "hidden_size must be an integer"),
    "hidden 32.5": (config(hidden_size=32.5), "hidden_size must be an integer"),
    "vocab 1e12": (config(vocab_size=10**12), r"vocab_size must be in \[1, 16777216\], got 1000000000000"),
    "vocab 321": (config(vocab_size=321), r"embed_tokens\.weight is \[320, 32\], but .* \[321, 32\] \(vocab_size"),
    "inner 1e12": (config(intermediate_size=10**12), "intermediate_size must be in"),
    "inner 49": (config(intermediate_size=49), r"gate_proj\.weight is \[48, 32\], but .* \(intermediate_size"),
    "heads 1e9": (config(num_attention_heads=10**9), "num_attention_heads must be in"),
    "heads 0": (config(num_attention_heads=0), "num_attention_heads must be in"),
    "kv heads 3": (config(num_key_value_heads=3), "4 is not a multiple of num_key_value_heads 3"),
    "kv heads 4": (config(num_key_value_heads=4), r"k_proj\.weight is \[16, 32\], but .*\(num_key_value_heads"),
    "head 1e9": (config(head_dim=10**9), r"head_dim must be in \[1, 4096\]"),
    "head 7": (config(head_dim=7), "head_dim must be even"),
    "head 16": (config(head_dim=16), r"q_proj\.weight is \[32, 32\], but .* \[64, 32\] .*head_dim"),
    "context 1e9": (config(max_position_embeddings=10**9), r"max_position_embeddings must be in \[1, 16777216\]"),
    "context 1e30": (config(max_position_embeddings=10**30), "max_position_embeddings must be in"),
    "context and heads": (
        config(max_position_embeddings=2**24, head_dim=4096),
        "max_position_embeddings 16777216 with head_dim 4096 makes a rope table of .* set --max-model-len",
    ),
    "theta 10**400": (config_text('"vocab_size"', f'"rope_theta": {HUGE}, "vocab_size"'), "rope_theta must be .* bits"),
    "theta 10**9999": (config_text('"vocab_size"', f'"x": {"9" * 9999}, "vocab_size"'), r"config\.json: not readable"),
    "theta 1e300": (config(rope_theta=1e300), r"rope_theta must be in .* got 1e\+300"),
    "theta 0": (config(rope_theta=0), "rope_theta must be in"),
    "theta nan": (config(rope_theta=float("nan")), "rope_theta must be in .* got nan"),
    "theta infinite": (config(rope_theta=float("inf")), "rope_theta must be in .* got inf"),
    "yarn 1e18": (rope(**YARN | {"factor": 1e18}), r"rope_scaling\.factor must be in .* got 1e\+18"),
    "yarn original": (
        rope(**YARN, original_max_position_embeddings=10**30),
        "original_max_position_embeddings must be",
    ),
    "yarn betas": (rope(**YARN, beta_fast=1e300), r"rope_scaling\.beta_fast must be in"),
    "yarn attention": (rope(**YARN, attention_factor=1e38), r"rope_scaling\.attention_factor must be in"),
    "linear 1e300": (rope(rope_type="linear", factor=1e300), r"rope_scaling\.factor must be in"),
    "linear 1e5": (
        rope(rope_type="linear", factor=1e5),
        "max_position_embeddings and .* factor make a context of 51200000",
    ),
    "linear nan": (rope(rope_type="linear", factor=float("nan")), r"rope_scaling\.factor must be in"),
    "llama3 ramp": (
        rope(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0),
        "high_freq_factor must be over low_freq_factor",
    ),
    "rope list": (config(rope_scaling=[1]), "rope_scaling must be an object"),
    "window 1e30": (config(architectures=["MistralForCausalLM"], sliding_window=10**30), "sliding_window must be in"),
    "window 0": (config(architectures=["MistralForCausalLM"], sliding_window=0), "sliding_window must be an integer"),
    "eps 1e30": (config(rms_norm_eps=1e30), r"rms_norm_eps must be in \[0, 1\]"),
    "eps nan": (config(rms_norm_eps=float("nan")), "rms_norm_eps must be in"),
    "eos 1e30": (config(eos_token_id=[2, 10**30]), "eos_token_id must be in"),
    "eos 320": (config(eos_token_id=320), r"eos_token_id 320 is not in \[0, 320\)"),
    "anything over 64 bits": (config(pretraining_tp=10**25), "pretraining_tp must be in"),
    # config.json: words and structure
    "no architecture": (config(architectures=None), "architectures must name the model's class"),
    "architecture 5": (config(architectures=[5]), "architectures must name the model's class"),
    "dtype": (config(dtype="float7"), "dtype 'float7' is not one of float32"),
    "quantized": (config(quantization_config={"quant_method": "hqq"}), "quant_method 'hqq' is not read"),
    "auto_map": (config(auto_map={"AutoModel": "x.Y"}), "auto_map.*see --trust-remote-code"),
    "auto_map in a list": (config(parts=[{"auto_map": {}}]), "auto_map.*see --trust-remote-code"),
    "hub attention": (config(_attn_implementation="a/b"), "_attn_implementation.*see --trust-remote-code"),
    "nested 100": (config(x=json.loads("[" * 100 + "]" * 100)), r"config\.json: x is nested in 16 levels"),
    "objects nested 900": (text("config.json", '{"a":' * 900 + "1" + "}" * 900), r"config\.json"),
    "nested 100000": (text("config.json", '{"a":' + "[" * 100_000), r"config\.json: not readable as JSON"),
    "config of 2 MiB": (
        text("config.json", "{" + '"a":[],' * 2**18 + '"b":1}'),
        r"config\.json: \d+ bytes; at most 1048576",
    ),
    "config list": (text("config.json", "[]"), r"config\.json: must hold a JSON object"),
    "config bytes": (text("config.json", b"\xff\xfe{}"), r"config\.json: not readable as JSON"),
    "escape in a key": (config(**{"\x1b[2J": 1}), r"config\.json: '\\x1b\[2J'... is no key"),
    # the index
    "map of objects": (index({"a": {"b": 1}}), r"index\.json: weight_map must map .* got `object`"),
    "map of numbers": (index({"a": 1}), r"index\.json: weight_map must map"),
    "map list": (index(["a"]), r"index\.json: weight_map must map"),
    "map empty": (index({}), r"index\.json: weight_map must map .* none"),
    "map out of the folder": (index({"a": "../outside"}), r"weight_map must map .* got '\.\./outside'"),
    "map absolute": (index({"a": "/etc/passwd"}), "weight_map must map .* got '/etc/passwd'"),
    "map into a folder": (index({"a": "b/c.safetensors"}), "weight_map must map .* got 'b/c.safetensors'"),
    "map to a pickle": (index({"a": "pytorch_model.bin"}), r"weight_map must map to \.safetensors files"),
    "map with an escape": (index({"a": "\x1b.safetensors"}), r"weight_map must map .* got '\\x1b\.safetensors'"),
    "map to nothing": (index({"a": "1.safetensors"}), "1 of 1 shards are missing, the first is 1.safetensors"),
    "index of 1e6": (
        text(INDEX, '{"weight_map":{' + ",".join(f'"{n}":"a"' for n in range(10**6)) + "}}"),
        "1000001 entries",
    ),
    "index torn": (text(INDEX, '{"weight_map":'), r"index\.json: weight_map must map"),
    "index nested": (text(INDEX, '{"weight_map":' + "[" * 100_000), r"index\.json: weight_map must map"),
    "twice": (shards, "tensor lm_head.weight is in another shard too"),
    # model.safetensors
    "empty": (text(WEIGHTS, b""), r"model\.safetensors: not readable as safetensors: it has 0 bytes"),
    "length of 2^64 - 1": (weights(tensors(), length=2**64 - 1), "its header claims 18446744073709551615 bytes"),
    "length over the file": (weights(tensors(), length=10**6), "its header claims 1000000 bytes"),
    "header of 99 MB": (sparse(WEIGHTS, 10**8, struct.pack("<Q", 99 * 10**6)), "its header claims 99000000 bytes"),
    "1e6 tensors": (many_tensors(10**6), f"its header claims|names 1000000 tensors; {MAX_TENSORS} are allowed"),
    "as many as allowed": (many_tensors(MAX_TENSORS), r"has no tensor model\.embed_tokens\.weight"),
    "header no JSON": (weights(b"\x80\x02}q\x00"), "its header is no JSON object"),
    "header list": (weights(b"[]"), "its header is no JSON object"),
    "header nested": (weights(b'{"a":' + b"[" * 100_000), "its header is no JSON object"),
    "entry nested": (weights(b'{"a":{"dtype":' + b"[" * 500 + b"]" * 500 + b"}}"), "tensor a: Expected `str`"),
    "overlap": (tensor("lm_head.weight", data_offsets=[0, 4 * 320 * 32]), "tensor .* overlaps the one before it"),
    "gap": (
        weights({k: v for k, v in tensors().items() if k != NORM}),
        "leaves a gap before it: its data_offsets begin",
    ),
    "past the end": (weights(tensors(), bytes(NUM_BYTES - 1)), "ends at byte 144000, but the file has 143999"),
    "bytes left over": (weights(tensors(), bytes(NUM_BYTES + 1)), "bytes follow the header, but its tensors take"),
    "offsets of 2^64": (tensor("lm_head.weight", data_offsets=[2**64 - 4, 4]), "tensor lm_head.weight: .*data_offsets"),
    "offsets backwards": (
        tensor("lm_head.weight", data_offsets=[END, 0]),
        "leaves a gap before it|has data_offsets of -",
    ),
    "offsets negative": (tensor("lm_head.weight", data_offsets=[-4, 0]), "tensor lm_head.weight: .*data_offsets"),
    "shape wraps": (tensor(shape=[2**62, 2**62]), "model.norm.weight has data_offsets of 128 bytes, but F32 .* takes"),
    "shape negative": (tensor(shape=[-32]), "tensor model.norm.weight: .* >= 0"),
    "shape of 9": (tensor(shape=[1] * 8 + [32]), "tensor model.norm.weight: .*length"),
    "shape fraction": (tensor(shape=[32.5]), "tensor model.norm.weight: .*int"),
    "shape of the config's size": (
        tensor(shape=[4, 8]),
        r"model\.norm\.weight is \[4, 8\], but the config asks for \[32\]",
    ),
    "dtype unknown": (tensor(dtype="F33"), "model.norm.weight has dtype 'F33', not one of F64"),
    "dtype of another size": (tensor(dtype="F64"), "model.norm.weight has data_offsets of 128 bytes, but F64"),
    "dtype of whole numbers": (tensor(dtype="I32"), "model.norm.weight has dtype I32, not one of F64, F32, F16, BF16"),
    "no dtype": (weights({NORM: {"shape": [1], "data_offsets": [0, 4]}}), "tensor model.norm.weight: .*dtype"),
    "escape in a name": (weights(tensors() | {"\x1b[2J": {}}), r"tensor '\\x1b\[2J'... is no name"),
    "pickle": (text(WEIGHTS, b"\x80\x04\x95" + bytes(100)), "not readable as safetensors: its header claims"),
    "nan": (value(float("nan")), r"tensor model\.norm\.weight has values that are not finite in float32"),
    "infinity": (value(float("-inf")), r"tensor model\.norm\.weight has values that are not finite"),
    # what is not there, or not where it should be
    "only .bin": (instead("pytorch_model.bin"), r"pytorch_model\.bin is refused, because a pickle can run code"),
    "only .pt": (instead("model.pt"), r"model\.pt is refused, because a pickle can run code"),
    "only .pkl": (instead("model.pkl"), r"model\.pkl is refused, because a pickle can run code"),
    "other name": (instead("weights.safetensors"), r"weights\.safetensors is there, but neither"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"no \.safetensors weights"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"there is no config\.json"),
    "weights linked": (link(WEIGHTS), r"model\.safetensors: a link to .*outside, which is outside the folder"),
    "config linked": (link("config.json"), r"config\.json: a link to .*outside"),
    "template linked": (link("chat_template.jinja", "/etc/passwd"), r"chat_template\.jinja: a link to /etc/passwd"),
    "templates linked": (link("additional_chat_templates", "/etc"), "additional_chat_templates: a link to /etc"),
    "link to itself": (link("tokenizer.json", "tokenizer.json"), r"tokenizer\.json"),
    # the tokenizer, the template, the generation config
    "tokenizer torn": (text("tokenizer.json", '{"version":'), r"tokenizer\.json: EOF"),
    "tokenizer nested": (text("tokenizer.json", '{"added_tokens":' + "[" * 100_000), r"tokenizer\.json: "),
    "tokenizer empty": (text("tokenizer.json", ""), r"tokenizer\.json: "),
    "tokenizer of 1 GB": (sparse("tokenizer.json", 10**9), r"tokenizer\.json: 1000000000 bytes; at most"),
    "tokenizer beyond the model": (
        large_vocabulary,
        r"tokenizer\.json has \d+ tokens, but config\.json's vocab_size is 320",
    ),
    "decoder unknown": (
        decoder(type="CTC", pad_token="", word_delimiter_token="", cleanup=True),
        r"tokenizer\.json: .*CTC",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
    "tokenizer config torn": (text("tokenizer_config.json", "{"), r"tokenizer_config\.json: not a JSON object"),
    "tokenizer config nested": (
        text("tokenizer_config.json", '{"a":' * 10_000),
        r"RecursionError|tokenizer_config\.json",
    ),
    "tokenizer config wrong": (
        text("tokenizer_config.json", '{"added_tokens_decoder":[1]}'),
        r"tokenizer_config\.json",
    ),
    "tokens no list": (text("tokenizer_config.json", '{"extra_special_tokens": 5}'), "tokenizer: TypeError"),
    "template bytes": (text("chat_template.jinja", b"\xff"), "a chat template is not UTF-8"),
    "template of 2 MiB": (
        text("chat_template.jinja", "{{a}}" * 2**19),
        r"chat_template\.jinja: 2621440 bytes; at most",
    ),
    "generation list": (text("generation_config.json", "[1]"), r"generation_config\.json: must hold a JSON object"),
    "generation nested": (text("generation_config.json", "[" * 100_000), r"generation_config\.json: not readable"),
    "generation eos": (
        text("generation_config.json", '{"eos_token_id": 10000000000}'),
        "eos_token_id 10000000000 is not in",
    ),
    "generation eos word": (
        text("generation_config.json", '{"eos_token_id": "</s>"}'),
        r"generation_config\.json: eos_token",
    ),
    "generation heat": (
        text("generation_config.json", '{"temperature": 1e30}'),
        r"generation_config\.json: .*temperature",
    ),
    # models that transformers computes
    "attentions asked for": (config(GRANITE, output_attentions=True), "StrictDataclass.*output_attentions"),
    "granite layers 1e9": (config(GRANITE, num_hidden_layers=10**9), "num_hidden_layers must be in"),
    "granite layers 100": (
        config(GRANITE, num_hidden_layers=100),
        "num_hidden_layers is 100, but the weights are 21 tensors",
    ),
    "gpt2 layers 1e9": (config(GPT2, n_layer=10**9), "n_layer must be in"),
    "gpt2 context": (config(GPT2, n_positions=2**22), r"config\.json describes \d+ parameters|allocate"),
    "granite hidden": (
        config(GRANITE, hidden_size=2**17),
        r"config\.json describes \d+ parameters, but the weights are",
    ),
    "granite vocab": (config(GRANITE, vocab_size=2**24), r"config\.json describes \d+ parameters, but the weights are"),
    "granite inner": (config(GRANITE, intermediate_size=49), r"mlp|size mismatch|mismatched"),
    "granite heads": (config(GRANITE, num_attention_heads="many"), "GraniteForCausalLM .*num_attention_heads"),
    "granite theta": (
        config(GRANITE, rope_parameters={"rope_type": "yarn", "factor": 1e18}),
        r"rope_parameters\.factor must",
    ),
    "granite rope": (config(GRANITE, rope_parameters={"rope_type": "none such"}), "GraniteForCausalLM .*none such"),
    "granite nan": (value(float("nan"), GRANITE), r"tensor model\.norm\.weight has values that are not finite"),
    "granite cut": (config(GRANITE, attention_bias=True), r"missing_keys model\.layers\.0\.self_attn"),
    "type unknown": (config(GRANITE, model_type="nobodys"), "GraniteForCausalLM .*nobodys"),
    "type missing": (config(GRANITE, model_type=None), "GraniteForCausalLM does not run through transformers"),
    "class unknown": (config(GRANITE, architectures=["NobodysForCausalLM"]), "NobodysForCausalLM: neither aserve nor"),
}

PROGRAM = """
import json, resource, sys, time, warnings
from pathlib import Path
import torch, transformers
from aserve.build import load, make_options
from aserve.core.errors import CheckpointError, ConfigError
import aserve.models.loader, aserve.models.transformers_backend, aserve.runner.graphs, aserve.runner.runner

warnings.simplefilter("ignore")
transformers.logging.set_verbosity(transformers.logging.CRITICAL)

def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

def attempt(folder):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = status("VmRSS"), time.process_time()
    try:
        options = make_options(model=folder, device="cpu", kv_cache_memory_bytes=2**20)
        load(options, lambda progress: None).runner.close()
        kind, line = "", "accepted"
    except BaseException as error:
        kind, line = type(error).__name__, str(error)
    return kind, line, time.process_time() - start, status("VmHWM") - before

good, *folders = sorted(map(str, Path(sys.argv[1]).iterdir()))
attempt(folders[-1])
attempt(good)
limit = status("VmSize") + 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(json.dumps({Path(folder).name: attempt(folder) for folder in (good, *folders)}))
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, float, int, int]]:
    """By case: the error's class and line, CPU seconds, peak bytes of memory above those before, the folder's bytes."""
    root = tmp_path_factory.mktemp("hostile")
    folders = {name: root / "folders" / f"{number:03}" for number, name in enumerate(["good", *CASES])}
    (root / "folders").mkdir()
    for name, folder in folders.items():
        write_base(folder)
        if name in CASES:
            CASES[name][0](folder)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root / "folders")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    sizes = {name: sum(file.lstat().st_blocks * 512 for file in folder.iterdir()) for name, folder in folders.items()}
    return {name: (*found[folder.name], sizes[name]) for name, folder in folders.items()}


BEFORE_TORCH = """
import sys
from aserve import cli
codes = [cli.main([folder, "--port", "0"]) for folder in sys.argv[1:]]
print(codes, "torch" in sys.modules)
"""


@pytest.mark.slow
def test_the_command_says_so_in_one_line_and_ends_with_1_without_loading_torch(tmp_path):
    names = ("layers 1e9", "hidden 64", "header nested", "map of objects", "only .bin")
    for name in names:
        write_base(tmp_path / name)
        CASES[name][0](tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_TORCH, *(str(tmp_path / name) for name in names)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[1, 1, 1, 1, 1] False\n"
    not_said = ("aserve: listening on ", "finding the ", f"aserve {__version__}")
    said = [line for line in done.stderr.splitlines() if not line.startswith(not_said)]
    assert len(said) == len(names)
    for name, line in zip(names, said, strict=True):
        assert line.startswith("aserve: ")
        assert re.search(CASES[name][1], line)


@pytest.mark.slow
def test_the_folder_that_all_of_them_began_as_is_good(verdicts):
    assert verdicts["good"][1] == "accepted"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_one_line_at_once_and_without_memory(verdicts, name):
    kind, line, cpu_s, peak_bytes, num_bytes = verdicts[name]
    assert kind in ("CheckpointError", "ConfigError"), line
    assert re.search(CASES[name][1], line), line
    assert line.isprintable()
    assert len(line) < 1000
    assert cpu_s < MAX_CPU_S
    assert peak_bytes <= 2 * num_bytes + SLACK_BYTES
