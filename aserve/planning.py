"""What a model's config says of how it will run here, before a weight is read: facts for `core.config.resolve`.

The engine makes its facts here too, of the model that it has loaded: what is foretold is what comes to be. Loads no
torch.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from aserve.core.config import Facts, Options
from aserve.core.errors import ConfigError
from aserve.core.layout import KVLayout, lay_out
from aserve.core.quantization import cache_dtype_name, why_not
from aserve.models.checkpoint import Checkpoint
from aserve.models.sharding import share_of
from aserve.models.spec import CACHE_DTYPE_BYTES, FAMILIES, ModelSpec, dtype_name, read_architecture, read_spec
from aserve.runner.host_budget import cpu_kv_budget

OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "d_ff"),
    "vocab_size": ("vocab_size",),
    "context_len": ("max_position_embeddings", "n_positions", "n_ctx"),
}
"""How architectures that transformers computes call what a `ModelSpec` holds."""


def check_ranks(options: Options, checkpoint: Checkpoint) -> None:
    """Raise `ConfigError` for a model that cannot be shared by as many ranks as are wished for."""
    size = options.tensor_parallel_size
    if size == 1:
        return
    if not is_native(checkpoint):
        architecture = read_architecture(checkpoint.config)
        raise ConfigError(
            f"tensor_parallel_size must be 1 for {architecture}, which runs through transformers, got {size}"
        )
    share_of(read_spec(checkpoint.config), size)


def facts_of(spec: ModelSpec, layout: KVLayout, dtype_bytes: int, device: str, budget_bytes: int) -> Facts:
    """Of a model, and of a device that can give so many bytes to its KV cache. dtype_bytes: of a number in it."""
    return Facts(
        device=device,
        context_len=spec.context_len,
        kv_bytes_per_token=layout.layers_per_group * spec.kv_bytes_per_layer(dtype_bytes),
        kv_budget_bytes=budget_bytes,
        kv_windows=layout.windows,
        flops_per_token=spec.flops_per_token,
    )


def with_draft_model(facts: Facts, spec: ModelSpec | None, dtype_bytes: int) -> Facts:
    """The facts, with what a draft model adds to them; None is none. dtype_bytes: as of `facts_of`."""
    if spec is None:
        return facts
    return msgspec.structs.replace(
        facts,
        draft_context_len=spec.context_len,
        draft_bytes_per_token=spec.num_layers * spec.kv_bytes_per_layer(dtype_bytes),
    )


def foretold_facts(options: Options, checkpoint: Checkpoint, spec: ModelSpec, device: str, budget_bytes: int) -> Facts:
    """As the engine will find them. budget_bytes: what the device gives, unless the options say it."""
    spec = share_of(spec, options.tensor_parallel_size)
    layout = lay_out(spec.windows, options.max_model_len or spec.context_len)
    dtype_bytes = cache_dtype_bytes(options, checkpoint)
    return facts_of(spec, layout, dtype_bytes, device, options.kv_cache_memory_bytes or budget_bytes)


def cache_dtype_bytes(options: Options, checkpoint: Checkpoint) -> int:
    """Of a number in the KV cache."""
    return CACHE_DTYPE_BYTES[cache_dtype_name(options.kv_cache_dtype, dtype_name(checkpoint.config, options.dtype))]


def cpu_facts(options: Options, checkpoint: Checkpoint, spec: ModelSpec) -> Facts:
    """Of a model on a CPU."""
    return foretold_facts(options, checkpoint, spec, "cpu", cpu_kv_budget() // options.tensor_parallel_size)


def is_native(checkpoint: Checkpoint) -> bool:
    """Whether aserve computes the model by its own formula, and `spec_of` is exact."""
    return read_architecture(checkpoint.config) in FAMILIES


def why_not_quantized(options: Options, checkpoint: Checkpoint, device: str) -> str | None:
    """Why weights cannot be kept as these options wish, in a line; None where nothing is known. device: cpu or cuda."""
    if options.quantization is None:
        return None
    where = {"device": device, "dtype": dtype_name(checkpoint.config, options.dtype)}
    architecture = read_architecture(checkpoint.config)
    return why_not(options.quantization, architecture=architecture, is_native=is_native(checkpoint), **where)


def spec_of(checkpoint: Checkpoint) -> ModelSpec | None:
    """The model's shape: exact of a native family; else what the config says, with all layers of full attention.

    None where it does not say enough.
    """
    if is_native(checkpoint):
        return read_spec(checkpoint.config, has_head=not checkpoint.pools)
    config = checkpoint.config.get("text_config") or checkpoint.config
    found = {field: _first_integer(config, names) for field, names in OTHER_NAMES.items()}
    if not (found["num_layers"] and found["num_heads"] and found["hidden_size"] and found["context_len"]):
        return None
    found["num_kv_heads"] = found["num_kv_heads"] or found["num_heads"]
    found["head_dim"] = found["head_dim"] or found["hidden_size"] // found["num_heads"]
    found["intermediate_size"] = found["intermediate_size"] or 4 * found["hidden_size"]
    return ModelSpec(
        architecture=read_architecture(checkpoint.config),
        norm_eps=0.0,
        windows=(None,) * found["num_layers"],
        rope=None,
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        num_layers=found["num_layers"],
        num_heads=found["num_heads"],
        num_kv_heads=found["num_kv_heads"],
        head_dim=found["head_dim"],
        hidden_size=found["hidden_size"],
        intermediate_size=found["intermediate_size"],
        vocab_size=found["vocab_size"],
        context_len=found["context_len"],
    )


def _first_integer(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of these fields that is a number, or 0."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), 0)
