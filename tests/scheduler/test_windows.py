"""Models with sliding windows: whole lives of a scheduler, what is held meanwhile, and faults that must be noticed."""

import random
from collections import Counter

import pytest

from aserve.core.errors import ContextLengthError
from aserve.core.params import BeamParams
from aserve.kv_cache import matching, paged_cache
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.preemption import PreemptionRule
from tests.scheduler.sync_loop import SyncLoop, request
from tests.scheduler.traces import run_trace

WINDOWS = ((3,), (None, 3), (5, None, 1), (1,))
NUM_TRACES = 80


def trace(seed: int, *, checked: bool = True) -> SyncLoop:
    """A random life in a pool that is small for what its windows are."""
    rng = random.Random(seed)
    windows = rng.choice(WINDOWS)
    options = {"windows": windows, "num_blocks": rng.randint(4, 9) * len(windows), "preemption": rng.choice(RULES)}
    return run_trace(seed, depth=rng.choice((1, 2)), checked=checked, options=options)


RULES = (PreemptionRule("swap"), PreemptionRule("recompute"))


@pytest.mark.slow
def test_every_answer_of_a_trace_is_the_oracles():
    counts: Counter[str] = Counter()
    for seed in range(NUM_TRACES):
        statistics = trace(seed).scheduler.statistics()
        counts += Counter(
            preemptions=statistics.num_preemptions,
            swaps=statistics.num_swap_outs,
            copies=statistics.num_copied_blocks,
            hits=statistics.num_cache_hits,
        )
    assert min(counts.values()) > 0, counts
    assert len(counts) == 4, counts


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_growing_sequence_holds_no_more_blocks_than_its_window_needs(depth: int, caching: bool):
    """Prompt of 60 tokens in chunks of 4, answer of 60: blocks of two positions, a window of five."""
    loop = SyncLoop(
        depth=depth,
        num_blocks=200,
        windows=(5,),
        max_num_batched_tokens=4,
        enable_prefix_caching=caching,
    )
    loop.add(request("a", tuple(range(3)) * 20, 60))
    peak = loop.scheduler._cache.footprint.peak(120)
    held = []
    while loop.step():
        held.append(loop.scheduler.statistics().num_used_blocks)
    assert max(held) <= peak == 9
    assert max(held[40:-1]) <= 5, "while it decodes: what it sees, and half a span on either side"
    loop.compare()


def test_full_layers_beside_the_window_hold_everything():
    loop = SyncLoop(num_blocks=200, windows=(None, 5), max_num_batched_tokens=4)
    loop.add(request("a", tuple(range(3)) * 20, 60))
    held = []
    while loop.step():
        held.append(loop.scheduler.statistics().num_used_blocks)
    assert 60 <= max(held) <= 60 + 5
    loop.compare()


def test_a_long_prompt_fits_where_its_blocks_never_do_together():
    loop = SyncLoop(num_blocks=10, windows=(5,), max_num_batched_tokens=4, watermark=0.0)
    loop.add(request("a", tuple(range(3)) * 20, 20))
    loop.drain()
    loop.compare()
    whole = SyncLoop(num_blocks=10, max_num_batched_tokens=4, watermark=0.0)
    with pytest.raises(ContextLengthError, match="the KV cache holds 18 tokens"):
        whole.add(request("a", tuple(range(3)) * 20, 20))


def test_beams_that_could_not_all_be_computed_anew_are_refused():
    """A beam that comes back when the others have left the prompt behind shares nothing with them."""
    beams = {"beam": BeamParams(width=2), "n": 1}
    limits = {"windows": (2, None, 5), "max_num_batched_tokens": 8, "watermark": 0.0, "enable_prefix_caching": False}
    loop = SyncLoop(num_blocks=18, **limits)
    assert loop.scheduler._cache.footprint.peak(6) == 9
    with pytest.raises(ContextLengthError, match="2 beams can have 4 each"):
        loop.add(request("a", (0, 1, 2, 0), 9, **beams))
    loop = SyncLoop(num_blocks=19, **limits)
    loop.add(request("a", (0, 1, 2, 0), 9, **beams))
    loop.drain()
    loop.compare()


def test_a_prompt_that_was_answered_is_found_by_its_window():
    loop = SyncLoop(num_blocks=60, windows=(None, 5), max_num_batched_tokens=8)
    prompt = tuple(range(3)) * 5
    loop.add(request("a", prompt, 2))
    loop.drain()
    loop.add(request("b", prompt, 2))
    loop.drain()
    loop.compare()
    assert loop.answers["b"].last is not None
    assert loop.answers["b"].last.num_cached_tokens == 14


def first_complaint(*, checked: bool) -> str:
    for seed in range(4 * NUM_TRACES):
        try:
            trace(seed, checked=checked)
        except AssertionError as error:
            return str(error)
    return ""


@pytest.fixture
def early_release(monkeypatch):
    """A span is given back while the next position still sees its last position."""
    give_back = PagedCache._give_back_unseen

    def give_back_more(cache, table, num_landed):
        give_back(cache, table, min(num_landed + 1, table.capacity))

    monkeypatch.setattr(PagedCache, "_give_back_unseen", give_back_more)


@pytest.fixture
def kept_for_ever(monkeypatch):
    monkeypatch.setattr(PagedCache, "_give_back_unseen", lambda *_: None)


@pytest.fixture
def forked_from_nothing(monkeypatch):
    """A fork does not look whether its source has given up what it needs."""
    monkeypatch.setattr(PagedCache, "can_fork", lambda *_: True)


@pytest.fixture
def one_name_for_all_groups(monkeypatch):
    for module in (matching, paged_cache):
        monkeypatch.setattr(module, "block_name", lambda span_hash, _group: span_hash)


@pytest.mark.parametrize("fault", ["early_release", "kept_for_ever"])
def test_check_names_the_invariant_that_a_fault_breaks(fault, request):
    request.getfixturevalue(fault)
    assert first_complaint(checked=True).startswith("I23")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["early_release", "forked_from_nothing", "one_name_for_all_groups"])
def test_what_would_have_been_a_wrong_answer_is_noticed_without_check(fault, request):
    request.getfixturevalue(fault)
    complaint = first_complaint(checked=False)
    assert complaint.startswith(("I21", "I3", "I4", "I5", "I6")), complaint  # of the oracle, the pool, and FakeKV
