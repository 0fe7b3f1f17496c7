"""Configuration: what the user wished (Options), what was measured (Facts), what follows (EngineConfig).

`resolve` is pure and the only place where a default meets the machine. Every value that it changed or invented is
a line in `EngineConfig.notes`, which start-up prints.
"""

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, get_args

import msgspec

from aserve.core.defaults import default_max_in_flight, default_max_num_batched_tokens, default_max_num_seqs
from aserve.core.errors import ConfigError
from aserve.core.graph_sizes import GraphSizes
from aserve.core.layout import Footprint, Window, stretched
from aserve.core.lora import LORA_RULES
from aserve.core.parallel import PARALLEL_RULES
from aserve.core.params import ALL_TOKENS, DEFAULT_MAX_LOGPROBS
from aserve.core.pooling import POOLING_RULES, Pooling, PoolingFields, PoolingOptions
from aserve.core.quantization import KV_CACHE_DTYPES, QUANTIZATIONS
from aserve.core.recording import RECORDING_RULES
from aserve.core.rules import (
    MAX_INT,
    Rules,
    count,
    flag,
    integer,
    matching,
    number,
    one_of,
    optional,
    path,
    several,
    text,
    text_or_texts,
)
from aserve.core.speculation import SpeculativeConfig, StepSeconds, speculative_config

GiB: Final = 1024**3
DEVICES: Final = ("auto", "cpu", "cuda")
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS: Final = ("auto", "safetensors", "dummy")
GENERATION_CONFIGS: Final = ("auto", "none")
PreemptionMode = Literal["auto", "recompute", "swap"]
SchedulingPolicy = Literal["fcfs", "priority", "fair"]
PREEMPTION_MODES: Final = get_args(PreemptionMode)
SCHEDULING_POLICIES: Final = get_args(SchedulingPolicy)
MAX_TARGET_ITL_MS: Final = 3_600_000.0
MAX_TIMEOUT_S: Final = 86400.0
RECOMPUTE_COST_S: Final = 20e-6
"""Of a token in a step of 8 billion parameters on a large GPU, where it is not measured."""
SWAP_COST_S: Final = 80e-6
"""Of a block of 2 MiB that crosses PCIe 4.0, where it is not measured."""
BLOCK_SIZES: Final = (8, 16, 32, 64, 128, 256)
MAX_NUM_SEQS: Final = 2**16
METRICS_PREFIX: Final = "aserve_"
_PREFIX: Final = matching(
    re.compile(r"[a-zA-Z_][a-zA-Z0-9_:]{0,62}[_:]\Z"),
    "2 to 64 letters, digits, _ and :, a digit not first, and _ or : last, such as vllm:",
)


class Options(PoolingOptions, frozen=True, kw_only=True, repr_omit_defaults=True):
    """What a user may wish for an engine; every field is also a CLI flag of the same name. None means "choose".

    Raises `ConfigError`, naming the field, for a value of another type or out of bounds. Paths are taken for texts, and
    one name for a tuple of names.
    """

    model: str = "demo"
    tokenizer: str | None = None
    chat_template: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    served_model_name: tuple[str, ...] = ()
    trust_remote_code: bool = False
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    generation_config: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    swap_space: float = 0.0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    batch_invariant: bool = False
    preemption_mode: PreemptionMode = "auto"
    scheduling_policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: int = 0
    scheduler_delay_factor: float = 0.0
    target_itl_ms: float | None = None
    max_num_queued_reqs: int | None = None
    request_timeout: float | None = None
    step_timeout: float = 300.0
    speculative_config: SpeculativeConfig | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    metrics_prefix: str = METRICS_PREFIX

    if TYPE_CHECKING:  # what is taken is more than what is kept

        def __init__(self, *, model: str | PathLike[str] = "demo", **options: Unpack["OptionFields"]) -> None: ...

    def __post_init__(self) -> None:
        OPTION_RULES.settle(self)
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block_size}")
        if self.preemption_mode == "swap" and self.swap_space == 0.0:
            raise ConfigError("preemption_mode swap needs room in host memory: set swap_space")
        self.check_lora()
        self.check_recording()


