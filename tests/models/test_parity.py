"""Every family against transformers, float32: logits over the paged cache, and greedy tokens against `generate`."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from aserve.kernels.reference import ReferenceOps
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.interface import CausalLM
from aserve.models.loader import load_model
from tests.checkpoints import BACKEND_RECIPES, NATIVE_RECIPES, VOCAB_SIZE
from tests.models.paged import PagedSequences

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4
PROMPT_LENS = (1, 2, 7, 40, 200)
NUM_NEW = 8


@pytest.fixture(scope="module")
def pairs(checkpoints: Callable[[str], Path]) -> Callable[[str], tuple[Any, Any]]:
    """recipe -> (our model, transformers' model)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    @cache
    def pair(recipe: str) -> tuple[Any, Any]:
        folder = checkpoints(recipe)
        ours = load_model(resolve_checkpoint(str(folder)), device="cpu", ops=ReferenceOps())
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        theirs.generation_config.eos_token_id = None
        return ours, theirs

    return pair


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed + length)).tolist()


def generate_together(model: CausalLM, prompts: list[list[int]], num_new: int, chunk: int = 48) -> list[list[int]]:
    """Greedy answers, all sequences in the same steps: short prompts decode while long ones are still in chunks."""
    sequences = PagedSequences(model, num_sequences=len(prompts))
    pending = [list(tokens) for tokens in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    while any(len(answer) < num_new for answer in answers):
        step = [(s, tokens[:chunk]) for s, tokens in enumerate(pending) if len(answers[s]) < num_new]
        for s, logits in sequences.run(step).items():
            del pending[s][:chunk]
            if not pending[s]:
                answers[s].append(int(logits[-1].argmax()))
                pending[s] = answers[s][-1:]
    return answers


def their_answer(theirs: Any, tokens: list[int], num_new: int) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        whole = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, pad_token_id=0
        )
    return whole[0, len(tokens) :].tolist()


def their_logits(theirs: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return theirs(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("recipe", NATIVE_RECIPES + BACKEND_RECIPES)
def test_logits_of_chunks_then_single_tokens_equal_transformers_full_forward(recipe, pairs):
    ours, theirs = pairs(recipe)
    tokens = prompt(120)
    sequences = PagedSequences(ours)
    pieces = [tokens[:37], tokens[37:38], tokens[38:100], *([token] for token in tokens[100:])]
    logits = torch.cat([sequences.run([(0, piece)])[0] for piece in pieces])
    torch.testing.assert_close(logits, their_logits(theirs, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("recipe", NATIVE_RECIPES + BACKEND_RECIPES)
def test_greedy_tokens_of_a_mixed_batch_equal_generate_one_by_one(recipe, pairs):
    ours, theirs = pairs(recipe)
    lens = [length for length in PROMPT_LENS if length + NUM_NEW <= theirs.config.max_position_embeddings]
    prompts = [prompt(length) for length in lens]
    for tokens, answer in zip(prompts, generate_together(ours, prompts, NUM_NEW), strict=True):
        assert answer == their_answer(theirs, tokens, NUM_NEW), f"prompt of {len(tokens)}"


def test_dynamic_rope_equals_generate_beyond_the_original_length(pairs):
    ours, theirs = pairs("llama_dynamic")
    assert theirs.config.max_position_embeddings == 128
    tokens = prompt(120)
    assert generate_together(ours, [tokens], 40) == [their_answer(theirs, tokens, 40)]
