"""The whole engine against transformers' `generate`, in float32: 32 mixed requests at once, token for token.

The pool is so small and the token budget so tight that prompts are computed in chunks, prefixes are found in the cache
and sequences are preempted; the test asserts that all of it happened before it believes the equality.
"""

import asyncio
import dataclasses
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from aserve import engine
from aserve.build import load, make_options
from aserve.core.layout import stretched
from aserve.core.outputs import Completion
from aserve.core.params import SamplingParams
from aserve.core.plan import StepPlan
from aserve.core.ports import Flight, Runner
from aserve.kernels.reference import ReferenceOps
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.loader import load_model
from aserve.scheduler.statistics import Statistics
from tests.checkpoints import VOCAB_SIZE, checkpoints

__all__ = ["checkpoints"]
pytestmark = [pytest.mark.torch, pytest.mark.slow]

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen2_windows", "qwen3")
ARCHITECTURES = ("opt", "gpt2", "gemma", "gemma2", "gemma3", "phi3", "gpt_neox", "starcoder2")
NUM_REQUESTS = 32
MAX_TOKENS = 14
BLOCK_SIZE = 8
NUM_BLOCKS = 65
SMALLER_POOLS = {"mistral": 18, "phi3": 18, "gemma2": 25, "qwen2_windows": 27, "gemma3": 21}
"""Where sliding windows keep so little that the others would not run short: blocks for all layers of a model."""
TOKEN_BUDGET = 47


class RecordingRunner:
    """A runner that remembers its plans."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Flight:
        self.plans.append(plan)
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()


def mixed_prompts() -> list[list[int]]:
    """1 to 200 tokens; every other one begins with one of two shared texts."""
    rng = random.Random(7)
    shared = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (40, 72)]
    prompts = []
    for i in range(NUM_REQUESTS):
        prefix = shared[i // 2 % 2] if i % 2 else []
        own = rng.choice((1, 2, 7, 8, 30, 90, 200 - len(prefix)))
        prompts.append(prefix + [rng.randrange(VOCAB_SIZE) for _ in range(own)])
    return prompts


async def serve(
    folder: Path, prompts: list[list[int]], device: str, num_blocks: int
) -> tuple[list[Completion], Statistics, list[StepPlan]]:
    """All prompts at once through an engine on `folder`."""
    spec = load_model(resolve_checkpoint(str(folder)), device="cpu", ops=ReferenceOps()).spec
    options = make_options(
        model=folder,
        dtype="float32",
        device=device,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=num_blocks * BLOCK_SIZE * spec.kv_bytes_per_token(4),
        max_num_seqs=12,
        max_num_batched_tokens=TOKEN_BUDGET,
        max_model_len=240,
    )
    recorder: list[RecordingRunner] = []

    def load_recorded(report: Callable[[engine.Progress], None]) -> engine.EngineParts:
        parts = load(options, report)
        recorder.append(RecordingRunner(parts.runner))
        return dataclasses.replace(parts, runner=recorder[0])

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    async with engine.Engine(load_recorded) as served:
        completions = await asyncio.gather(*(served.complete(prompt, params) for prompt in prompts))
        return list(completions), served.statistics(), recorder[0].plans


@pytest.fixture(scope="module")
def generate(checkpoints: Callable[[str], Path]) -> Callable[[str, list[int]], list[int]]:
    """(recipe, prompt) -> transformers' greedy continuation, the end token included."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    @cache
    def model(recipe: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(checkpoints(recipe), attn_implementation="eager")

    def continuation(recipe: str, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model(recipe).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        return whole[0, len(prompt) :].tolist()

    return continuation


@pytest.mark.parametrize("recipe", FAMILIES + ARCHITECTURES)
async def test_mixed_requests_equal_generate_one_by_one(recipe, checkpoints, generate):
    await check_parity(recipe, checkpoints, generate, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", FAMILIES + ARCHITECTURES)
async def test_a_gpu_gives_the_same(recipe, checkpoints, generate):
    await check_parity(recipe, checkpoints, generate, "cuda")


async def check_parity(recipe, checkpoints, generate, device):
    prompts = mixed_prompts()
    num_blocks = SMALLER_POOLS.get(recipe, NUM_BLOCKS)
    completions, statistics, plans = await serve(checkpoints(recipe), prompts, device, num_blocks)

    pieces = [piece for plan in plans for piece in plan.slices]
    assert any(piece.num_tokens > 1 and not piece.num_samples for piece in pieces), "no prompt was computed in chunks"
    assert any(len({piece.num_tokens > 1 for piece in plan.slices}) == 2 for plan in plans), "no step was mixed"
    assert max(plan.num_tokens for plan in plans) <= stretched(TOKEN_BUDGET, TOKEN_BUDGET) == 48
    assert statistics.num_cache_hits > 0
    assert statistics.num_preemptions > 0
    assert statistics.num_used_blocks == 0

    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.token_ids) == generate(recipe, prompt), f"prompt of {len(prompt)} tokens"