OPTION_RULES: Final = Rules(
    lambda message, _field: ConfigError(message),
    {
        "model": path,
        "tokenizer": optional(path),
        "chat_template": optional(path),
        "revision": optional(text),
        "download_dir": optional(path),
        "served_model_name": several(text_or_texts(at_most=128, chars=256)),
        "trust_remote_code": flag,
        "load_format": one_of(*LOAD_FORMATS),
        "dtype": one_of(*DTYPES),
        "quantization": optional(one_of(*QUANTIZATIONS)),
        "device": one_of(*DEVICES),
        "generation_config": one_of(*GENERATION_CONFIGS),
        "seed": integer(-(2**63), 2**63 - 1),
        "max_model_len": optional(count()),
        "block_size": integer(BLOCK_SIZES[0], BLOCK_SIZES[-1]),
        "gpu_memory_utilization": number(0.0, 1.0, low_open=True),
        "kv_cache_memory_bytes": optional(count(2**50)),
        "kv_cache_dtype": one_of(*KV_CACHE_DTYPES),
        "swap_space": number(0.0, 2.0**20, high_open=True, unit="GiB"),
        "max_num_seqs": optional(count(MAX_NUM_SEQS)),
        "max_num_batched_tokens": optional(count()),
        "watermark": number(0.0, 0.5, high_open=True),
        "enable_prefix_caching": flag,
        "enforce_eager": flag,
        "batch_invariant": flag,
        "preemption_mode": one_of(*PREEMPTION_MODES),
        "scheduling_policy": one_of(*SCHEDULING_POLICIES),
        "long_prefill_token_threshold": integer(0, MAX_INT),
        "scheduler_delay_factor": number(0.0, 1000.0),
        "target_itl_ms": optional(number(0.0, MAX_TARGET_ITL_MS, unit="ms")),
        "max_num_queued_reqs": optional(count()),
        "request_timeout": optional(number(0.0, MAX_TIMEOUT_S, low_open=True, unit="seconds")),
        "step_timeout": number(0.0, MAX_TIMEOUT_S, unit="seconds"),
        "speculative_config": optional(speculative_config),
        "tool_call_parser": text,
        "reasoning_parser": text,
        "max_logprobs": integer(ALL_TOKENS, MAX_INT),
        "metrics_prefix": _PREFIX,
        **LORA_RULES,
        **PARALLEL_RULES,
        **POOLING_RULES,
        **RECORDING_RULES,
    },
)


