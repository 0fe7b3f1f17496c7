"""Who waits for how long: priorities with ageing, chunks, pace, the queue's length, and the swap space."""

import pytest

from aserve.core.errors import OverloadedError
from aserve.core.ids import RequestId, SeqId
from aserve.core.plan import BlockOps
from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.queue import priority_with_ageing
from tests.scheduler.sync_loop import SyncLoop, request

SWAPS = PreemptionRule("swap")


def admitted(loop: SyncLoop) -> list[int]:
    return [init.seq_id for plan in loop.plans for init in plan.inits]


def drained(loop: SyncLoop) -> SyncLoop:
    loop.drain()
    loop.compare()
    return loop


def test_the_lower_priority_number_goes_first():
    loop = SyncLoop(max_num_seqs=1, policy=priority_with_ageing(60.0))
    for name, priority in (("a", 3), ("b", -1), ("c", 0)):
        loop.add(request(name, (0, 1), max_tokens=1, priority=priority))
    drained(loop)
    assert admitted(loop) == [1, 2, 0]


def test_by_default_priorities_are_not_heeded():
    loop = SyncLoop(max_num_seqs=1)
    for name, priority in (("a", 3), ("b", -1)):
        loop.add(request(name, (0, 1), max_tokens=1, priority=priority))
    drained(loop)
    assert admitted(loop) == [0, 1]


@pytest.mark.parametrize("levels", [1, 5])
def test_nobody_waits_for_ever(levels):
    """However many more urgent requests keep coming: only those pass who arrive within ageing_s for each level."""
    ageing_s = 4.0
    key = priority_with_ageing(ageing_s)
    patient = key(request("p", (0,), priority=levels, arrival_s=100.0), SeqId(0))
    passing = [t for t in range(1000) if key(request("u", (0,), arrival_s=float(t)), SeqId(1)) < patient]
    assert max(passing) == 100 + levels * ageing_s - 1
    loop = SyncLoop(max_num_seqs=1, policy=key)
    loop.add(request("patient", (0, 1), max_tokens=1, priority=levels))
    for second in range(int(levels * ageing_s) + 3):
        loop.now = float(second)
        loop.add(request(f"u{second}", (1, second % 3), max_tokens=1, arrival_s=float(second)))
        loop.step()
        loop.step()
    assert loop.answers["patient"].last is not None
    drained(loop)


def test_priorities_without_ageing_are_refused():
    with pytest.raises(AssertionError, match="wait for ever"):
        priority_with_ageing(0.0)


def test_a_long_prompt_leaves_room_in_each_step_for_others():
    loop = SyncLoop(num_blocks=20, long_prefill_token_threshold=3)
    loop.add(request("long", (0, 1, 2) * 3, max_tokens=2))
    loop.add(request("short", (1, 1), max_tokens=2))
    first = loop.plan()
    assert first is not None
    assert [(piece.seq_id, piece.num_tokens) for piece in first.slices] == [(0, 3), (1, 2)]
    drained(loop)


def test_newcomers_wait_for_a_share_of_the_last_prompts_time():
    loop = SyncLoop(num_blocks=20, scheduler_delay_factor=2.0, depth=1)
    loop.add(request("a", (0, 1), max_tokens=9))
    loop.step()
    loop.now = 1.0  # the prompt's step took a second, so two have to be waited
    loop.step()
    loop.add(request("b", (1, 1), max_tokens=2, arrival_s=1.0))
    for now, num_running in ((2.0, 1), (2.9, 1), (3.0, 2)):
        loop.now = now
        loop.step()
        assert loop.scheduler.statistics().num_running == num_running
    drained(loop)


def test_with_nobody_else_there_is_no_waiting():
    loop = SyncLoop(scheduler_delay_factor=1000.0)
    loop.add(request("a", (0, 1), max_tokens=2))
    drained(loop)
    loop.add(request("b", (0, 1), max_tokens=2))
    drained(loop)


def test_too_many_who_wait_are_told_to_come_back():
    loop = SyncLoop(max_num_seqs=1, max_num_queued_reqs=2)
    loop.add(request("a", (0,), max_tokens=5, n=3))  # its choices wait too, and count once
    loop.now = 7.0
    loop.plan()
    loop.add(request("b", (0,)))
    loop.add(request("c", (0,)))
    with pytest.raises(OverloadedError, match="2 requests are waiting") as caught:
        loop.add(request("d", (0,)))
    assert caught.value.retry_after_s == 7
    loop.cancel("b")
    loop.scheduler.check_room(request("d", (0,)))
    with pytest.raises(OverloadedError, match="2 requests are waiting"):  # one has come that does not wait yet
        loop.scheduler.check_room(request("d", (0,)), num_before=1)
    loop.add(request("d", (0,)))
    drained(loop)


def test_after_a_reset_nothing_is_found():
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", (0, 1, 2, 0, 1), max_tokens=2))
    drained(loop)
    assert loop.scheduler.reset_prefix_cache() == 3
    loop.add(request("b", (0, 1, 2, 0, 1), max_tokens=2))
    drained(loop)
    assert loop.scheduler.statistics().num_cache_hits == 0


