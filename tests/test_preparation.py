"""Long prompts: checked and hashed piece by piece, and to the same effect as short ones."""

import asyncio
from itertools import pairwise

import pytest

from aserve.core.errors import InvalidRequestError
from aserve.core.params import SamplingParams
from aserve.preparation import SHORT_PROMPT_TOKENS, TOKENS_AT_ONCE
from tests.engines import scripted_engine


async def test_a_long_prompt_is_hashed_before_it_is_opened_and_finds_what_a_short_one_left():
    prompt = [index % 250 for index in range(TOKENS_AT_ONCE + 100)]
    async with scripted_engine(max_model_len=8192, num_blocks=2400) as engine:
        await engine.complete(prompt[:SHORT_PROMPT_TOKENS])
        answer = await engine.complete(prompt)
        assert answer.num_cached_tokens == SHORT_PROMPT_TOKENS
        assert (await engine.complete(prompt)).num_cached_tokens == TOKENS_AT_ONCE + 96  # but the block of the last one


async def test_they_are_prepared_in_turn_with_each_other_and_with_the_rest_of_the_event_loop(monkeypatch):
    checked, turn = [], 0

    async def count_turns():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def check(field, token_ids, vocab_size):
        checked.append((token_ids[0], len(token_ids), turn))

    monkeypatch.setattr("aserve.preparation.check_ids", check)
    num_tokens = 3 * TOKENS_AT_ONCE
    async with scripted_engine(max_model_len=num_tokens + 100, num_blocks=8000) as engine:
        counting = asyncio.create_task(count_turns())
        await asyncio.gather(*(engine.complete([token_id] * num_tokens) for token_id in (1, 2)))
        counting.cancel()
    assert [piece[:2] for piece in checked] == [(1, TOKENS_AT_ONCE), (2, TOKENS_AT_ONCE)] * 3
    assert all(earlier[2] < later[2] for earlier, later in pairwise(checked))


@pytest.mark.parametrize("num_before", [3, SHORT_PROMPT_TOKENS - 1, SHORT_PROMPT_TOKENS, TOKENS_AT_ONCE + 1])
async def test_an_id_that_is_none_is_refused_wherever_it_is(num_before):
    async with scripted_engine(max_model_len=8192, num_blocks=2400) as engine:
        with pytest.raises(InvalidRequestError, match="prompt: token id 9999 is out of vocabulary, not in"):
            await engine.complete([1] * num_before + [9999] + [1] * 100)


async def test_who_leaves_while_a_long_prompt_is_prepared_keeps_nobody_waiting():
    prompt = [1] * (4 * TOKENS_AT_ONCE)
    async with scripted_engine(max_model_len=5 * TOKENS_AT_ONCE, num_blocks=8000) as engine:
        leaving = [asyncio.create_task(engine.complete(prompt)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        assert (await asyncio.wait_for(engine.complete(prompt), 60)).token_ids
        assert all(task.cancelled() for task in leaving)
        assert engine.statistics().num_running == 0


async def test_the_first_id_behind_the_vocabulary_is_refused_and_the_last_of_it_is_not():
    """Catches an id that reaches the device, where it reads what lies behind a table."""
    async with scripted_engine() as engine:
        vocab_size = engine.info.vocab_size
        await engine.complete([vocab_size - 1], SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequestError, match=f"token id {vocab_size} is out of vocabulary"):
            await engine.complete([vocab_size], SamplingParams(max_tokens=1))
