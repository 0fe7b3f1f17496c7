"""A prefix cache with a host tier: whole lives of a scheduler, and faults that must be noticed."""

import random
from collections import Counter

import pytest

from aserve.kv_cache.host_memory import HostMemory
from aserve.kv_cache.swap import HostPool
from aserve.scheduler.preemption import PreemptionRule
from tests.scheduler.sync_loop import SyncLoop, request
from tests.scheduler.traces import run_trace

NUM_TRACES = 60
WINDOWS = ((None,), (None,), (3,), (None, 3))
RULES = (PreemptionRule("swap"), PreemptionRule("recompute"))


def trace(seed: int, *, checked: bool = True) -> SyncLoop:
    """A random life in a small pool beside a small host memory."""
    rng = random.Random(seed)
    windows = rng.choice(WINDOWS)
    options = {
        "windows": windows,
        "num_blocks": rng.randint(4, 9) * len(windows),
        "num_host_blocks": rng.choice((2, 4, 16)),
        "preemption": rng.choice(RULES),
        "enable_prefix_caching": True,
        "keeps_evicted": True,
    }
    return run_trace(seed, depth=rng.choice((1, 2)), checked=checked, options=options)


def first_complaint(*, checked: bool) -> str:
    for seed in range(8 * NUM_TRACES):
        try:
            trace(seed, checked=checked)
        except AssertionError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_every_answer_of_a_trace_is_the_oracles():
    counts: Counter[str] = Counter()
    for seed in range(NUM_TRACES):
        statistics = trace(seed).scheduler.statistics()
        counts += Counter(
            preemptions=statistics.num_preemptions,
            swaps=statistics.num_swap_outs,
            hits=statistics.num_host_hit_blocks,
            evictions=statistics.num_cache_evictions,
        )
    assert len(counts) == 4, counts
    assert counts["hits"] > NUM_TRACES, counts


def test_an_evicted_prefix_is_not_computed_again():
    loop = SyncLoop(num_blocks=7, num_host_blocks=8, keeps_evicted=True, max_num_batched_tokens=16, watermark=0.0)
    prompt = (0, 1, 2, 0, 1, 2, 0, 1, 2)
    loop.add(request("a", prompt, 1))
    loop.drain()
    loop.add(request("b", (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2), 1))
    loop.drain()
    loop.add(request("c", prompt, 1))
    loop.drain()
    loop.compare()
    assert loop.answers["c"].last is not None
    assert loop.answers["c"].last.num_cached_tokens == 8
    [piece] = loop.plans[-1].slices
    assert (piece.start, piece.num_tokens) == (8, 1)
    assert loop.scheduler.statistics().num_host_hit_blocks > 0


@pytest.fixture
def leaked_reading(monkeypatch):
    """A host block stays held after it was read."""
    take_moves = HostMemory.take_moves

    def leak(memory):
        memory._read.clear()
        return take_moves(memory)

    monkeypatch.setattr(HostMemory, "take_moves", leak)


@pytest.fixture
def overwritten_before_it_is_read(monkeypatch):
    """What is to come back is not held meanwhile."""

    def move_in(memory, host_ids):
        block_ids = memory._pool.allocate(len(host_ids))
        memory._ins.extend(zip(host_ids, block_ids, strict=True))
        return block_ids

    monkeypatch.setattr(HostMemory, "_move_in", move_in)
    monkeypatch.setattr(HostMemory, "has_moves", property(lambda memory: bool(memory._outs or memory._ins)))


@pytest.fixture
def failure_trusted(monkeypatch):
    """What a failed step was to copy out is taken for copied."""
    monkeypatch.setattr(HostMemory, "distrust", lambda *_: None)


@pytest.fixture
def stale_place(monkeypatch):
    """A kept block that has given way is still found by its hash."""

    def take(pool):
        if pool._free:
            return pool._free.pop()
        unused = next((host_id for host_id in pool._kept.values() if pool._refs[host_id] == 0), None)
        if unused is not None:
            pool._hashes.pop(unused)
        return unused

    monkeypatch.setattr(HostPool, "_take", take)


@pytest.mark.parametrize(("fault", "invariant"), [("leaked_reading", "I2"), ("stale_place", "I8")])
def test_check_names_the_invariant_that_a_fault_breaks(fault, invariant, request):
    request.getfixturevalue(fault)
    assert first_complaint(checked=True).startswith(invariant)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["overwritten_before_it_is_read", "failure_trusted"])
def test_the_oracle_alone_catches_what_would_have_been_a_wrong_answer(fault, request):
    request.getfixturevalue(fault)
    complaint = first_complaint(checked=False)
    assert complaint.startswith(("I21", "I6")), complaint
