"""Log-probabilities, ranks and the likeliest tokens."""

import math

import pytest
import torch

from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()


@pytest.mark.parametrize(("vocab_size", "num_top"), [(1, 1), (3, 20), (100, 0), (5000, 20), (5000, 256)])
def test_scores(sampler: Fast, vocab_size: int, num_top: int) -> None:
    logits = sampler.randn(5, vocab_size) * 6
    targets = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0, 0], device=sampler.device)
    actual, expected = sampler.ops.score(logits, targets, num_top), TWIN.score(logits, targets, num_top)
    sampler.assert_close(actual.logprobs_S, expected.logprobs_S)
    sampler.assert_close(actual.top_logprobs_SK, expected.top_logprobs_SK)
    sampler.assert_close(actual.normalizers_S, expected.normalizers_S)
    assert torch.equal(actual.ranks_S, expected.ranks_S)
    assert torch.equal(actual.top_ids_SK, expected.top_ids_SK)
    assert actual.top_ids_SK.shape == (5, min(num_top, vocab_size))


def test_a_rows_scores_are_the_same_bits_however_many_it_asks_for(sampler: Fast) -> None:
    """Catches another way to sum for very many, by which a request's scores would hang on who is beside it."""
    logits, targets = sampler.randn(3, 700) * 6, torch.tensor([0, 5, 699], device=sampler.device)
    few, many = sampler.ops.score(logits, targets, 4), sampler.ops.score(logits, targets, 700)
    assert torch.equal(few.logprobs_S, many.logprobs_S)
    assert torch.equal(few.normalizers_S, many.normalizers_S)
    assert torch.equal(few.top_logprobs_SK, many.top_logprobs_SK[:, :4])


def test_of_equal_logits_the_lowest_id_comes_first(sampler: Fast) -> None:
    logits = torch.tensor([[-0.0, 1.0, 0.0, -2.0, 1.0, -2.0]], device=sampler.device)
    scores = sampler.ops.score(logits, torch.tensor([2], device=sampler.device), 6)
    assert scores.top_ids_SK.tolist() == [[1, 4, 0, 2, 3, 5]]
    assert scores.ranks_S.tolist() == [4]


def test_probabilities_sum_to_one_and_impossible_tokens_have_none(sampler: Fast) -> None:
    logits = sampler.randn(2, 50) * 30
    logits[:, 7] = -math.inf
    scores = sampler.ops.score(logits, torch.tensor([7, 3], device=sampler.device), 50)
    sampler.assert_close(scores.top_logprobs_SK.exp().sum(-1), torch.ones(2, device=sampler.device))
    assert scores.logprobs_S[0] == -math.inf
    assert scores.top_ids_SK[:, -1].tolist() == [7, 7]