def swapping(num_host_blocks: int = 8, **limits: object) -> SyncLoop:
    """Two requests, of which the second is about to give way."""
    loop = SyncLoop(num_blocks=6, num_host_blocks=num_host_blocks, preemption=SWAPS, watermark=0.0, **limits)
    loop.add(request("old", (0, 0, 0, 0), max_tokens=6))
    loop.add(request("new", (1, 1, 1, 1), max_tokens=4))
    loop.plan()
    return loop


def test_a_victims_blocks_go_to_the_host_and_come_back():
    loop = swapping()
    second = loop.plan()
    assert second is not None
    assert second.block_ops == BlockOps(swap_outs=((3, 0), (4, 1)))
    counts = loop.scheduler.statistics()
    assert (counts.num_swapped, counts.num_host_used_blocks, counts.num_swap_outs) == (1, 2, 1)
    drained(loop)
    (back,) = [plan for plan in loop.plans if plan.block_ops and plan.block_ops.swap_ins]
    assert [host_id for host_id, _ in back.block_ops.swap_ins] == [0, 1]
    assert back.slices[-1].num_tokens == 1  # nothing is computed twice
    assert loop.scheduler.statistics().num_swapped_blocks == 4


def test_without_room_on_the_host_a_victim_is_recomputed():
    loop = swapping(num_host_blocks=1)
    loop.plan()
    counts = loop.scheduler.statistics()
    assert (counts.num_swapped, counts.num_preemptions, counts.num_waiting) == (0, 1, 1)
    drained(loop)


def test_blocks_that_a_failed_step_was_to_move_are_recomputed():
    loop = swapping()
    loop.plan()
    loop.commit()
    assert loop.fail() is None
    counts = loop.scheduler.statistics()
    assert (counts.num_swapped, counts.num_waiting, counts.num_host_used_blocks) == (0, 1, 0)
    drained(loop)


def test_a_reader_of_a_swapped_sequence_may_leave():
    loop = swapping()
    loop.plan()
    loop.cancel("new")
    assert loop.scheduler.statistics().num_host_used_blocks == 0
    drained(loop)


def swapped_by_itself() -> SyncLoop:
    """A sequence that gave way to itself while nothing could run: no plan has taken its move along yet."""
    loop = SyncLoop(num_blocks=4, num_host_blocks=3, preemption=SWAPS, watermark=0.0)
    loop.add(request("old", (0, 0), max_tokens=1))
    loop.add(request("new", (1, 1, 1, 1), max_tokens=2))
    loop.plan()
    assert loop.plan() is None
    assert loop.scheduler.statistics().num_swapped == 1
    return loop


def test_a_move_that_nobody_wants_any_more_is_not_made():
    loop = swapped_by_itself()
    loop.cancel("new")
    loop.add(request("next", (2,), max_tokens=3))
    loop.drain()
    loop.compare()
    assert all(plan.block_ops is None for plan in loop.plans)


def test_who_needs_all_blocks_comes_back_from_the_host_once_it_is_alone():
    """Catches blocks that are kept free for others where nobody else runs: all of it would be computed anew."""
    loop = swapped_by_itself()
    drained(loop)
    assert admitted(loop) == [0, 1, 1]
    assert [sum(part.num_tokens for part in plan.slices) for plan in loop.plans] == [6, 1]


def test_who_was_swapped_out_returns_before_newcomers():
    loop = swapping()
    loop.plan()
    loop.add(request("newcomer", (2,), max_tokens=1))
    drained(loop)
    assert admitted(loop) == [0, 1, 1, 2]


def test_a_group_moves_each_block_once():
    loop = SyncLoop(num_blocks=10, num_host_blocks=20, preemption=SWAPS)
    loop.add(request("old", (0,) * 4, max_tokens=12))
    loop.add(request("new", (1,) * 5, max_tokens=5, n=3, temperature=1.0))
    drained(loop)
    moved = [plan.block_ops.swap_outs for plan in loop.plans if plan.block_ops and plan.block_ops.swap_outs]
    assert moved
    for swap_outs in moved:
        blocks = [block for block, _ in swap_outs]
        assert len(set(blocks)) == len(blocks)


@pytest.mark.parametrize(("recompute_cost_s", "swaps"), [(1.0, True), (0.01, False)])
def test_the_cheaper_way_is_taken(recompute_cost_s, swaps):
    """Two blocks out and in at 1 s each, against four tokens computed again."""
    rule = PreemptionRule(recompute_cost_s=2 * recompute_cost_s, swap_cost_s=1.0)
    loop = SyncLoop(num_blocks=6, num_host_blocks=8, watermark=0.0, preemption=rule)
    loop.add(request("old", (0, 0, 0, 0), max_tokens=6))
    loop.add(request("new", (1, 1, 1, 1), max_tokens=4))
    loop.plan()
    loop.plan()
    assert loop.scheduler.statistics().num_swap_outs == swaps
    drained(loop)


def test_an_unknown_id_finishes_nothing():
    loop = SyncLoop()
    loop.finish("nobody", 3)
    loop.scheduler.cancel(RequestId("nobody"))
