"""resolve: wishes and facts to numbers; what cannot be met is an error with the numbers in it."""

import msgspec
import pytest

from aserve.core.config import (
    EngineConfig,
    Facts,
    GiB,
    Options,
    resolve,
)
from aserve.core.defaults import default_max_in_flight, default_max_num_queued_reqs
from aserve.core.errors import ConfigError
from aserve.core.lora import DEFAULT_LORAS, LoraOptions

MiB = 1024**2
FACTS = Facts(device="cpu", context_len=1024, kv_bytes_per_token=1024, kv_budget_bytes=64 * MiB)


def test_defaults_take_the_models_context_and_no_more_blocks_than_can_be_used():
    config = resolve(Options(max_num_seqs=4), FACTS)
    assert config == EngineConfig(
        block_size=16,
        num_blocks=1 + 4 * 64,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        watermark=0.01,
        enable_prefix_caching=True,
        plans_behind_prompts=False,
        notes=("KV cache: 256 blocks are enough for 4 sequences at full length",),
    )
    assert config.num_kv_tokens == 4096


def test_the_budget_bounds_the_blocks():
    assert resolve(Options(), FACTS).num_blocks == 64 * MiB // (16 * 1024)


def test_on_a_cpu_batches_never_matter_and_whoever_asks_is_told():
    told = resolve(Options(batch_invariant=True), FACTS).notes
    assert told == (
        *resolve(Options(), FACTS).notes,
        "batch_invariant: it is always so on a CPU, in float32 and bfloat16",
    )
    on_cuda = msgspec.structs.replace(FACTS, device="cuda")
    assert resolve(Options(batch_invariant=True), on_cuda).notes == resolve(Options(), on_cuda).notes


def test_a_given_cache_size_is_taken_as_it_is():
    assert resolve(Options(max_num_seqs=1, kv_cache_memory_bytes=32 * MiB), FACTS).num_blocks == 2048


def test_a_context_that_does_not_fit_shrinks_with_a_note_unless_it_was_asked_for():
    small = Options(kv_cache_memory_bytes=17 * 16 * 1024)
    config = resolve(small, FACTS)
    assert config.max_model_len == 256
    assert "max_model_len: 256 instead of the model's 1024" in config.notes[-1]
    with pytest.raises(ConfigError, match=r"max_model_len 1024 does not fit the KV cache of 256 tokens.* 1064960"):
        resolve(Options(kv_cache_memory_bytes=17 * 16 * 1024, max_model_len=1024), FACTS)


def test_a_context_over_the_models_is_refused():
    with pytest.raises(ConfigError, match="max_model_len 2048 is over the model's context of 1024"):
        resolve(Options(max_model_len=2048), FACTS)


def test_a_cache_without_room_for_a_block_is_refused():
    with pytest.raises(ConfigError, match="hold 0 blocks of 16384; at least 2"):
        resolve(Options(kv_cache_memory_bytes=100), FACTS)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "int8"},
        {"device": "tpu"},
        {"load_format": "pt"},
        {"generation_config": "maybe"},
        {"block_size": 7},
        {"max_num_seqs": 0},
        {"max_model_len": -1},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.5},
        {"watermark": 0.5},
        {"preemption_mode": "never"},
        {"preemption_mode": "swap"},
        {"scheduling_policy": "lifo"},
        {"long_prefill_token_threshold": -1},
        {"step_timeout": -1.0},
        {"step_timeout": float("nan")},
        {"scheduler_delay_factor": -0.5},
        {"scheduler_delay_factor": float("nan")},
        {"scheduler_delay_factor": float("inf")},
        {"max_num_queued_reqs": 0},
        {"request_timeout": 0.0},
        {"request_timeout": 1e9},
        {"request_timeout": float("nan")},
        {"hf_overrides": 5},
        {"hf_overrides": {1: 2}},
    ],
)
def test_a_bad_option_is_named(fields):
    (name,) = fields
    with pytest.raises(ConfigError, match=name):
        Options(**fields)


def test_swap_space_is_counted_in_blocks():
    facts = Facts(device="cpu", context_len=64, kv_bytes_per_token=1024, kv_budget_bytes=GiB)
    assert resolve(Options(swap_space=0.5), facts).num_host_blocks == GiB // 2 // (16 * 1024)
    assert resolve(Options(), facts).num_host_blocks == 0
    with pytest.raises(ConfigError, match="swap_space"):
        Options(swap_space=-1)
    with pytest.raises(ConfigError, match="swap_space 1e-06 GiB does not hold one block of 16384 bytes"):
        resolve(Options(swap_space=1e-6), facts)


