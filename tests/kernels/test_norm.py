import pytest
import torch

from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (1, 64), (3, 80), (5, 1000), (40, 96)])
def test_rms_norm(fast: Fast, num_tokens: int, width: int) -> None:
    x, weight = fast.randn(num_tokens, width) * 3, fast.randn(width)
    fast.assert_close(fast.ops.rms_norm(x, weight, 1e-5), TWIN.rms_norm(x, weight, 1e-5))


def test_a_head_norm_reads_the_heads_in_place(fast: Fast) -> None:
    q_THD = fast.randn(5, 100)[:, :56].unflatten(1, (7, 8))
    weight = fast.randn(8)
    fast.assert_close(fast.ops.rms_norm(q_THD, weight, 1e-6), TWIN.rms_norm(q_THD, weight, 1e-6))


def test_add_rms_norm(fast: Fast) -> None:
    x, residual, weight = fast.randn(3, 200)[:, :96], fast.randn(3, 96), fast.randn(96)
    normed, total = fast.ops.add_rms_norm(x, residual, weight, 1e-6)
    expected_normed, expected_total = TWIN.add_rms_norm(x, residual, weight, 1e-6)
    fast.assert_close(normed, expected_normed)
    assert torch.equal(total, expected_total)


def test_the_norm_of_zeros_is_zero(fast: Fast) -> None:
    zeros, weight = fast.randn(2, 64) * 0, fast.randn(64)
    assert not fast.ops.rms_norm(zeros, weight, 1e-6).any()
