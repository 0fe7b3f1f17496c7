"""Beam search against transformers' `generate`, in float32: tokens and scores of 200 random searches.

They run together, in a pool so small that beams are preempted, over the real scheduler and runner.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aserve.build import load, make_options
from aserve.core.ids import RequestId
from aserve.core.outputs import SeqDelta
from aserve.core.params import BeamParams, SamplingParams
from aserve.core.request import Request
from aserve.kernels.reference import ReferenceOps
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.loader import load_model
from aserve.scheduler.scheduler import Scheduler
from tests.checkpoints import VOCAB_SIZE, checkpoints

__all__ = ["checkpoints"]
pytestmark = [pytest.mark.torch, pytest.mark.slow]

NUM_SEARCHES = 100
SEED = 12
"""With some others two beams tie to 1e-7, and what follows is a matter of rounding: qwen3 with 11 has such a pair."""
BLOCK_SIZE = 8
PAD = 0


class Search(msgspec.Struct, frozen=True):
    """What both are asked."""

    prompt: tuple[int, ...]
    beam: BeamParams
    num_returned: int
    max_tokens: int
    eos_ids: tuple[int, ...]


def random_search(rng: random.Random) -> Search:
    """An eighth of the vocabulary ends a beam, so that most searches see several hypotheses finish."""
    width = rng.randint(2, 4)
    return Search(
        prompt=tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 30))),
        beam=BeamParams(
            width=width,
            length_penalty=rng.choice((-1.0, 0.0, 0.5, 1.0, 2.0)),
            early_stopping=rng.choice((True, False, "never")),
        ),
        num_returned=rng.randint(1, width),
        max_tokens=rng.randint(1, 16),
        eos_ids=tuple(rng.sample(range(1, VOCAB_SIZE), rng.choice((1, VOCAB_SIZE // 8)))),
    )


def searched(folder: Path, searches: list[Search]) -> tuple[dict[str, list[SeqDelta]], Scheduler]:
    """Every search at once through the scheduler and the runner that an engine on `folder` has."""
    spec = load_model(resolve_checkpoint(str(folder)), device="cpu", ops=ReferenceOps()).spec
    options = make_options(
        model=folder,
        dtype="float32",
        device="cpu",
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=33 * BLOCK_SIZE * spec.kv_bytes_per_token(4),
        max_num_seqs=24,
        max_num_batched_tokens=64,
        max_model_len=64,
    )
    parts = load(options, lambda _progress: None)
    for index, search in enumerate(searches):
        parts.scheduler.add(
            Request(
                id=RequestId(str(index)),
                prompt_token_ids=search.prompt,
                params=SamplingParams(beam=search.beam, n=search.num_returned),
                max_tokens=search.max_tokens,
                seed=0,
                arrival_s=0.0,
                stop_ids=frozenset(search.eos_ids),
                eos_ids=frozenset(search.eos_ids),
            )
        )
    found: dict[str, list[SeqDelta]] = {}
    while (plan := parts.scheduler.plan(0.0)) is not None:
        for delta in parts.scheduler.commit(parts.runner.run(plan)).deltas:
            found.setdefault(delta.request_id, []).append(delta)
    parts.runner.close()
    return found, parts.scheduler


def expected(model: Any, search: Search) -> tuple[list[list[int]], list[float]]:
    """Tokens, padding cut off, and scores."""
    ids = torch.tensor([search.prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=search.beam.width,
            num_return_sequences=search.num_returned,
            length_penalty=search.beam.length_penalty,
            early_stopping=search.beam.early_stopping,
            max_new_tokens=search.max_tokens,
            do_sample=False,
            eos_token_id=list(search.eos_ids),
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
        )
    answers = output.sequences[:, len(search.prompt) :].tolist()
    return [_until_eos(answer, search.eos_ids) for answer in answers], output.sequences_scores.tolist()


def _until_eos(answer: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    end = next((at for at, token in enumerate(answer) if token in eos_ids), len(answer) - 1)
    return answer[: end + 1]


@pytest.mark.parametrize("num_searches", [20, pytest.param(NUM_SEARCHES, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("recipe", ["llama", "qwen3"])
def test_beams_equal_those_of_generate(recipe, num_searches, checkpoints):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    rng = random.Random(SEED)
    searches = [random_search(rng) for _ in range(num_searches)]
    found, scheduler = searched(checkpoints(recipe), searches)
    counts = scheduler.statistics()
    assert counts.num_preemptions > 0 or num_searches < NUM_SEARCHES  # a few alone need not run out of blocks
    assert counts.num_copied_blocks > 0
    assert counts.num_used_blocks == 0

    model = AutoModelForCausalLM.from_pretrained(checkpoints(recipe), attn_implementation="eager")
    for index, search in enumerate(searches):
        answers, scores = expected(model, search)
        deltas = found[str(index)]
        assert [list(delta.token_ids) for delta in deltas] == answers, search
        for delta, score in zip(deltas, scores, strict=True):
            length = len(delta.token_ids) ** search.beam.length_penalty
            assert delta.cumulative_logprob / length == pytest.approx(score, abs=1e-4, rel=1e-6), search
