"""The fakes are programs, and are tested like any: the runner's tokens are the oracle's, unless a block is wrong."""

import asyncio

import pytest

from aserve.core.plan import RowInit, RowSampling, SeqSlice, StepPlan
from aserve.core.ports import Runner
from tests.fakes import FakeClock, FakeScript, ScriptedRunner, continuation

GREEDY = RowSampling()
VOCABULARY = range(10)


def prefill(step_id: int, token_ids: tuple[int, ...], blocks: tuple[int, ...]) -> StepPlan:
    piece = SeqSlice(0, 0, 0, len(token_ids), token_ids, blocks, num_samples=1)
    return StepPlan(step_id, (piece,), (RowInit(0, 0, GREEDY),))


def decode(step_id: int, position: int, new_blocks: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(step_id, (SeqSlice(0, 0, position, 1, (), new_blocks, num_samples=1),))


async def test_the_tokens_are_those_of_the_oracle():
    runner: Runner = ScriptedRunner(block_size=2, vocabulary=VOCABULARY)
    plans = [prefill(0, (1, 2, 3), (5, 2)), decode(1, 3), decode(2, 4, (7,))]
    flights = [runner.launch(plan) for plan in plans]
    token_ids = [(await flight.land()).token_ids[0] for flight in flights]
    assert token_ids == continuation((1, 2, 3), 3, vocabulary=VOCABULARY)
    runner.close()


async def test_a_wrong_block_changes_the_token():
    kept, other = (ScriptedRunner(block_size=2) for _ in range(2))
    results = []
    for runner, tokens in ((kept, (1, 2, 3, 4)), (other, (1, 2, 9, 4))):
        runner.launch(prefill(0, tokens, (1, 2)))
        again = StepPlan(1, (SeqSlice(1, 1, 4, 1, (5,), (3,), num_samples=1),), (RowInit(1, 1, GREEDY, (1, 2)),))
        results.append((await runner.launch(again).land()).token_ids)
    assert results[0] == tuple(continuation((1, 2, 3, 4, 5), 1))
    assert results[0] != results[1]


async def test_landing_yields_to_other_tasks_and_waits_while_it_is_held():
    runner = ScriptedRunner()
    runner.hold()
    landing = asyncio.ensure_future(runner.launch(prefill(0, (1,), (1,))).land())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not landing.done()
    runner.let_land()
    assert (await landing).step_id == 0


async def test_errors_come_when_they_are_ordered():
    runner = ScriptedRunner(launch_errors={1: MemoryError("no")}, land_errors={0: RuntimeError("later")})
    flight = runner.launch(prefill(0, (1,), (1,)))
    with pytest.raises(MemoryError, match="no"):
        runner.launch(decode(1, 1))
    with pytest.raises(RuntimeError, match="later"):
        await flight.land()
    assert [plan.step_id for plan in runner.plans] == [0]


async def test_a_script_is_said_over_and_over():
    runner = ScriptedRunner(model=FakeScript([4, 5]))
    flights = [runner.launch(plan) for plan in (prefill(0, (1,), (1,)), decode(1, 1), decode(2, 2))]
    assert [(await flight.land()).token_ids for flight in flights] == [(4,), (5,), (4,)]


def test_banned_tokens_are_not_sampled_before_their_time():
    plain = continuation((1, 2), 6, vocabulary=range(2))
    banned = continuation((1, 2), 6, vocabulary=range(2), stop_ids={1}, min_tokens=5)
    assert 1 in plain[:5]
    assert banned[:5] == [0] * 5


def test_the_clock_stands_still_until_told():
    clock = FakeClock(3.0)
    clock.advance(0.5)
    assert clock() == 3.5
