"""The scheduler: whole plans to the block id, and stories of requests. Blocks are of two positions."""

import pytest

from aserve.core.errors import ContextLengthError, InvalidRequestError
from aserve.core.ids import RequestId
from aserve.core.outputs import FinishReason, SeqDelta
from aserve.core.plan import RowInit, RowSampling, SeqSlice, StepPlan, StepResult
from aserve.scheduler.scheduler import Scheduler
from tests.fakes import deltas_of
from tests.scheduler.sync_loop import EOS, SyncLoop, request

GREEDY = RowSampling()


def scheduler_of(num_blocks: int = 8, **limits: float) -> Scheduler:
    """`num_blocks` besides the null block."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 100, "watermark": 0.0} | limits
    return Scheduler(block_size=2, num_blocks=num_blocks + 1, **limits)


def land(scheduler: Scheduler, plan: StepPlan, *token_ids: int) -> list[SeqDelta]:
    deltas = deltas_of(scheduler.commit(StepResult(plan.step_id, token_ids)))
    scheduler.check()
    return deltas


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    scheduler.check()
    assert plan is not None
    return plan


# Whole plans.


def test_a_prompt_is_computed_and_then_one_token_a_step():
    scheduler = scheduler_of()
    scheduler.add(request("a", (0, 1, 2), max_tokens=3))
    first = planned(scheduler)
    assert first == StepPlan(
        step_id=0,
        slices=(
            SeqSlice(seq_id=0, row=0, start=0, num_tokens=3, token_ids=(0, 1, 2), new_blocks=(1, 2), num_samples=1),
        ),
        inits=(RowInit(row=0, seq_id=0, sampling=GREEDY),),
    )
    second = planned(scheduler)  # its token is still on the device
    assert second == StepPlan(1, (SeqSlice(0, 0, start=3, num_tokens=1, num_samples=1),))
    assert land(scheduler, first, 7) == [SeqDelta("a", (7,))]
    third = planned(scheduler)
    assert third == StepPlan(2, (SeqSlice(0, 0, start=4, num_tokens=1, new_blocks=(3,), num_samples=1),))
    assert land(scheduler, second, 8) == [SeqDelta("a", (8,))]
    assert scheduler.plan(0.0) is None  # nothing is planned past max_tokens, the token in flight counted
    assert land(scheduler, third, 9) == [SeqDelta("a", (9,), FinishReason.LENGTH)]
    assert scheduler.plan(0.0) is None
    assert scheduler.statistics().num_used_blocks == 0


def test_who_awaits_its_tokens_is_planned_when_they_have_landed_and_its_neighbours_ahead_of_that():
    scheduler = scheduler_of()
    for name in "ab":
        scheduler.add(request(name, (0, 1), max_tokens=3))
    scheduler._roster.sequences[0].await_tokens()
    first, second = planned(scheduler), planned(scheduler)
    assert [piece.seq_id for piece in first.slices] == [0, 1]
    assert [piece.seq_id for piece in second.slices] == [1], "the token of a is in flight"
    land(scheduler, first, 5, 6)
    third = planned(scheduler)
    assert [(piece.seq_id, piece.start) for piece in third.slices] == [(0, 2), (1, 3)]
    land(scheduler, second, 6)
    assert scheduler.plan(0.0) is None, "a waits, and all of b is planned"
    assert [delta.token_ids for delta in land(scheduler, third, 5, 6)] == [(6,), (5,)]
    assert [piece.start for piece in planned(scheduler).slices] == [3]


def test_step_by_step_gives_the_same_plans_as_one_step_ahead():
    ahead, behind = scheduler_of(), scheduler_of()
    for scheduler in (ahead, behind):
        scheduler.add(request("a", (0, 1, 2), max_tokens=3))
    plans = [planned(ahead), planned(ahead)]
    land(ahead, plans[0], 7)
    for plan in plans:
        same = planned(behind)
        assert same == plan
        land(behind, same, 7)


def test_long_prompts_are_computed_in_chunks_beside_those_who_decode():
    scheduler = scheduler_of(max_num_batched_tokens=4)
    scheduler.add(request("a", (0,), max_tokens=9))
    scheduler.add(request("b", (1, 1, 1, 1, 1, 2), max_tokens=2))
    first = planned(scheduler)
    assert [(s.seq_id, s.start, s.num_tokens, s.num_samples) for s in first.slices] == [
        (0, 0, 1, True),
        (1, 0, 3, False),
    ]
    assert first.slices[1].new_blocks == (2, 3, 4)  # those of the whole prompt
    second = planned(scheduler)
    assert second.inits == ()
    assert second.slices == (
        SeqSlice(seq_id=0, row=0, start=1, num_tokens=1, num_samples=1),
        SeqSlice(seq_id=1, row=1, start=3, num_tokens=3, token_ids=(1, 1, 2), num_samples=1),
    )
    assert land(scheduler, first, 5) == [SeqDelta("a", (5,))]
    assert land(scheduler, second, 6, 7) == [SeqDelta("b", (7,)), SeqDelta("a", (6,))]


def test_a_second_reader_of_the_same_prompt_is_given_its_blocks_once_they_have_landed():
    scheduler = scheduler_of()
    scheduler.add(request("a", (0, 1, 2, 0, 1), max_tokens=9))
    first = planned(scheduler)
    scheduler.add(request("b", (0, 1, 2, 0, 2), max_tokens=9))
    second = planned(scheduler)
    assert second.inits[0].block_ids == ()  # the step that writes them is still in flight
    land(scheduler, first, 5)
    scheduler.add(request("c", (0, 1, 2, 0), max_tokens=9))
    third = planned(scheduler)
    assert third.inits == (RowInit(row=2, seq_id=2, sampling=GREEDY, block_ids=(1,)),)
    assert third.slices[-1] == SeqSlice(2, 2, start=2, num_tokens=2, token_ids=(2, 0), new_blocks=(8,), num_samples=1)
    land(scheduler, second, 5, 5)
    assert land(scheduler, third, 5, 5, 5)[0] == SeqDelta("c", (5,), num_cached_tokens=2)


def test_when_memory_is_short_the_newest_gives_way_and_keeps_the_token_in_flight():
    scheduler = scheduler_of(num_blocks=4)
    scheduler.add(request("a", (0, 0), max_tokens=9))
    scheduler.add(request("b", (1, 1, 1, 1), max_tokens=4))
    first = planned(scheduler)
    assert [piece.new_blocks for piece in first.slices] == [(1,), (2, 3)]
    second = planned(scheduler)  # a takes the last block, and b, who needs one too, goes
    assert second.slices == (SeqSlice(0, 0, start=2, num_tokens=1, new_blocks=(4,), num_samples=1),)
    assert scheduler.statistics().num_preemptions == 1
    assert land(scheduler, first, 2, 2) == [SeqDelta("a", (2,)), SeqDelta("b", (2,))]
    third = planned(scheduler)  # b has five tokens now, and needs more blocks than there are
    assert [piece.seq_id for piece in third.slices] == [0]
    land(scheduler, second, 2)
    scheduler.cancel(RequestId("a"))
    fourth = planned(scheduler)
    assert fourth.inits == (RowInit(row=0, seq_id=1, sampling=GREEDY),)  # its blocks had not been sealed
    assert fourth.slices[0].token_ids == (1, 1, 1, 1, 2)
    land(scheduler, third, 9)  # a is gone
    assert land(scheduler, fourth, 0) == [SeqDelta("b", (0,))]


def test_a_preempted_sequence_may_end_by_the_token_it_left_in_flight():
    scheduler = scheduler_of(num_blocks=4)
    scheduler.add(request("a", (0, 0), max_tokens=9))
    scheduler.add(request("b", (1, 1, 1, 1), max_tokens=4, stop_ids=frozenset({EOS})))
    first = planned(scheduler)
    planned(scheduler)
    assert land(scheduler, first, 0, EOS)[1] == SeqDelta("b", (EOS,), FinishReason.STOP)
    assert scheduler.statistics().num_waiting == 0


def test_a_sequence_comes_back_only_when_what_it_left_in_flight_has_landed():
    scheduler = scheduler_of(num_blocks=3)
    scheduler.add(request("a", (0, 0), max_tokens=1))
    scheduler.add(request("b", (1, 1, 1, 1), max_tokens=2))
    first = planned(scheduler)
    assert scheduler.plan(0.0) is None  # a awaits its last token, and b, without a block to go on, has given way
    assert scheduler.plan(0.0) is None
    assert scheduler.statistics().num_free_blocks == 2
    land(scheduler, first, 0, 2)
    second = planned(scheduler)
    assert second.inits == (RowInit(row=0, seq_id=1, sampling=GREEDY, block_ids=()),)
    assert second.slices[0].token_ids == (1, 1, 1, 1, 2)
    assert land(scheduler, second, 1) == [SeqDelta("b", (1,), FinishReason.LENGTH)]


# Stories.


def test_a_reader_who_leaves_frees_his_blocks_at_once():
    loop = SyncLoop(num_blocks=9)
    loop.add(request("stays", (0, 1), max_tokens=6))
    loop.add(request("leaves", (1, 1, 1), max_tokens=6))
    loop.step()
    loop.step()
    loop.plan()
    assert loop.scheduler.statistics().num_used_blocks == 5
    loop.cancel("leaves")
    assert loop.scheduler.statistics().num_used_blocks == 2
    loop.cancel("leaves")
    loop.cancel("nobody")
    loop.drain()
    loop.compare()
    assert len(loop.answers["stays"].token_ids) == 6


def test_blocks_of_a_reader_who_left_are_reused_while_his_step_is_in_flight():
    loop = SyncLoop(num_blocks=3)
    loop.add(request("leaves", (1, 1, 1), max_tokens=1))
    loop.plan()
    loop.cancel("leaves")
    loop.add(request("comes", (2, 2, 2), max_tokens=1))
    second = loop.plan()
    assert second is not None
    assert set(second.slices[0].new_blocks) == {1, 2}
    assert loop.commit() == []
    loop.drain()
    loop.compare()


def test_a_stop_string_found_in_the_text_ends_a_request_like_a_departure():
    loop = SyncLoop()
    loop.add(request("a", (0, 1), max_tokens=9))
    loop.step()
    loop.step()
    loop.finish("a")
    assert loop.scheduler.statistics().num_used_blocks == 0
    assert loop.commit() == []
    loop.drain()


def test_a_step_that_raises_once_costs_nobody_anything():
    loop = SyncLoop(max_num_seqs=2)
    for name in ("a", "b", "waits"):
        loop.add(request(name, (0, 1, 2), max_tokens=5))
    loop.plan()
    loop.plan()
    assert loop.fail() is None
    assert not loop.in_flight
    loop.drain()
    loop.compare()
    assert [len(loop.answers[name].token_ids) for name in ("a", "b", "waits")] == [5, 5, 5]


def test_a_launch_that_raises_leaves_the_step_before_it_to_land():
    loop = SyncLoop(max_num_seqs=2, max_num_batched_tokens=3)
    loop.add(request("first", (0, 1, 2), max_tokens=1))
    loop.plan()
    loop.add(request("second", (1, 1), max_tokens=5))
    loop.plan()
    assert loop.fail(1) is None
    assert loop.answers["first"].last is not None
    loop.drain()
    loop.compare()


def test_nothing_that_a_failed_step_wrote_is_ever_found_in_the_cache():
    loop = SyncLoop()
    loop.add(request("a", (0, 1, 2, 0, 1), max_tokens=5))
    for blamed in (None, None, "a"):
        loop.plan()
        assert loop.fail() == blamed
    loop.add(request("b", (0, 1, 2, 0, 1), max_tokens=5))
    loop.drain()
    loop.compare()
    assert loop.scheduler.statistics().num_cache_hits == 0


def test_a_culprit_whose_client_left_while_it_was_on_trial_is_named_and_tears_nothing():
    loop = SyncLoop()
    for name in ("a", "b"):
        loop.add(request(name, (0, 1, 2), max_tokens=5))
    loop.plan()
    assert loop.fail() is None
    loop.plan()
    assert loop.fail() is None
    loop.plan()
    loop.cancel("a")
    assert loop.fail() == "a"
    loop.drain()
    loop.compare()
    assert len(loop.answers["b"].token_ids) == 5


def test_what_an_aborted_request_computed_stays_of_use():
    loop = SyncLoop()
    loop.add(request("a", (0, 1, 2, 0, 1), max_tokens=5))
    loop.plan()
    loop.commit()
    loop.cancel("a")
    loop.add(request("b", (0, 1, 2, 0, 1), max_tokens=5))
    loop.drain()
    loop.compare()
    last = loop.answers["b"].last
    assert last is not None
    assert last.num_cached_tokens == 4


def test_newcomers_leave_the_watermark_to_those_who_run_but_not_to_nobody():
    loop = SyncLoop(num_blocks=11, watermark=0.3)  # 3 of 10 blocks
    loop.add(request("large", (0,) * 16, max_tokens=2))  # 8 blocks, and nobody runs
    loop.add(request("small", (1,), max_tokens=2))
    loop.plan()
    assert loop.scheduler.statistics().num_running == 1
    loop.commit()
    loop.plan()
    assert loop.scheduler.statistics().num_waiting == 1  # 9 blocks are held
    loop.drain()
    loop.compare()


def test_a_large_request_in_front_is_not_overtaken_by_a_small_one():
    loop = SyncLoop(num_blocks=9)
    loop.add(request("runs", (0,) * 6, max_tokens=4))
    loop.plan()
    loop.add(request("large", (1,) * 12, max_tokens=1))
    loop.add(request("small", (2,), max_tokens=1))
    loop.drain()
    ids = [init.seq_id for plan in loop.plans for init in plan.inits]
    assert ids == [0, 1, 2]


def test_who_arrived_earlier_goes_first_even_if_it_was_added_later():
    loop = SyncLoop(max_num_seqs=1)
    for name, arrival_s in (("late", 2.0), ("early", 1.0)):
        loop.add(request(name, (0, 1), max_tokens=1, arrival_s=arrival_s))
    loop.drain()
    assert [init.seq_id for plan in loop.plans for init in plan.inits] == [1, 0]


def test_under_pressure_the_oldest_gets_on_in_every_step():
    loop = SyncLoop(num_blocks=7, max_num_seqs=5)
    loop.add(request("oldest", (0,), max_tokens=11))
    for index in range(4):
        loop.add(request(f"r{index}", (1, index % 3), max_tokens=9))
    for _ in range(11):
        plan = loop.plan()
        assert plan is not None
        assert plan.slices[0].seq_id == 0
        loop.commit()
    assert loop.answers["oldest"].token_ids == loop.expected(loop.answers["oldest"].request)
    loop.drain()
    loop.compare()
    assert loop.scheduler.statistics().num_preemptions > 0


def test_a_step_that_preempts_admits_nobody():
    loop = SyncLoop(num_blocks=5, max_num_seqs=5)
    for index in range(5):
        loop.add(request(f"r{index}", (index % 3,), max_tokens=7))
    num_preemptions = 0
    while loop.step():
        counts = loop.scheduler.statistics()
        if counts.num_preemptions > num_preemptions:
            num_preemptions = counts.num_preemptions
            assert loop.plans[-1].inits == ()
    assert num_preemptions > 0
    loop.compare()


@pytest.mark.parametrize(
    ("num_prompt", "max_model_len", "message"),
    [
        (16, 100, "the KV cache holds 16 tokens, but the prompt has 16"),
        (17, 100, "the KV cache holds 16 tokens, but the prompt has 17"),
        (10, 10, "the maximum context length is 10 tokens, but the prompt has 10"),
        (99, 16, "the maximum context length is 16 tokens, but the prompt has 99"),
    ],
)
def test_what_can_never_fit_is_refused_with_both_numbers(num_prompt, max_model_len, message):
    scheduler = scheduler_of(num_blocks=8, max_model_len=max_model_len)
    with pytest.raises(ContextLengthError, match=message):
        scheduler.check_fits(num_prompt)
    with pytest.raises(ContextLengthError, match=message):
        scheduler.add(request("a", (0,) * num_prompt))
    assert scheduler.statistics().num_waiting == 0


def test_the_longest_prompt_that_fits_gets_one_token():
    loop = SyncLoop(num_blocks=9)
    loop.add(request("a", (0, 1, 2) * 5, max_tokens=50))  # 15 tokens of 16
    loop.drain()
    loop.compare()
    last = loop.answers["a"].last
    assert last is not None
    assert last.finish_reason is FinishReason.LENGTH
    assert len(loop.answers["a"].token_ids) == 1


def test_an_empty_prompt_and_an_id_in_use_are_refused():
    scheduler = scheduler_of()
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        scheduler.add(request("a", ()))
    scheduler.add(request("a", (0,)))
    with pytest.raises(InvalidRequestError, match="request id 'a' is in use"):
        scheduler.add(request("a", (0,)))
    scheduler.cancel(RequestId("a"))
    scheduler.add(request("a", (0,)))


def test_steps_land_in_order():
    scheduler = scheduler_of()
    scheduler.add(request("a", (0,)))
    planned(scheduler)
    with pytest.raises(AssertionError, match="step 1 landed before step 0"):
        scheduler.commit(StepResult(1, (0,)))


def test_a_third_step_is_not_planned_before_the_first_has_landed():
    scheduler = scheduler_of()
    scheduler.add(request("a", (0,), max_tokens=9))
    planned(scheduler)
    planned(scheduler)
    with pytest.raises(AssertionError, match="plan follows a commit"):
        scheduler.plan(0.0)


def test_statistics_tell_what_is_going_on():
    scheduler = scheduler_of(num_blocks=8, max_num_seqs=1)
    scheduler.add(request("a", (0, 1, 2), max_tokens=9, arrival_s=1.0))
    scheduler.add(request("b", (0, 1, 2), max_tokens=9, arrival_s=2.0))
    first = scheduler.plan(4.0)
    assert first is not None
    counts = scheduler.statistics()
    assert (counts.num_running, counts.num_waiting, counts.num_in_flight) == (1, 1, 1)
    assert (counts.num_blocks, counts.num_used_blocks, counts.num_free_blocks, counts.kv_usage) == (8, 2, 6, 0.25)
    assert (counts.num_admitted, counts.queue_time_s) == (1, 3.0)
    land(scheduler, first, 7)
    scheduler.cancel(RequestId("a"))
    scheduler.plan(5.0)
    counts = scheduler.statistics()
    assert (counts.num_admitted, counts.queue_time_s) == (2, 6.0)
    assert (counts.num_cache_queries, counts.num_cache_hits) == (6, 2)


def test_steps_are_counted_by_their_tokens():
    """Few of them are counted elsewhere than many."""
    scheduler = scheduler_of(num_blocks=2000, max_num_batched_tokens=1500, max_model_len=4000)
    scheduler.add(request("a", (0,) * 2524, max_tokens=4))
    for num_tokens in (1500, 1024, 1, 1):
        plan = planned(scheduler)
        assert plan.num_tokens == num_tokens
        land(scheduler, plan, *[0] * plan.slices[0].num_samples)
    assert scheduler.statistics().num_steps_by_tokens == {1: 2, 1024: 1, 1500: 1}
