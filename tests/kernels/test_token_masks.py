"""Masks of tokens: which logits they leave, that other rows are left alone, and the twins."""

import math

import pytest
import torch

from aserve.kernels.ops import TokenMasks
from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast, controls, sampling

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()


def masks(rows: list[int], words: list[list[int]], device: torch.device) -> TokenMasks:
    signed = [[word - 2**32 if word >= 2**31 else word for word in row] for row in words]
    return TokenMasks(
        torch.tensor(rows, dtype=torch.int64, device=device), torch.tensor(signed, dtype=torch.int32, device=device)
    )


def masked(sampler: Fast, logits: torch.Tensor, batch: TokenMasks) -> torch.Tensor:
    """The fast result, which must be the twin's to the bit."""
    expected, actual = logits.clone(), logits.clone()
    TWIN.mask_logits(expected, batch)
    sampler.ops.mask_logits(actual, batch)
    assert torch.equal(actual, expected)
    return actual


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 5000])
def test_the_twins_agree_at_every_edge_of_a_word(sampler: Fast, vocab_size: int) -> None:
    """A shift, a sign or a tail that was wrong would let a token through, or take one."""
    num_words = -(-vocab_size // 32)
    words = torch.randint(0, 2**32, (2, num_words), dtype=torch.int64).tolist()
    logits = sampler.randn(4, vocab_size)
    changed = masked(sampler, logits, masks([3, 1], words, sampler.device))
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    for row, row_words in ((3, words[0]), (1, words[1])):
        allowed = [bool(row_words[i // 32] >> (i % 32) & 1) for i in range(vocab_size)]
        kept = torch.where(torch.tensor(allowed, device=logits.device), logits[row], -math.inf)
        assert torch.equal(changed[row], kept)


def test_a_token_comes_from_what_is_left(sampler: Fast) -> None:
    """Bits 31 and 32 are the last of a word, which is its sign, and the first of the next."""
    logits = sampler.randn(2, 70)
    changed = masked(sampler, logits, masks([0, 1], [[2**31, 0, 0], [0, 1, 0]], sampler.device))
    assert sampler.ops.sample(changed, sampling(2, device=sampler.device)).tolist() == [31, 32]


def test_a_row_of_which_nothing_is_left_has_no_token(sampler: Fast) -> None:
    """Unlike a ban, a mask is never void: what it forbids would not be what was asked for."""
    logits = masked(sampler, sampler.randn(2, 40), masks([0], [[0, 0]], sampler.device))
    ids = sampler.ops.sample(logits, sampling(2, temperature=0.0, device=sampler.device)).tolist()
    assert ids[0] == -1
    assert ids[1] >= 0


def test_bans_that_leave_nothing_of_a_mask_are_void_and_the_mask_is_not(sampler: Fast) -> None:
    logits = masked(sampler, sampler.randn(1, 40), masks([0], [[0b1100, 0]], sampler.device))
    banned = controls([0], vocab_size=40, banned=[[2, 3]], device=sampler.device)
    sampler.ops.control_logits(logits, banned)
    assert sampler.ops.sample(logits, sampling(1, device=sampler.device)).item() in (2, 3)
    one_banned = controls([0], vocab_size=40, banned=[[2, -1]], device=sampler.device)
    sampler.ops.control_logits(logits, one_banned)
    assert sampler.ops.sample(logits, sampling(1, device=sampler.device)).item() == 3