def test_windows_let_a_small_cache_hold_a_long_context():
    """300 blocks of 16 positions: with full attention 4784 tokens."""
    sizes = {"device": "cpu", "context_len": 100_000, "kv_bytes_per_token": 1024, "kv_budget_bytes": 300 * 16 * 1024}
    options = Options(max_num_batched_tokens=512, max_num_seqs=2)
    assert resolve(options, Facts(**sizes)).max_model_len == 4784
    window = resolve(options, Facts(**sizes, kv_windows=(1024,)))
    assert (window.max_model_len, window.kv_windows) == (100_000, (1024,))
    assert window.num_full_len == 2
    assert window.num_blocks == 1 + 2 * ((1024 + 2 * (512 + 16)) // 16 + 2)  # more are of no use
    both = resolve(options, Facts(**sizes, kv_windows=(1024, None)))
    assert both.max_model_len == (299 - 132) * 16
    assert both.num_kv_tokens == 149 * 16


def test_scheduling_is_as_wished():
    wished = {
        "preemption_mode": "swap",
        "scheduling_policy": "priority",
        "long_prefill_token_threshold": 64,
        "step_timeout": 20.0,
        "scheduler_delay_factor": 0.5,
        "max_num_queued_reqs": 9,
        "request_timeout": 30.0,
    }
    config = resolve(Options(swap_space=1.0, **wished), FACTS)
    assert {name: getattr(config, name) for name in wished} == wished


@pytest.mark.parametrize(
    ("options", "chunk"),
    [({}, 0), ({"scheduling_policy": "fair"}, 256), ({"scheduling_policy": "fair", "max_num_batched_tokens": 1}, 0)],
)
def test_under_the_fair_policy_one_prompt_takes_half_a_step(options, chunk):
    assert resolve(Options(**options), FACTS).long_prefill_token_threshold == chunk
    chosen = resolve(Options(**options, long_prefill_token_threshold=1), FACTS)
    assert chosen.long_prefill_token_threshold == (1 if chosen.max_num_batched_tokens > 1 else 0)


def test_a_servers_queue_ends_after_four_answers():
    assert [default_max_num_queued_reqs(num) for num in (None, 8)] == [1024, 32]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"device": "cpu", "flops_per_token": 10**7}, 2),
        ({"device": "cpu", "flops_per_token": 10**9}, 1),
        ({"device": "cuda", "flops_per_token": 10**9}, 4),
        ({"device": "cuda", "flops_per_token": 10**9, "kv_windows": (1024, None)}, 2),
        ({"device": "cuda", "flops_per_token": 16 * 10**9}, 2),
        ({"device": "cuda"}, 2),
    ],
)
def test_the_device_runs_ahead_as_far_as_its_steps_are_short(facts, expected):
    facts = msgspec.structs.replace(FACTS, **facts)
    assert default_max_in_flight(facts.device, facts.flops_per_token, facts.kv_windows) == expected


@pytest.mark.parametrize("given", [None, 0.0, 40.0])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_with_prompts_are_bounded_on_every_device_or_as_asked(device, given):
    config = resolve(Options(target_itl_ms=given), msgspec.structs.replace(FACTS, device=device))
    assert (config.target_itl_ms, config.itl_factor) == (given, 2.5)


@pytest.mark.parametrize(("device", "behind"), [("cpu", False), ("cuda", True)])
def test_only_a_gpu_runs_ahead_of_a_step_with_prompts(device, behind):
    assert resolve(Options(), msgspec.structs.replace(FACTS, device=device)).plans_behind_prompts is behind


@pytest.mark.parametrize(
    ("device", "flops_per_token", "expected"),
    [("cuda", 10**9, 8192), ("cpu", 10**9, 512), ("cpu", 10**7, 2048), ("cpu", 16 * 10**9, 512), ("cpu", 0, 512)],
)
def test_a_step_of_a_small_model_holds_a_wave_of_prompts(device, flops_per_token, expected):
    """Of a larger model on a CPU such a step would take seconds, and minutes."""
    facts = msgspec.structs.replace(FACTS, device=device, flops_per_token=flops_per_token)
    assert resolve(Options(), facts).max_num_batched_tokens == expected
    assert resolve(Options(max_num_batched_tokens=64), facts).max_num_batched_tokens == 64


@pytest.mark.parametrize(
    ("options", "in_a_step", "in_memory"),
    [
        ({}, DEFAULT_LORAS, DEFAULT_LORAS),
        ({"max_loras": 3}, 3, 3),
        ({"max_loras": 3, "max_cpu_loras": 8}, 3, 8),
        ({"max_cpu_loras": 2}, 2, 2),
        ({"max_cpu_loras": 50}, DEFAULT_LORAS, 50),
    ],
)
def test_how_many_adapters_there_are_at_once(options: dict[str, int], in_a_step: int, in_memory: int):
    lora = LoraOptions(enable_lora=True, **options)
    assert (lora.num_loras, lora.num_cpu_loras) == (in_a_step, in_memory)
