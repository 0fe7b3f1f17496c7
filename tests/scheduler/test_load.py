"""What a scheduler tells whoever spreads requests over several: what it has to do, its speed, what it has cached."""

import pytest

from aserve.core.plan import StepPlan, StepResult
from aserve.scheduler.scheduler import Scheduler
from tests.scheduler.sync_loop import request


def step(scheduler: Scheduler, now: float) -> StepPlan:
    """Plan and land a step in which everybody samples a 1."""
    plan = scheduler.plan(now)
    assert plan is not None
    scheduler.commit(StepResult(plan.step_id, (1,) * sum(piece.num_samples for piece in plan.slices)))
    return plan


def test_what_waits_is_counted_in_tokens_from_the_queue_to_a_prompts_last_chunk():
    scheduler = Scheduler(
        block_size=2, num_blocks=40, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=50, watermark=0.0
    )
    assert (scheduler.statistics().num_waiting_tokens, scheduler.statistics().tokens_per_s) == (0, None)
    for name in "abc":
        scheduler.add(request(name, (ord(name),) * 6, max_tokens=20))
    waiting = [18]
    for number in range(5):
        assert scheduler.statistics().num_waiting_tokens == waiting[-1]
        waiting.append(
            waiting[-1] - sum(piece.num_tokens for piece in step(scheduler, number).slices if piece.token_ids)
        )
    assert waiting == [18, 14, 10, 7, 6, 6], "two have rows, of whom one decodes soon, and the third waits whole"


def test_its_speed_is_measured_on_steps_that_leave_somebody_waiting():
    scheduler = Scheduler(
        block_size=2, num_blocks=40, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=50, watermark=0.0
    )
    scheduler.add(request("a", (0, 1), max_tokens=20))
    scheduler.add(request("b", (0, 1), max_tokens=20))
    for number in range(5):
        step(scheduler, number / 2)
    assert 2.0 <= scheduler.statistics().tokens_per_s < 2.7, "a token each half second, and a prompt at first"


@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_a_prompts_blocks_are_cached_until_somebody_needs_the_room_or_live_on_in_the_host_tier(num_host_blocks: int):
    scheduler = Scheduler(
        block_size=2,
        num_blocks=9,
        max_num_seqs=1,
        max_num_batched_tokens=20,
        max_model_len=16,
        watermark=0.0,
        num_host_blocks=num_host_blocks,
        keeps_evicted=True,
    )
    first, other = request("a", (0, 1) * 5, max_tokens=1), request("b", (1, 1) * 7, max_tokens=1)
    hashes = [block_hash for some in scheduler.prompt_hashes(first) for block_hash in some]
    assert len(hashes) == 4
    assert not any(map(scheduler.is_cached, hashes))
    scheduler.add(first)
    step(scheduler, 0.0)
    assert all(map(scheduler.is_cached, hashes))
    scheduler.add(other)
    step(scheduler, 1.0)
    assert sum(map(scheduler.is_cached, hashes)) == (4 if num_host_blocks else 1)
    scheduler.reset_prefix_cache()
    assert not any(map(scheduler.is_cached, hashes))
