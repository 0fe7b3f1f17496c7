"""Scores and penalties of the whole engine against transformers, in float32: prompts in chunks, several at once."""

import asyncio
from itertools import cycle, repeat

import pytest
import torch

from aserve.build import AsyncEngine
from aserve.core.outputs import TextDelta
from aserve.core.params import SamplingParams
from tests.checkpoints import VOCAB_SIZE, checkpoints

__all__ = ["checkpoints"]
pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROMPTS = [[(7 * i + 3 * k) % VOCAB_SIZE for k in range(length)] for i, length in enumerate((1, 5, 40, 100))]


async def deltas_of(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> TextDelta:
    whole: TextDelta | None = None
    async for delta in engine.generate(prompt, params):
        whole = delta if whole is None else whole.merge(delta)
    assert whole is not None
    return whole


async def answers(folder: object, *params: SamplingParams) -> list[TextDelta]:
    """Of the prompts at once, which take the parameters in turn."""
    options = {"dtype": "float32", "device": "cpu", "block_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    async with AsyncEngine(folder, kv_cache_memory_bytes=2**22, max_logprobs=-1, **options) as engine:
        return await asyncio.gather(*map(deltas_of, repeat(engine), PROMPTS, cycle(params)))


@pytest.fixture
def oracle(checkpoints):
    from transformers import AutoModelForCausalLM

    folder = checkpoints("llama")
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def test_logprobs_and_prompt_logprobs_are_transformers(oracle):
    folder, model = oracle
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=5, prompt_logprobs=2)
    for prompt, answer in zip(PROMPTS, await answers(folder, params), strict=True):
        tokens = [*prompt, *answer.token_ids]
        with torch.inference_mode():
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        scores = [*answer.prompt_scores, *answer.scores]
        assert [score.token_id for score in scores] == tokens[1:]
        for place, score in enumerate(scores):
            expected = logprobs[place]
            assert score.logprob == pytest.approx(float(expected[score.token_id]), abs=1e-4)
            top = expected.topk(5 if place >= len(prompt) - 1 else 2).values.tolist()
            assert list(score.top_logprobs) == pytest.approx(top, abs=1e-4)


async def test_named_tokens_few_and_all_of_them_are_scored_in_one_step(oracle):
    """Catches scores that go to another row or token where a step has rows that ask differently."""
    folder, model = oracle
    named = (7, 3, VOCAB_SIZE - 1, 7)
    plain = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    asked = [
        SamplingParams(**plain, **more) for more in ({"logprob_token_ids": named}, {"logprobs": -1}, {"logprobs": 2})
    ]
    for num, (prompt, answer) in enumerate(zip(PROMPTS, await answers(folder, *asked), strict=True)):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
        for place, score in enumerate(answer.scores, start=len(prompt) - 1):
            logprobs = logits[place].log_softmax(-1)
            if num % 3 == 0:
                assert score.top_ids == named
            assert len(score.top_ids) == (len(named), VOCAB_SIZE, 2)[num % 3]
            assert sorted(score.top_logprobs, reverse=True) == list(score.top_logprobs) or num % 3 == 0
            assert list(score.top_logprobs) == pytest.approx(logprobs[list(score.top_ids)].tolist(), abs=1e-4)


async def test_a_repetition_penalty_is_transformers(oracle):
    folder, model = oracle
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, repetition_penalty=1.7)
    for prompt, answer in zip(PROMPTS, await answers(folder, params), strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            min_new_tokens=10,
            max_new_tokens=10,
            repetition_penalty=1.7,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()