class OptionFields(PoolingFields, total=False):
    """The fields of `Options` besides the model as keyword arguments, for type checkers and editors."""

    tokenizer: str | PathLike[str] | None
    chat_template: str | PathLike[str] | None
    revision: str | None
    download_dir: str | PathLike[str] | None
    served_model_name: str | Sequence[str]
    trust_remote_code: bool
    load_format: str
    dtype: str
    quantization: str | None
    device: str
    generation_config: str
    seed: int
    max_model_len: int | None
    block_size: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    kv_cache_dtype: str
    swap_space: float
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    watermark: float
    enable_prefix_caching: bool
    enforce_eager: bool
    batch_invariant: bool
    preemption_mode: PreemptionMode
    scheduling_policy: SchedulingPolicy
    long_prefill_token_threshold: int
    scheduler_delay_factor: float
    target_itl_ms: float | None
    max_num_queued_reqs: int | None
    request_timeout: float | None
    step_timeout: float
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None
    tool_call_parser: str
    reasoning_parser: str
    max_logprobs: int
    metrics_prefix: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    kv_bytes_per_token: of a position in a block, which is over all layers unless they are in groups (layout.py).
    kv_budget_bytes: what the device can give to KV. kv_windows: of each layer group.
    flops_per_token: of the matrix products; 0 where that is not known.
    draft_context_len, draft_bytes_per_token: of the draft model, and of a position in its cache; 0 without one.
    pooling: of a model that pools; None of one that generates.
    """

    device: str
    context_len: int
    kv_bytes_per_token: int
    kv_budget_bytes: int
    kv_windows: tuple[Window, ...] = (None,)
    flops_per_token: int = 0
    draft_context_len: int = 0
    draft_bytes_per_token: int = 0
    pooling: Pooling | None = None

    @property
    def num_outputs(self) -> int:
        """Places behind a sequence's last token that it has to have: a vector takes that of a token."""
        return 0 if self.pooling is None else 1

    @property
    def may_skip_prefixes(self) -> bool:
        """Whether positions that are in the cache need not be computed."""
        return self.pooling is None or not self.pooling.reads_all


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The decided numbers. num_blocks counts the null block too; notes are lines for the start-up print.

    num_host_blocks: blocks that fit the swap space in host memory.
    kv_windows: sliding windows by layer group; a span of block_size positions takes a block of each.
    recompute_cost_s, swap_cost_s: of a token computed anew, of a block moved one way; measured if there is swap space.
    max_in_flight: steps that are launched and have not landed, at most.
    plans_behind_prompts: whether a step with prompts may be in flight while the next is planned. On a CPU it takes so
    long that who comes meanwhile is worth waiting for. itl_factor: how much longer than without prompts a
    step may take in which somebody decodes, where no target is set. graph_sizes: of steps with prompts on a GPU.
    draft_context_len: of the draft model; 0 without one. draft_step_s: what its steps take, measured.
    pools: whether vectors come out in place of tokens.
    metrics_prefix and the nine before max_loras are the options of those names; that is 0 where there are no adapters.
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    enable_prefix_caching: bool
    num_host_blocks: int = 0
    kv_windows: tuple[Window, ...] = (None,)
    recompute_cost_s: float = RECOMPUTE_COST_S
    swap_cost_s: float = SWAP_COST_S
    max_in_flight: int = 2
    plans_behind_prompts: bool = True
    itl_factor: float = 2.5
    graph_sizes: GraphSizes | None = None
    draft_context_len: int = 0
    draft_step_s: StepSeconds = StepSeconds(0.0, 0.0)
    preemption_mode: PreemptionMode = "auto"
    scheduling_policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: int = 0
    scheduler_delay_factor: float = 0.0
    target_itl_ms: float | None = None
    max_num_queued_reqs: int | None = None
    request_timeout: float | None = None
    step_timeout: float = 300.0
    speculative_config: SpeculativeConfig | None = None
    max_loras: int = 0
    pools: bool = False
    metrics_prefix: str = METRICS_PREFIX
    notes: tuple[str, ...] = ()

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the allocatable blocks hold, all of them seen by all layers."""
        return (self.num_blocks - 1) // len(self.kv_windows) * self.block_size

    @property
    def num_full_len(self) -> int:
        """Sequences of max_model_len that can run at once."""
        threshold = self.long_prefill_token_threshold or self.max_num_batched_tokens
        chunk = stretched(min(threshold, self.max_num_batched_tokens), self.max_num_batched_tokens)
        peak = Footprint(self.kv_windows, self.block_size, chunk).peak(self.max_model_len)
        return min(self.max_num_seqs, (self.num_blocks - 1) // peak)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a face needs to know of the model that is served. names[0] is the one put into answers.

    default_sampling: fields of generation_config.json that replace SamplingParams' own defaults.
    call_format, thought_format: how the model writes calls of tools and thoughts, by name; None is that it does not.
    pooling: what it makes of an input where it pools; None where it generates.
    max_logprobs: of the likeliest tokens that a request may have beside each.
    """

    names: tuple[str, ...]
    root: str
    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]
    created_s: int
    default_sampling: Mapping[str, Any] = {}
    call_format: str | None = None
    thought_format: str | None = None
    pooling: Pooling | None = None
    max_logprobs: int = DEFAULT_MAX_LOGPROBS


def choose_max_chunk(options: Options, budget: int) -> int:
    """Tokens of one prompt that a step computes. Under the fair policy half a step is left to other tenants."""
    share = budget // 2 if options.scheduling_policy == "fair" and budget > 1 else budget
    return min(options.long_prefill_token_threshold or share, budget)


