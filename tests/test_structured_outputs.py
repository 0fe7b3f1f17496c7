"""Answers that were asked to be JSON are valid, by jsonschema, which knows nothing of how they were made.

On the demonstration model, which writes what looks like text, and on random weights, which take any way that is open.
The default run draws a sample; `make test-thorough` runs sixty schemas with fifty seeds each on both.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from datetime import datetime, time

import jsonschema
import pytest

from aserve import AsyncEngine, Completion, FinishReason, SamplingParams, StructuredOutputs
from tests.structured_schemas import SCHEMAS

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROMPT = "Answer with JSON: "
CHECKER = jsonschema.FormatChecker(("date", "ipv4", "uuid"))


@CHECKER.checks("date-time", ValueError)
def is_date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value).tzinfo is not None


@CHECKER.checks("time", ValueError)
def is_time(value: object) -> bool:
    return not isinstance(value, str) or time.fromisoformat(value).tzinfo is not None


@pytest.fixture(params=["auto", "dummy"], ids=["demo", "random weights"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    options = {"max_model_len": 1024, "max_num_seqs": 64, "kv_cache_memory_bytes": 2**26}
    async with AsyncEngine("demo", load_format=request.param, **options) as engine:
        yield engine


async def answers(engine: AsyncEngine, schema: object, seeds: Iterable[int], **params: object) -> list[Completion]:
    """One for each seed."""
    structured = StructuredOutputs(json=schema)

    async def answer(seed: int) -> Completion:
        wanted = SamplingParams(structured=structured, seed=seed, max_tokens=960, **params)
        return await engine.complete(PROMPT, wanted)

    return await asyncio.gather(*map(answer, seeds))


def check_valid(schema: object, completions: Iterable[Completion]) -> None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    for completion in completions:
        assert completion.finish_reason is FinishReason.STOP, completion
        validator.validate(json.loads(completion.text))


def test_there_are_sixty_schemas_and_all_are_good_ones() -> None:
    assert len(SCHEMAS) == 60
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_a_sample_of_answers_is_valid(engine: AsyncEngine) -> None:
    """Every fourth schema, at temperature 1 and 0."""
    sample = SCHEMAS[::4]
    drawn = await asyncio.gather(*(answers(engine, schema, range(2), temperature=1.0) for schema in sample))
    greedy = await asyncio.gather(*(answers(engine, schema, [0], temperature=0.0) for schema in sample))
    for schema, completions in zip(sample * 2, [*drawn, *greedy], strict=True):
        check_valid(schema, completions)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
async def test_every_answer_is_valid(engine: AsyncEngine) -> None:
    for schema in SCHEMAS:
        check_valid(schema, await answers(engine, schema, range(50), temperature=1.0))
