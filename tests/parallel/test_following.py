"""Ranks in lockstep: what they answer together, and what becomes of steps that fail on one of them. As threads."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aserve import AsyncEngine
from aserve.core.errors import AserveError, StepFailedError
from aserve.core.outputs import Completion
from aserve.core.params import SamplingParams
from aserve.engine import Engine
from aserve.runner.following import FollowingStep
from aserve.runner.parallel import ParallelRunner
from aserve.runner.sampler import Sampled
from aserve.runner.step import EagerStep, wanted
from tests.parallel.test_parity import assert_nearly
from tests.parallel.threads import threaded_engine

pytestmark = [pytest.mark.torch, pytest.mark.slow]

OPTIONS = {"max_model_len": 128, "block_size": 8, "kv_cache_memory_bytes": 40 * 2048, "max_num_batched_tokens": 32}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
SEEDED = SamplingParams(
    temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, prompt_logprobs=1, presence_penalty=0.5
)
POISON = 77
"""A token at which a rank's model raises."""
REQUESTS = ((tuple(range(100, 150)), GREEDY), ((9, 8, 7) * 5, SEEDED), ((31,), GREEDY))


async def ask(engine: Engine, *more: tuple[tuple[int, ...], SamplingParams]) -> list[Completion | AserveError]:
    async with engine:
        asked = (engine.complete(prompt, params) for prompt, params in (*REQUESTS, *more))
        return await asyncio.gather(*asked, return_exceptions=True)


@pytest.fixture(scope="module")
def model(checkpoints: Callable[[str], Path]) -> str:
    return str(checkpoints("qwen2"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[Any]:
    return asyncio.run(ask(threaded_engine(model, 1, **OPTIONS)[0]))


def poisoned(forward: Callable[..., torch.Tensor], times: int = 10**9) -> Callable[..., torch.Tensor]:
    """A forward pass that raises where a step has the token, so many times."""
    left = [times]

    def raising(token_ids_T: torch.Tensor, *args: Any) -> torch.Tensor:
        hidden_TE = forward(token_ids_T, *args)
        if POISON in token_ids_T.tolist() and left[0]:
            left[0] -= 1
            raise ZeroDivisionError
        return hidden_TE

    return raising


def test_beside_a_rank_that_pools_every_hidden_state_is_computed() -> None:
    """Sums over ranks are of as many rows on each of them."""
    asked = []
    own = SimpleNamespace(
        model=SimpleNamespace(spec=SimpleNamespace(has_head=False)),
        forward=lambda _batch, wanted_N=None: asked.append(wanted_N),
    )
    tokens_N = torch.tensor([3])
    batch = SimpleNamespace(
        token_ids_T=torch.zeros(4), sampled_tokens_N=tokens_N, sampled_rows_N=tokens_N, prompt_targets=None, lora=None
    )
    assert wanted(batch) is tokens_N
    output = FollowingStep(own, group=None).execute(batch)
    assert asked == [None]
    assert output.ids_N is tokens_N


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_answer_as_one_does(model: str, expected: list[Any], size: int) -> None:
    assert_nearly(asyncio.run(ask(threaded_engine(model, size, **OPTIONS)[0])), expected)


def test_with_blocks_that_are_swapped(model: str, expected: list[Any]) -> None:
    tight = OPTIONS | {"kv_cache_memory_bytes": 17 * 2048, "swap_space": 0.001, "preemption_mode": "swap"}
    engine, _ = threaded_engine(model, 2, **tight)
    assert_nearly(asyncio.run(ask(engine)), expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_makes_a_step_fail_on_any_rank_fails_alone(model: str, expected: list[Any], rank: int) -> None:
    """Behind a step that failed, ranks meet again; catches one that waits for another that has given up."""
    engine, models = threaded_engine(model, 2, **OPTIONS)
    models[rank].forward = poisoned(models[rank].forward)
    *answers, culprit = asyncio.run(ask(engine, ((POISON, 1, 2), GREEDY)))
    assert isinstance(culprit, StepFailedError)
    assert_nearly(answers, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_once_is_computed_again(model: str, expected: list[Any], rank: int) -> None:
    engine, models = threaded_engine(model, 2, **OPTIONS)
    models[rank].forward = poisoned(models[rank].forward, times=1)
    *answers, unlucky = asyncio.run(ask(engine, ((POISON, 1, 2), GREEDY)))
    assert isinstance(unlucky, Completion)
    assert_nearly(answers, expected)


async def ask_with_a_fault(model: str) -> list[Any]:
    """Of two processes, the first of which fails at the poison."""
    async with AsyncEngine(model, dtype="float32", tensor_parallel_size=2, **OPTIONS) as engine:
        runner = engine._ready().runner
        assert isinstance(runner, ParallelRunner)
        assert runner.first._stages is not None
        step = runner.first._stages[2]
        assert isinstance(step, EagerStep)
        step.model.forward = poisoned(step.model.forward)
        asked = (engine.complete(prompt, params) for prompt, params in (*REQUESTS, ((POISON, 1, 2), GREEDY)))
        return await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.thorough
def test_a_process_that_lost_the_first_in_a_step_meets_it_again(model: str, expected: list[Any]) -> None:
    *answers, culprit = asyncio.run(ask_with_a_fault(model))
    assert isinstance(culprit, StepFailedError)
    assert_nearly(answers, expected)


def test_a_rank_that_misses_a_token_is_found_out(
    model: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: these tests would notice."""
    sample = FollowingStep.sample

    def forgetful(step: FollowingStep, *args: Any) -> Sampled:
        last_token_R = step.own.rows.last_token_R.clone()
        sampled = sample(step, *args)
        step.own.rows.last_token_R.copy_(last_token_R)
        return sampled

    monkeypatch.setattr(FollowingStep, "sample", forgetful)
    answers = asyncio.run(ask(threaded_engine(model, 2, **OPTIONS)[0]))
    assert [answer.token_ids for answer in answers] != [wanted.token_ids for wanted in expected]
