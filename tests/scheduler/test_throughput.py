"""How fast a full engine gets on: what is measured, what counts less and less, and what is told of a wait by that."""

import pytest

from aserve.core.errors import OverloadedError
from aserve.scheduler.throughput import HALF_LIFE_ANSWERS, HALF_LIFE_S, Throughput
from tests.scheduler.sync_loop import SyncLoop, request


def measured(*steps: tuple[float, int]) -> Throughput:
    """Full steps, one after another, of so many seconds and tokens each."""
    throughput, now = Throughput(), 0.0
    for seconds, num_tokens in steps:
        throughput.planned(now, num_tokens, is_full=True)
        now += seconds
    throughput.planned(now, 0, is_full=False)
    return throughput


def test_it_is_the_tokens_of_full_steps_by_their_seconds():
    assert measured((0.5, 100), (0.25, 80)).tokens_per_s == pytest.approx(180 / 0.75, rel=0.02)
    nothing = Throughput()
    assert (nothing.tokens_per_s, nothing.seconds_for(1, 10)) == (None, None)


def test_the_time_before_the_first_step_is_not_counted():
    throughput = Throughput()
    for now_s in (50.0, 50.5, 51.0):
        throughput.planned(now_s, 100, is_full=True)
    assert throughput.tokens_per_s == pytest.approx(200.0)


def test_after_a_half_life_what_was_measured_counts_half():
    """Ten seconds at 100 a second, then ten at 200."""
    found = measured((HALF_LIFE_S, 1000), (HALF_LIFE_S, 2000)).tokens_per_s
    assert found == pytest.approx((1000 / 2 + 2000) / (HALF_LIFE_S / 2 + HALF_LIFE_S))


def test_a_step_after_which_nobody_waits_is_not_counted():
    throughput = measured((1.0, 100))
    throughput.planned(50.0, 7, is_full=True)
    throughput.planned(51.0, 9, is_full=False)
    throughput.planned(90.0, 9, is_full=False)
    assert throughput.tokens_per_s == pytest.approx((100 + 7) / 2, rel=0.05)


def test_a_wait_is_as_long_as_prompts_and_usual_answers_take():
    throughput = measured((1.0, 10))
    assert throughput.seconds_for(3.0, 50.0) == pytest.approx(5.0), "of answers nothing is known"
    for num_tokens in (20, 0, 20):
        throughput.answered(num_tokens)
    assert throughput.seconds_for(3.0, 50.0) == pytest.approx(5.0 + 3 * 20 / 10), "who got nothing is not counted"
    for _ in range(HALF_LIFE_ANSWERS):
        throughput.answered(40)
    for _ in range(20 * HALF_LIFE_ANSWERS):
        throughput.answered(10)
    assert throughput.seconds_for(1.0, 0.0) == pytest.approx(1.0, rel=0.01), "the latest answers are the usual ones"


def waiting(tokens_per_s: int = 10) -> SyncLoop:
    """An engine that gets so many tokens a second done has a prompt of fifty before it."""
    loop = SyncLoop(num_blocks=60, max_num_queued_reqs=1)
    loop.scheduler._admission.throughput.planned(0.0, 10 * tokens_per_s, is_full=True)
    loop.scheduler._admission.throughput.planned(10.0, 0, is_full=False)
    loop.add(request("first", (0, 1) * 25, max_tokens=1))
    return loop


@pytest.mark.parametrize(("tokens_per_s", "retry_after_s"), [(10, 5), (100, 1), (40, 2), (1, 50)])
def test_who_comes_to_a_full_queue_is_told_how_long_it_is(tokens_per_s, retry_after_s):
    """In whole seconds, and at least one."""
    with pytest.raises(OverloadedError, match="1 requests are waiting") as told:
        waiting(tokens_per_s).scheduler.check_room(request("next", (0,), arrival_s=1.0))
    assert told.value.retry_after_s == retry_after_s


@pytest.mark.parametrize(("left_s", "retry_after_s"), [(2.0, 3), (0.5, 5), (5.0, None)])
def test_who_would_wait_past_its_deadline_is_told_when_it_would_not(left_s, retry_after_s):
    loop = waiting()
    loop.scheduler._admission._max_num_queued = None
    late = request("next", (0,), arrival_s=100.0, deadline_s=100.0 + left_s)
    if retry_after_s is None:
        loop.scheduler.check_room(late)
        return
    with pytest.raises(OverloadedError, match=f"about 5.0 s, and the request has {left_s} s") as told:
        loop.scheduler.check_room(late)
    assert told.value.retry_after_s == retry_after_s
