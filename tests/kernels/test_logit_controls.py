"""Bans, biases and penalties: what they do to a row, that other rows are left alone, and the twins."""

import math

import pytest
import torch

from aserve.kernels.ops import LogitControls
from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast, controls

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()


def check(sampler: Fast, logits: torch.Tensor, batch: LogitControls) -> torch.Tensor:
    """The fast result, which must be the twin's."""
    expected = logits.clone()
    TWIN.control_logits(expected, batch)
    actual = logits.clone()
    sampler.ops.control_logits(actual, batch)
    sampler.assert_close(actual, expected)
    untouched = [row for row in range(len(logits)) if row not in batch.rows_Q.tolist()]
    assert torch.equal(actual[untouched], logits[untouched])
    return actual


@pytest.mark.parametrize("vocab_size", [3, 100, 5000])
def test_all_of_them_together(sampler: Fast, vocab_size: int) -> None:
    logits = sampler.randn(4, vocab_size) * 4
    some = {i * 7 % vocab_size: i for i in range(1, 40)}
    batch = controls(
        [2, 0],
        vocab_size=vocab_size,
        bias={0: {i: i / 7 - 2 for i in some}, 1: {1: -math.inf}},
        counts={0: some, 1: {0: 1}},
        repetition=[1.3, 0.7],
        presence=[0.5, -1.0],
        frequency=[-0.25, 1.5],
        banned=[[1, -1], [-1, -1]],
        words=[(0, [2]), (1, [4, 5, 0]), (1, [9, 5, 2])],
        recent=[[], [8, 4, 5]],
        device=sampler.device,
    )
    changed = check(sampler, logits, batch)
    assert changed[2, 1] == changed[2, 2] == changed[0, 0] == -math.inf
    assert changed[0, 2] > -math.inf


def test_penalties_are_openais_and_ctrls(sampler: Fast) -> None:
    """Of ids 0 to 3: in the prompt alone, generated once, generated twice and in the prompt, neither."""
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0]], device=sampler.device)
    batch = controls(
        [0],
        vocab_size=4,
        counts={0: {0: 1, 1: 2, 2: 5}},
        repetition=[2.0],
        presence=[0.25],
        frequency=[0.5],
        device=sampler.device,
    )
    assert check(sampler, logits, batch).tolist() == [[1.0, 1.0 - 0.5 - 0.25, -4.0 - 1.0 - 0.25, 2.0]]


def test_a_bias_comes_before_the_penalties(sampler: Fast) -> None:
    batch = controls([0], vocab_size=2, bias={0: {0: 3.0}}, counts={0: {0: 2}}, repetition=[2.0], device=sampler.device)
    assert check(sampler, torch.tensor([[-1.0, 0.0]], device=sampler.device), batch).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("recent", "is_banned"),
    [([5, 6], True), ([1, 2, 3, 5, 6], True), ([6], False), ([5, 6, 7], False), ([], False), ([6, 5], False)],
)
def test_a_bad_words_last_token_is_banned_after_the_others(sampler: Fast, recent: list[int], is_banned: bool) -> None:
    batch = controls([0], vocab_size=9, words=[(0, [5, 6, 8]), (0, [3])], recent=[recent], device=sampler.device)
    changed = check(sampler, torch.zeros(1, 9, device=sampler.device), batch)
    assert (changed[0, 8] == -math.inf) == is_banned
    assert changed[0, 3] == -math.inf
    assert changed.isfinite().sum() == 8 - is_banned


def test_a_row_of_which_nothing_would_be_left_keeps_its_logits(sampler: Fast) -> None:
    logits = sampler.randn(3, 3)
    nothing_allowed = dict.fromkeys(range(3), -math.inf)
    batch = controls(
        [0, 1, 2],
        vocab_size=3,
        bias={0: nothing_allowed, 1: {0: -math.inf}},
        banned=[[-1], [1], [0]],
        words=[(1, [2])],
        recent=[[], [], []],
        device=sampler.device,
    )
    changed = check(sampler, logits, batch)
    assert torch.equal(changed[:2], logits[:2])
    assert changed[2, 0] == -math.inf
