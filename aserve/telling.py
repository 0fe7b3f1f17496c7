"""What was decided at loading, in lines for people. Knows words, and nothing of how things were decided."""

from typing import TYPE_CHECKING, Any, Final

from aserve.core.config import EngineConfig, Facts, GiB, ModelInfo, Options
from aserve.core.pooling import Pooling
from aserve.drafters import num_draft_blocks
from aserve.engine_parts import EngineParts
from aserve.kv_cache.host_memory import has_host_tier
from aserve.models.quantized_formats import read_format
from aserve.text.formats.named import own_formats

if TYPE_CHECKING:
    from aserve.models.checkpoint import Checkpoint


UNKNOWN_FORMAT: Final = "none known of this model"
"""Of what a model writes as calls of tools, or as thoughts."""


def startup_lines(parts: EngineParts) -> list[str]:
    """The plan, line by line: model, KV cache, concurrency, sampling defaults, and what was changed of the wishes."""
    return list(parts.config.notes)


def plan_lines(
    options: Options, info: ModelInfo, config: EngineConfig, facts: Facts, weights: str, response_template: Any = None
) -> tuple[str, ...]:
    """Model, KV cache, concurrency, swap space, sampling defaults and formats of answers, a line each.

    weights: `describe_weights`. response_template: the tokenizer's, of which it is told what is not read.
    """
    kv_bytes = config.num_blocks * config.block_size * facts.kv_bytes_per_token
    sampling = ", ".join(f"{name} {value}" for name, value in info.default_sampling.items())
    tenants = "preempted sequences and evicted prefixes" if has_host_tier(config) else "preempted sequences"
    kept = "" if options.kv_cache_dtype == "auto" else f" as {options.kv_cache_dtype}"
    kind = "page-locked blocks" if facts.device == "cuda" else "blocks"
    swap_space = (f"swap space: {config.num_host_blocks} {kind} for {tenants}",) if config.num_host_blocks else ()
    return (
        f"model: {info.names[0]}, {weights}",
        f"KV cache: {config.num_blocks - 1} blocks x {config.block_size} = {config.num_kv_tokens} tokens, "
        f"{_size(kv_bytes)}{kept}, {_why(options, facts.device)}",
        f"concurrency: {config.num_full_len} sequences at the full length of {config.max_model_len} tokens, "
        f"{config.max_num_seqs} at most; others wait",
        *swap_space,
        f"generation_config.json: {sampling or 'no sampling defaults'}",
        f"tool calls: {info.call_format or UNKNOWN_FORMAT}; thoughts: {info.thought_format or UNKNOWN_FORMAT}",
        *(f"response_template: not read: {problem}" for problem in own_formats(response_template).problems),
    )


def _why(options: Options, device: str) -> str:
    """Where the size of the KV cache comes from."""
    if options.kv_cache_memory_bytes is not None:
        return "as kv_cache_memory_bytes says"
    if device == "cpu":
        return "of 4 GiB or a quarter of the memory; its pages are taken as they are used"
    return "of what weights and the largest step leave on the GPU"


def pooling_lines(info: ModelInfo, config: EngineConfig, pooling: Pooling, weights: str) -> tuple[str, ...]:
    """Of a model that pools: what it makes of an input, and of how many at once. weights: `describe_weights`."""
    size = f"{pooling.size} numbers" if pooling.task == "embed" else f"scores of {pooling.size} labels"
    kind = "decoder" if pooling.is_causal else "encoder"
    return (
        f"model: {info.names[0]}, {weights}",
        f"pooling: {pooling.task} by {pooling.method} of the {kind}'s hidden states, {size}, activation "
        f"{pooling.activation}",
        f"concurrency: {config.max_num_seqs} inputs of up to {config.max_model_len} tokens, "
        f"{config.max_num_batched_tokens} tokens in a step",
    )


def draft_lines(
    options: Options, config: EngineConfig, facts: Facts, checkpoint: "Checkpoint | None"
) -> tuple[str, ...]:
    """The draft model, in a line, where there is one."""
    if checkpoint is None or config.speculative_config is None:
        return ()
    kv_bytes = num_draft_blocks(config) * config.block_size * facts.draft_bytes_per_token
    return (
        f"draft model: {config.speculative_config.model}, {describe_weights(options, checkpoint)}, "
        f"{_size(kv_bytes)} of KV cache, {1e3 * sum(config.draft_step_s):.2f} ms a draft",
    )


def describe_weights(options: Options, checkpoint: "Checkpoint") -> str:
    """Their size on disk, and how they are stored, or that they are random; and how they are kept, if quantized."""
    quantized = "" if options.quantization is None else f", linear layers kept as {options.quantization},"
    if options.load_format == "dummy":
        tokenizer = "" if checkpoint.has_tokenizer or options.tokenizer else ", the demonstration model's tokenizer"
        return f"random weights (seed {options.seed}){tokenizer}{quantized}"
    num_bytes = sum(file.stat().st_size for file in checkpoint.weight_files)
    stored = read_format(checkpoint.config)
    return f"{_size(num_bytes)} of weights{f' ({stored})' if stored else ''}{quantized}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GiB:.2f} GiB" if num_bytes >= GiB else f"{num_bytes / GiB * 1024:.1f} MiB"
