"""Configuration: what the user wished (Options), what was measured (Facts), what follows (EngineConfig).

`resolve` is pure and the only place where a default meets the machine. Every value that it changed or invented is
a line in `EngineConfig.notes`, which start-up prints.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import msgspec

from aserve.core.errors import ConfigError
from aserve.core.layout import Footprint, Window

GiB: Final = 1024**3
DEVICES: Final = ("auto", "cpu", "cuda")
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS: Final = ("auto", "safetensors", "dummy")
GENERATION_CONFIGS: Final = ("auto", "none")
PreemptionMode = Literal["auto", "recompute", "swap"]
SchedulingPolicy = Literal["fcfs", "priority"]
PREEMPTION_MODES: Final = get_args(PreemptionMode)
SCHEDULING_POLICIES: Final = get_args(SchedulingPolicy)
MAX_DELAY_FACTOR: Final = 1000.0
RECOMPUTE_COST_S: Final = 20e-6
"""Of a token in a step of 8 billion parameters on a large GPU, where it is not measured."""
SWAP_COST_S: Final = 80e-6
"""Of a block of 2 MiB that crosses PCIe 4.0, where it is not measured."""
SMALL_MODEL_FLOPS: Final = 2_500_000_000
"""Per token: of a model of about a billion parameters."""
SLOW_CPU_FLOPS: Final = 100_000_000
"""Per token: a few milliseconds on two cores."""
COUNTS: Final = (
    *("max_model_len", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens"),
    "max_num_queued_reqs",
)
"""Options that are None or at least 1."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may wish for an engine; every field is also a CLI flag of the same name. None means "choose"."""

    model: str = "demo"
    tokenizer: str | None = None
    chat_template: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    served_model_name: tuple[str, ...] = ()
    trust_remote_code: bool = False
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    generation_config: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
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
    max_num_queued_reqs: int | None = None

    def __post_init__(self) -> None:
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        _one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        _one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        for field in COUNTS:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"{field} must be at least 1, got {value}")
        if self.block_size not in (8, 16, 32, 64, 128, 256):
            raise ConfigError(f"block_size must be one of 8, 16, 32, 64, 128, 256, got {self.block_size}")
        if not 0.0 <= self.swap_space < 2**20:
            raise ConfigError(f"swap_space must be in [0, {2**20}) GiB, got {self.swap_space}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0.0 <= self.watermark < 0.5:
            raise ConfigError(f"watermark must be in [0, 0.5), got {self.watermark}")
        self._check_scheduling()

    def _check_scheduling(self) -> None:
        if self.preemption_mode == "swap" and self.swap_space == 0.0:
            raise ConfigError("preemption_mode swap needs room in host memory: set swap_space")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold must be at least 0, got {self.long_prefill_token_threshold}"
            )
        if not 0.0 <= self.scheduler_delay_factor <= MAX_DELAY_FACTOR:
            raise ConfigError(
                f"scheduler_delay_factor must be in [0, {MAX_DELAY_FACTOR:g}], got {self.scheduler_delay_factor}"
            )


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    kv_bytes_per_token: of a position in a block, which is over all layers unless they are in groups (layout.py).
    kv_budget_bytes: what the device can give to KV. kv_windows: of each layer group.
    flops_per_token: of the matrix products; 0 where that is not known.
    """

    device: str
    context_len: int
    kv_bytes_per_token: int
    kv_budget_bytes: int
    kv_windows: tuple[Window, ...] = (None,)
    flops_per_token: int = 0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The decided numbers. num_blocks counts the null block too; notes are lines for the start-up print.

    num_host_blocks: blocks that fit the swap space in host memory.
    kv_windows: sliding windows by layer group; a span of block_size positions takes a block of each.
    recompute_cost_s, swap_cost_s: of a token computed anew, of a block moved one way; measured if there is swap space.
    max_in_flight: steps that are launched and have not landed, at most.
    The last five before the notes are the options of those names.
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
    preemption_mode: PreemptionMode = "auto"
    scheduling_policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: int = 0
    scheduler_delay_factor: float = 0.0
    max_num_queued_reqs: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the allocatable blocks hold, all of them seen by all layers."""
        return (self.num_blocks - 1) // len(self.kv_windows) * self.block_size

    @property
    def num_full_len(self) -> int:
        """Sequences of max_model_len that can run at once."""
        threshold = self.long_prefill_token_threshold or self.max_num_batched_tokens
        chunk = min(threshold, self.max_num_batched_tokens)
        peak = Footprint(self.kv_windows, self.block_size, chunk).peak(self.max_model_len)
        return min(self.max_num_seqs, (self.num_blocks - 1) // peak)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a face needs to know of the model that is served. names[0] is the one put into answers.

    default_sampling: fields of generation_config.json that replace SamplingParams' own defaults.
    """

    names: tuple[str, ...]
    root: str
    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]
    created_s: int
    default_sampling: Mapping[str, Any] = {}


def default_max_num_batched_tokens(device: str) -> int:
    """Tokens a step computes at most. On a CPU 512 cost as much per token as 2048, and stall decoding less."""
    return 8192 if device == "cuda" else 512


def default_max_num_seqs() -> int:
    """Sequences that run at once."""
    return 256


def choose_max_in_flight(facts: Facts) -> int:
    """How far the device runs ahead: a step that waits behind it hides what the host does between two of them.

    And it makes newcomers wait for a step more. On a CPU that is 25 ms with half a billion parameters, where the host's
    0.2 ms do not matter: there the next step is planned when the last has landed. Three steps wait on a GPU for a
    small model, whose steps take no longer than what else an event loop does. Sliding windows hold blocks for two.
    """
    if facts.device == "cpu":
        return 1 if facts.flops_per_token > SLOW_CPU_FLOPS else 2
    is_small = 0 < facts.flops_per_token <= SMALL_MODEL_FLOPS
    return 4 if is_small and not any(facts.kv_windows) else 2


def resolve(options: Options, facts: Facts) -> EngineConfig:
    """Options and facts to an EngineConfig. Raises `ConfigError` where a wish cannot be met."""
    notes: list[str] = []
    max_num_seqs = options.max_num_seqs or default_max_num_seqs()
    budget = options.max_num_batched_tokens or default_max_num_batched_tokens(facts.device)
    if options.max_model_len is not None and options.max_model_len > facts.context_len:
        raise ConfigError(
            f"max_model_len {options.max_model_len} is over the model's context of {facts.context_len} tokens"
        )
    max_model_len = options.max_model_len or facts.context_len

    chunk = min(options.long_prefill_token_threshold or budget, budget)
    footprint = Footprint(facts.kv_windows, options.block_size, chunk)
    bytes_per_block = facts.kv_bytes_per_token * options.block_size
    wanted_bytes = options.kv_cache_memory_bytes or facts.kv_budget_bytes
    num_blocks = wanted_bytes // bytes_per_block
    blocks_per_seq = footprint.peak(max_model_len)
    useful_blocks = 1 + max_num_seqs * blocks_per_seq
    if num_blocks > useful_blocks and options.kv_cache_memory_bytes is None:
        num_blocks = useful_blocks
        notes.append(f"KV cache: {num_blocks - 1} blocks are enough for {max_num_seqs} sequences at full length")
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_memory_bytes: {wanted_bytes} bytes hold {num_blocks} blocks of {bytes_per_block}; "
            "at least 2 are needed"
        )
    if blocks_per_seq > num_blocks - 1:
        fits = footprint.longest(num_blocks - 1, max_model_len)
        if options.max_model_len is not None:
            raise ConfigError(
                f"max_model_len {max_model_len} does not fit the KV cache of {fits} tokens; "
                f"lower it, or raise kv_cache_memory_bytes to {(blocks_per_seq + 1) * bytes_per_block}"
            )
        notes.append(f"max_model_len: {fits} instead of the model's {max_model_len}, all that the KV cache holds")
        max_model_len = fits
    if options.batch_invariant and facts.device == "cpu":
        notes.append("batch_invariant: it is always so on a CPU, in float32 and bfloat16")
    num_host_blocks = int(options.swap_space * GiB) // bytes_per_block
    if options.swap_space > 0.0 and num_host_blocks == 0:
        raise ConfigError(f"swap_space {options.swap_space} GiB does not hold one block of {bytes_per_block} bytes")
    return EngineConfig(
        block_size=options.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        watermark=options.watermark,
        enable_prefix_caching=options.enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        kv_windows=facts.kv_windows,
        max_in_flight=choose_max_in_flight(facts),
        preemption_mode=options.preemption_mode,
        scheduling_policy=options.scheduling_policy,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        scheduler_delay_factor=options.scheduler_delay_factor,
        max_num_queued_reqs=options.max_num_queued_reqs,
        notes=tuple(notes),
    )


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{field} must be one of {', '.join(allowed)}, got {value!r}")
