"""An engine whose runner says that it is lost: its requests end, whether or not a step is under way, and so does it."""

import asyncio

import pytest

from aserve.core.errors import AserveError, RankLostError, UnavailableError
from aserve.core.params import SamplingParams
from aserve.core.ports import MayBeLost
from aserve.engine import Engine, EngineState
from tests.engines import says, scripted_loader
from tests.fakes import FakeScript, ScriptedRunner


class LosableRunner(ScriptedRunner):
    """Says that it is lost when it is told to."""

    lost: AserveError | None = None


async def read_until_lost(engine: Engine, runner: LosableRunner) -> None:
    async with engine.open("go on", SamplingParams(max_tokens=100_000)) as mailbox:
        await anext(mailbox)
        runner.lost = RankLostError("rank 1 (process 7) ended with exit code 3")
        async for _ in mailbox:
            pass


async def live(engine: Engine, runner: LosableRunner, *, is_busy: bool) -> None:
    async with engine:
        if is_busy:
            with pytest.raises(UnavailableError) as told:
                await read_until_lost(engine, runner)
            assert told.value.retry_after_s
        runner.lost = RankLostError("rank 1 (process 7) was killed by signal 9 (SIGKILL)")
        async with asyncio.timeout(2.0):
            await engine.died.wait()
        assert engine.state is EngineState.DEAD
        with pytest.raises(UnavailableError):
            await engine.complete("again")


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_runner_that_is_lost_ends_the_engine(is_busy: bool) -> None:
    runner = LosableRunner(model=FakeScript(says("x" * 100_000)))
    assert isinstance(runner, MayBeLost)
    engine = Engine(scripted_loader(runner=runner, max_model_len=120_000, num_blocks=20_000))
    with pytest.raises(RankLostError, match="rank 1"):
        await live(engine, runner, is_busy=is_busy)


async def test_other_runners_are_never_asked() -> None:
    assert not isinstance(ScriptedRunner(model=FakeScript(says("x"))), MayBeLost)
