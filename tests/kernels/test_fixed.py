"""With fixed tiles and splits a row has the same bits in any batch, by Triton's interpreter; and the right ones."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aserve.kernels import fixed_attention
from aserve.kernels.fixed_linear import fixed_linear
from aserve.kernels.fixed_ops import FixedOps
from aserve.kernels.ops import LinearOps
from aserve.kernels.reference import ReferenceOps
from aserve.models.layers import DenseLinear, DenseMethod
from aserve.models.loader import linear_method
from tests.kernels.cases import Fast, paged

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def products_of_a_matrix_unit(monkeypatch):
    """The interpreter's products are NumPy's, whose bits depend on the number of rows on some processors. On a GPU they
    do not, so each sum is added up here one number after the other.
    """

    def product(a, b, dtype):
        return np.sum(a[..., None] * b, axis=-2, dtype=dtype)

    monkeypatch.setattr(np, "matmul", product)


@pytest.fixture
def small_splits(monkeypatch):
    """64 keys each. Launches are remembered with the size of their splits."""
    monkeypatch.setattr(fixed_attention, "_SPLIT", 64)
    fixed_attention._shaped.cache_clear()
    yield
    fixed_attention._shaped.cache_clear()


LIMITS = [{}, {"sliding_window": 70}, {"soft_cap": 2.0}]


@pytest.mark.parametrize("num_rows", [1, 70])
@pytest.mark.parametrize("shape", [(90, 50), (64, 64)], ids=str)
def test_a_product_is_that_of_torch_and_its_rows_depend_on_no_others(triton_each: Fast, num_rows, shape):
    num_inputs, num_outputs = shape
    x_TI, weight_OI = triton_each.randn(num_rows, num_inputs) / 8, triton_each.randn(num_outputs, num_inputs)
    bias_O = triton_each.randn(num_outputs)
    for bias in (None, bias_O):
        out_TO = fixed_linear(x_TI, weight_OI, bias)
        expected = F.linear(x_TI.float(), weight_OI.float(), None if bias is None else bias.float())
        triton_each.assert_close(out_TO, expected.to(triton_each.dtype))
        for row in {0, num_rows // 2, num_rows - 1}:
            assert torch.equal(fixed_linear(x_TI[row : row + 1], weight_OI, bias)[0], out_TO[row])


@pytest.mark.parametrize(("heads", "options"), list(zip([(4, 2), (7, 1), (3, 3)], LIMITS, strict=True)), ids=str)
def test_attention_is_the_twins_and_a_query_has_the_same_bits_alone(small_splits, triton_each: Fast, heads, options):
    ops = FixedOps(num_sms=132)
    lens, query_lens = [150, 3, 64, 140], [1, 1, 1, 40]
    case = paged(triton_each, lens, query_lens, heads=heads)
    together = case.attend(ops, **options)
    triton_each.assert_close(together, case.attend(ReferenceOps(), **options))
    starts = case.batch.query_starts_S1.tolist()
    for s, (length, num_queries) in enumerate(zip(lens, query_lens, strict=True)):
        for query in {0, num_queries - 1}:
            alone = case.only(s, starts[s] + query, length - num_queries + query + 1)
            assert torch.equal(alone.attend(ops, **options)[0], together[starts[s] + query]), (s, query)


def test_a_padding_row_without_context_gives_zeros(triton_fast: Fast):
    case = paged(triton_fast, [300, 20], [1, 1])
    case.batch.seq_lens_S[1] = 0
    assert not case.attend(FixedOps(num_sms=1))[1].any()


def test_other_operations_take_a_row_by_itself(triton_each: Fast):
    ops = FixedOps(num_sms=132)
    x_TE, weight_E = triton_each.randn(37, 96), triton_each.randn(96)
    logits_TV = triton_each.randn(37, 500, dtype=torch.float32)
    targets_T = torch.arange(37, device=triton_each.device)
    together = (*ops.add_rms_norm(x_TE, x_TE, weight_E, 1e-6), ops.silu_and_mul(x_TE), ops.gelu_and_mul(x_TE))
    scores = ops.score(logits_TV, targets_T, 3)
    for row in (0, 18, 36):
        one = slice(row, row + 1)
        alone = (*ops.add_rms_norm(x_TE[one], x_TE[one], weight_E, 1e-6), ops.silu_and_mul(x_TE[one]))
        alone = (*alone, ops.gelu_and_mul(x_TE[one]))
        assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))
        assert torch.equal(ops.score(logits_TV[one], targets_T[one], 3).logprobs_S[0], scores.logprobs_S[row])


def test_models_take_their_products_from_operations_that_have_some(triton_fast: Fast):
    ops = FixedOps(num_sms=132)
    assert isinstance(ops, LinearOps)
    assert not isinstance(ReferenceOps(), LinearOps)
    method = linear_method(ops, torch.float32, torch.device("cpu"))
    assert isinstance(method, DenseMethod)
    _, layer = method.tie(triton_fast.randn(8, 16))
    assert isinstance(layer, DenseLinear)
    assert layer(triton_fast.randn(3, 16)).shape == (3, 8)
