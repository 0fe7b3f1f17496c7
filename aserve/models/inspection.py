"""Whether a folder's config and its weights are of one model, found out before either costs anything.

Reads the headers of the safetensors files alone: milliseconds, without torch. Knows which tensors the native families
have; of other architectures, which transformers builds, only that every layer has weights. Does not look at values.
"""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from aserve.core.errors import CheckpointError, ConfigError
from aserve.models.bounds import DEPTHS, MAX_CONTEXT, walk
from aserve.models.checkpoint import Checkpoint
from aserve.models.headers import TensorHeader, read_header
from aserve.models.quantized_formats import as_served, biases_of, quantized_weights, read_format
from aserve.models.spec import FAMILIES, ModelSpec, read_architecture, read_spec

FLOATS: Final = ("F64", "F32", "F16", "BF16")
COMPUTED: Final = (".rotary_emb.inv_freq",)
"""Ends of names that old checkpoints carry although they follow from the config."""
HEAD: Final = "lm_head.weight"
SCORE: Final = "score.weight"
"""The head of sequence classification."""
MAX_ROPE_TABLE_BYTES: Final = 2**31
"""4 million positions of heads of 128."""


class Dim(NamedTuple):
    """One dimension of a tensor, and the fields of the config that it follows from."""

    fields: str
    size: int


def inspect(checkpoint: Checkpoint, *, dummy: bool = False, max_model_len: int | None = None) -> None:
    """Raise `CheckpointError`, one line, for a folder that cannot be loaded. dummy: its weights will be made up.

    max_model_len: positions that will be used, all of the model's by default. Raises `ConfigError` where it has not as
    many.
    """
    config, path = checkpoint.config, checkpoint.path
    architecture = read_architecture(config)
    is_native = architecture in FAMILIES
    format = read_format(config)
    if format is not None and not is_native:
        raise CheckpointError(
            f"{path}: weights of {format} are not read for {architecture}: it runs through transformers"
        )
    if is_native:
        spec = read_spec(config, has_head=not checkpoint.pools)
        _check_context(spec, max_model_len)
    else:
        _check_length(config.get("max_position_embeddings"), max_model_len)
    if dummy:
        return
    if not checkpoint.weight_files:
        raise CheckpointError(f"{path}: no .safetensors weights (--load-format dummy makes random ones)")
    tensors = read_headers(checkpoint)
    _check_layers(config, len(tensors))
    if is_native:
        if checkpoint.pools:
            tensors = {full_name(name, tensors): tensor for name, tensor in tensors.items() if name != SCORE}
        quantized = quantized_weights(config, tensors)
        _check_tensors(spec, as_served(tensors, quantized), path, biases_of(quantized))


def full_name(name: str, names: Container[str]) -> str:
    """As a decoder with an output head has it, where these are the names of one saved without: with "model."."""
    return f"model.{name}" if "embed_tokens.weight" in names else name


def read_headers(checkpoint: Checkpoint) -> dict[str, TensorHeader]:
    """The tensors of all shards, by name. Raises `CheckpointError` for a malformed shard, or a tensor that two have."""
    tensors: dict[str, TensorHeader] = {}
    for path in checkpoint.weight_files:
        header = read_header(path)
        twice = tensors.keys() & header.keys()
        if twice:
            raise CheckpointError(f"{path}: tensor {min(twice)} is in another shard too")
        tensors |= header
    return tensors


def _check_context(spec: ModelSpec, max_model_len: int | None) -> None:
    if spec.context_len > MAX_CONTEXT:
        raise CheckpointError(
            f"config.json: max_position_embeddings and the rope scaling's factor make a context of {spec.context_len} "
            f"tokens; at most {MAX_CONTEXT} are allowed"
        )
    _check_length(spec.context_len, max_model_len)
    num_positions = max_model_len or spec.context_len
    num_bytes = num_positions * spec.head_dim * 4
    if num_bytes > MAX_ROPE_TABLE_BYTES:
        raise CheckpointError(
            f"config.json: max_position_embeddings {num_positions} with head_dim {spec.head_dim} makes a rope table of "
            f"{num_bytes} bytes; at most {MAX_ROPE_TABLE_BYTES} are allowed: set --max-model-len"
        )


def _check_length(context_len: object, max_model_len: int | None) -> None:
    """context_len: what a config says of it, which may be nothing."""
    if max_model_len is not None and isinstance(context_len, int) and max_model_len > context_len:
        raise ConfigError(f"max_model_len {max_model_len} is over the model's context of {context_len} tokens")


def _check_layers(config: Mapping[str, Any], num_tensors: int) -> None:
    for path, key, value in walk(config):
        if key in DEPTHS and isinstance(value, int) and value > num_tensors:
            raise CheckpointError(f"config.json: {path} is {value}, but the weights are {num_tensors} tensors")


def _check_tensors(
    spec: ModelSpec, tensors: Mapping[str, TensorHeader], folder: Path, may_be_left: Container[str]
) -> None:
    expected = dict(native_tensors(spec))
    for name, dims in expected.items():
        fields = ", ".join(dim.fields for dim in dims)
        found = tensors.get(name)
        if found is None:
            raise CheckpointError(f"{folder} has no tensor {name}, which config.json asks for ({fields})")
        if found.shape != tuple(dim.size for dim in dims):
            raise CheckpointError(
                f"{folder}: tensor {name} is {list(found.shape)}, but the config asks for "
                f"{[dim.size for dim in dims]} ({fields})"
            )
        if found.dtype not in FLOATS:
            raise CheckpointError(f"{folder}: tensor {name} has dtype {found.dtype}, not one of {', '.join(FLOATS)}")
    known = (name for name in tensors if name in expected or name == HEAD or name.endswith(COMPUTED))
    left = tensors.keys() - known - {name for name in tensors if name in may_be_left}
    if left:
        some = ", ".join(sorted(left)[:3])
        raise CheckpointError(f"{folder}: config.json has no place for {len(left)} tensors of the checkpoint: {some}")


def native_tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[Dim, ...]]]:
    """Name and dimensions of each tensor of a native family."""
    hidden = Dim("hidden_size", spec.hidden_size)
    inner = Dim("intermediate_size", spec.intermediate_size)
    head = Dim("head_dim", spec.head_dim)
    vocab = Dim("vocab_size", spec.vocab_size)
    heads = Dim("num_attention_heads x head_dim", spec.num_heads * spec.head_dim)
    kv_heads = Dim("num_key_value_heads x head_dim", spec.num_kv_heads * spec.head_dim)
    linears = (
        ("self_attn.q_proj", heads, hidden, spec.qkv_bias),
        ("self_attn.k_proj", kv_heads, hidden, spec.qkv_bias),
        ("self_attn.v_proj", kv_heads, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, heads, spec.out_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    )
    vectors = [("input_layernorm.weight", hidden), ("post_attention_layernorm.weight", hidden)]
    vectors += [(f"{name}.bias", outputs) for name, outputs, _, has_bias in linears if has_bias]
    if spec.qk_norm:
        vectors += [("self_attn.q_norm.weight", head), ("self_attn.k_norm.weight", head)]

    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(spec.num_layers):
        for name, outputs, inputs, _ in linears:
            yield f"model.layers.{layer}.{name}.weight", (outputs, inputs)
        for name, size in vectors:
            yield f"model.layers.{layer}.{name}", (size,)
    yield "model.norm.weight", (hidden,)
    if spec.has_head and not spec.tie_embeddings:
        yield HEAD, (vocab, hidden)
