"""Several inputs of a model that pools: what happens to all when something happens to one."""

import asyncio

import numpy as np
import pytest

from aserve.core.errors import AserveError, InvalidRequestError, OverloadedError, QueueTimeoutError
from aserve.core.pooling import Pooling, PoolingParams, TokenizedInput
from aserve.vectors import Vectors
from tests.engines import scripted_engine
from tests.fakes import FakePooler, ScriptedRunner

EMBEDS = Pooling(task="embed", method="last", size=4, activation="none")


async def test_an_input_that_is_cancelled_by_nobody_is_told_as_what_it_is(monkeypatch):
    """Catches a missing vector that is noticed, if at all, by where it is looked for."""
    pool = Vectors.pool

    async def fail(self, tokens, *arguments, **options):
        if tokens.token_ids == (2,):
            raise asyncio.CancelledError
        return await pool(self, tokens, *arguments, **options)

    async with scripted_engine(pooling=EMBEDS) as engine:
        monkeypatch.setattr(Vectors, "pool", fail)
        with pytest.raises(RuntimeError, match="nobody cancelled"):
            await engine.pool_all([TokenizedInput((number,)) for number in range(1, 4)])
        await asyncio.sleep(0)
        assert engine.statistics().num_used_blocks == 0


async def test_an_input_without_a_vector_has_an_error_that_says_why():
    """Catches an end before the vector that is told as a fault of ours."""
    runner = ScriptedRunner(model=FakePooler())
    runner.hold()
    async with scripted_engine(pooling=EMBEDS, runner=runner) as engine:
        with pytest.raises(QueueTimeoutError, match="deadline came before its vector"):
            await engine.embed((1, 2), timeout_s=0.02)
        aborted = asyncio.create_task(engine.embed((1, 2), request_id="a"))
        while not engine.abort("a"):  # noqa: ASYNC110  it is open when it is
            await asyncio.sleep(0)
        with pytest.raises(AserveError, match="was aborted"):
            await aborted
        runner.let_land()
        assert engine.statistics().num_used_blocks == 0


async def test_what_the_model_cannot_give_is_refused_before_anything_is_computed():
    """Catches a length of vectors that is looked at by the faces alone, and not where applications come in."""
    async with scripted_engine(pooling=EMBEDS) as engine:
        with pytest.raises(InvalidRequestError, match="dimensions: this model's config does not say"):
            async with engine.open_input(TokenizedInput((1, 2)), PoolingParams(dimensions=2)):
                pass
        assert not any(engine.statistics().num_steps_by_tokens.values())


async def test_an_input_for_which_there_is_no_room_is_not_prepared(monkeypatch):
    """Catches a full server that hashes what it will refuse."""
    async with scripted_engine(pooling=EMBEDS) as engine:
        prepared = []
        monkeypatch.setattr(engine._preparer, "prepared", prepared.append)
        monkeypatch.setattr(engine._ready().scheduler, "check_room", refuse)
        with pytest.raises(OverloadedError, match="full"):
            await engine.embed((1, 2))
        assert prepared == []


def refuse(*_terms: object) -> None:
    raise OverloadedError("full", 1)


@pytest.mark.parametrize(
    ("field", "given", "allowed"),
    [
        ("truncate_prompt_tokens", "x", r"an integer in \[-1, 2147483647\]"),
        ("truncate_prompt_tokens", 1.5, r"an integer in \[-1, 2147483647\]"),
        ("truncate_prompt_tokens", -2, r"in \[-1, 2147483647\]"),
        ("truncate_prompt_tokens", 0, "-1, or at least 1"),
        ("truncation_side", "middle", "one of left, right"),
        ("add_special_tokens", 1, "True or False"),
    ],
)
async def test_how_an_input_becomes_tokens_is_checked(field, given, allowed):
    """Catches an option that is looked at by HTTP alone."""
    async with scripted_engine(pooling=EMBEDS, runner=ScriptedRunner(model=FakePooler())) as engine:
        with pytest.raises(InvalidRequestError, match=f"^{field} must be {allowed}, got {given!r}") as caught:
            await engine.embed("hello", **{field: given})
        assert caught.value.param == field
        cut = await engine.embed("hello", truncate_prompt_tokens=np.int64(2), truncation_side="left")
        assert bytes(cut.prompt_token_ids) == b"lo"


@pytest.mark.parametrize(("pair", "field"), [(([1, 2], "a"), "query"), (("a", 5), "document"), ((None, "a"), "query")])
async def test_what_is_scored_are_texts(pair, field):
    """Catches token ids, of which a pair cannot be made, and whatever else is no text."""
    async with scripted_engine(pooling=EMBEDS, runner=ScriptedRunner(model=FakePooler())) as engine:
        with pytest.raises(InvalidRequestError, match=f"^{field} must be a string, got "):
            await engine.score(*pair)
