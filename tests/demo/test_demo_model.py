"""The bundled model answers its fixed questions, word for word, all of them at once and greedily."""

import asyncio

import pytest

from aserve import AsyncEngine, SamplingParams
from aserve.core.outputs import FinishReason
from aserve.model_folder import DEMO_FOLDER
from tests.demo.questions import HELD_OUT, MISTAKES, QUESTIONS, STORIES

pytestmark = [pytest.mark.torch, pytest.mark.slow]

MAX_WEIGHT_BYTES = 8_000_000
GREEDY = SamplingParams(temperature=0.0, max_tokens=256)


async def ask_all(conversations):
    """The whole answers, in the order of the questions; every one must have come to its own end."""
    async with AsyncEngine("demo", device="cpu", kv_cache_memory_bytes=2**25) as engine:
        prompts = [await engine.encode_chat(messages) for messages in conversations]
        answers = await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in prompts))
    assert {answer.finish_reason for answer in answers} == {FinishReason.STOP}
    return [answer.text for answer in answers]


@pytest.mark.parametrize("questions", [QUESTIONS, HELD_OUT], ids=["questions", "held out"])
async def test_every_answer_is_right(questions):
    questions = [(messages, expected) for messages, expected in questions if messages[-1]["content"] not in MISTAKES]
    answers = await ask_all([messages for messages, _ in questions])
    wrong = {
        messages[-1]["content"]: (answer, expected)
        for (messages, expected), answer in zip(questions, answers, strict=True)
        if answer != expected
    }
    assert not wrong, f"{len(wrong)} of {len(questions)}"


async def test_stories_are_about_what_was_asked_for():
    for (_, words), story in zip(STORIES, await ask_all([messages for messages, _ in STORIES]), strict=True):
        assert all(word in story for word in words), story
        assert len(story.split()) > 20, story


def test_there_are_enough_questions():
    assert len(QUESTIONS) - len(MISTAKES) >= 25


def test_the_model_is_small():
    assert (DEMO_FOLDER / "model.safetensors").stat().st_size <= MAX_WEIGHT_BYTES