def resolve(options: Options, facts: Facts) -> EngineConfig:
    """Options and facts to an EngineConfig. Raises `ConfigError` where a wish cannot be met."""
    notes: list[str] = []
    max_num_seqs = options.max_num_seqs or default_max_num_seqs()
    budget = options.max_num_batched_tokens or default_max_num_batched_tokens(facts.device, facts.flops_per_token)
    if (wanted_len := options.max_model_len) is not None and wanted_len > facts.context_len:
        raise ConfigError(f"max_model_len {wanted_len} is over the model's context of {facts.context_len} tokens")
    max_model_len, chunk = options.max_model_len or facts.context_len, choose_max_chunk(options, budget)
    footprint = Footprint(facts.kv_windows, options.block_size, stretched(chunk, budget))
    bytes_per_block = footprint.block_bytes(facts.kv_bytes_per_token, facts.draft_bytes_per_token)
    num_blocks = (wanted_bytes := options.kv_cache_memory_bytes or facts.kv_budget_bytes) // bytes_per_block
    blocks_per_seq = footprint.peak(max_model_len + facts.num_outputs)
    if num_blocks > (useful_blocks := 1 + max_num_seqs * blocks_per_seq) and options.kv_cache_memory_bytes is None:
        num_blocks = useful_blocks
        notes.append(f"KV cache: {num_blocks - 1} blocks are enough for {max_num_seqs} sequences at full length")
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_memory_bytes: {wanted_bytes} bytes hold {num_blocks} blocks of {bytes_per_block}; "
            "at least 2 are needed"
        )
    if blocks_per_seq > num_blocks - 1:
        fits = footprint.longest(num_blocks - 1, max_model_len) - facts.num_outputs
        if options.max_model_len is not None:
            raise ConfigError(
                f"max_model_len {max_model_len} does not fit the KV cache of {fits} tokens; "
                f"lower it, or raise kv_cache_memory_bytes to {(blocks_per_seq + 1) * bytes_per_block}"
            )
        notes.append(f"max_model_len: {fits} instead of the model's {max_model_len}, all that the KV cache holds")
        max_model_len = fits
    if options.batch_invariant and facts.device == "cpu":
        notes.append("batch_invariant: it is always so on a CPU, in float32 and bfloat16")
    return EngineConfig(
        block_size=options.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        watermark=options.watermark,
        enable_prefix_caching=options.enable_prefix_caching and facts.may_skip_prefixes,
        num_host_blocks=_num_host_blocks(options, facts.kv_bytes_per_token * options.block_size),
        kv_windows=facts.kv_windows,
        max_in_flight=default_max_in_flight(facts.device, facts.flops_per_token, facts.kv_windows),
        plans_behind_prompts=facts.device != "cpu",
        preemption_mode=options.preemption_mode,
        scheduling_policy=options.scheduling_policy,
        long_prefill_token_threshold=chunk if chunk < budget else 0,
        scheduler_delay_factor=options.scheduler_delay_factor,
        target_itl_ms=options.target_itl_ms,
        draft_context_len=facts.draft_context_len,
        max_num_queued_reqs=options.max_num_queued_reqs,
        request_timeout=options.request_timeout,
        step_timeout=options.step_timeout,
        speculative_config=options.speculative_config,
        max_loras=options.num_loras if options.enable_lora else 0,
        pools=facts.pooling is not None,
        metrics_prefix=options.metrics_prefix,
        notes=tuple(notes),
    )


def _num_host_blocks(options: Options, bytes_per_block: int) -> int:
    """Blocks that fit the swap space. Raises `ConfigError` where it is there and holds none."""
    num_blocks = int(options.swap_space * GiB) // bytes_per_block
    if options.swap_space > 0.0 and num_blocks == 0:
        raise ConfigError(f"swap_space {options.swap_space} GiB does not hold one block of {bytes_per_block} bytes")
    return num_blocks
