"""Two ranks, each a process of its own, answer what one process does: token by token, in float32.

Who is compared runs in a crowd, on an engine of two ranks, under what the combination says (drafts, preemption, windows
...); what is expected, an engine of one process has said that does nothing else. Sums of two halves are rounded in
another way than the whole: so tokens are equal, and scores nearly.

    python -m pytest -m thorough tests/parallel        every two features, every family, a draft model, vectors
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from aserve import LLM, AsyncEngine, Completion, SamplingParams
from tests.checkpoints import NATIVE_RECIPES
from tests.test_combinations import ASKED, PAIRS, Combination, Engines, Watch, check, watch

__all__ = ["watch"]
pytestmark = [pytest.mark.torch, pytest.mark.slow]

TOLERANCE = 2e-3
CONDITIONS = ("drafts", "swapped")
"""Of the engine that the short tests share."""
OFTEN = ("constraint", "beams", "logprobs", "adapter")
PROMPTS = (tuple(range(40, 90)), (5, 6, 7) * 9, (300, 12))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("ranks"), num_ranks=2)
    yield engines
    engines.close()


def assert_nearly(answers: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Tokens, texts and ends are the same; scores are near."""
    assert [(a.token_ids, a.text, a.finish_reason) for a in answers] == [
        (e.token_ids, e.text, e.finish_reason) for e in expected
    ]
    for answer, wanted in zip(answers, expected, strict=True):
        assert scores_of(answer) == pytest.approx(scores_of(wanted), abs=TOLERANCE)
        assert len(scores_of(answer)) == len(scores_of(wanted))


def scores_of(completion: Completion) -> list[float]:
    """All numbers that it was told."""
    found = [completion.cumulative_logprob] if completion.cumulative_logprob is not None else []
    for score in (*completion.scores, *completion.prompt_scores):
        found += [score.logprob, *score.top_logprobs]
    return found


@pytest.mark.parametrize("feature", OFTEN)
def test_with_drafts_where_memory_is_short(engines: Engines, watch: Watch, feature: str) -> None:
    """Catches a rank that moves other blocks, accepts other drafts, or has another last token than rank 0."""
    engines.run(check(engines, watch, (*CONDITIONS, feature), compare=assert_nearly))


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("feature", sorted({*ASKED, "adapter", "fork", "stop"} - set(OFTEN)))
def test_with_drafts_where_memory_is_short_too(engines: Engines, watch: Watch, feature: str) -> None:
    engines.run(check(engines, watch, (*CONDITIONS, feature), compare=assert_nearly))


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("combination", PAIRS, ids="+".join)
def test_two_features_together(engines: Engines, watch: Watch, combination: Combination) -> None:
    engines.run(check(engines, watch, combination, compare=assert_nearly))


async def completions(model: Path | str, params: SamplingParams, **options: Any) -> list[Completion]:
    """Of the prompts, side by side, and once more when their beginnings are cached."""
    async with AsyncEngine(model, dtype="float32", max_num_batched_tokens=32, **options) as engine:
        return [
            completion
            for _ in range(2)
            for completion in await asyncio.gather(*(engine.complete(prompt, params) for prompt in PROMPTS))
        ]


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", NATIVE_RECIPES)
def test_every_family(checkpoints: Callable[[str], Path], recipe: str) -> None:
    """In chunks of 32 tokens, and from the prefix cache."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    alone, together = (
        asyncio.run(completions(checkpoints(recipe), params, max_model_len=120, tensor_parallel_size=size))
        for size in (1, 2)
    )
    assert_nearly(together, alone)
    assert any(completion.num_cached_tokens for completion in together)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_guesses_for_all_ranks(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=60, ignore_eos=True)
    speculative = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 4}
    alone = asyncio.run(completions("demo", params))
    together = asyncio.run(completions("demo", params, tensor_parallel_size=2, speculative_config=speculative))
    assert_nearly(together, alone)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_vectors(checkpoints: Callable[[str], Path]) -> None:
    """Rank 0 pools; the others compute the hidden states with it."""
    texts = ["hello world", "the question and the answer", "a" * 90]
    vectors = []
    for size in (1, 2):
        options: dict[str, Any] = {"runner": "pooling", "dtype": "float32", "max_num_batched_tokens": 32}
        with LLM(checkpoints("qwen3"), tensor_parallel_size=size, **options) as llm:
            vectors.append([list(output.values) for output in llm.embed(texts)])
    for one, two in zip(*vectors, strict=True):
        assert two == pytest.approx(one, abs=1e-4)
