"""Linear layers of a row or two: those of torch, whatever their shape, and used for no others."""

import pytest
import torch
import torch.nn.functional as F

from aserve.kernels import thin_linear as tiles
from aserve.kernels.fixed_ops import FixedOps
from aserve.kernels.thin_linear import MAX_OUTPUTS, MAX_ROWS, is_thin, thin_linear, thin_silu_and_mul
from aserve.kernels.triton_ops import TritonOps
from aserve.models.layers import DenseMethod
from tests.kernels.cases import Fast

pytestmark = pytest.mark.torch
SHAPES = [(512, 8), (1024, 20), (100, 6), (700, 19)]
"""(inputs, outputs): whole tiles and cut ones, of few outputs and of many."""


@pytest.fixture
def few_outputs(monkeypatch):
    """So many are few. Launches are remembered with their tiles."""
    monkeypatch.setattr(tiles, "_FEW_OUTPUTS", 8)
    tiles._shaped.cache_clear()
    yield
    tiles._shaped.cache_clear()


def expected(x_TI, weight_OI, bias_O):
    return F.linear(x_TI.float(), weight_OI.float(), None if bias_O is None else bias_O.float())


@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_thin_product_is_that_of_torch(few_outputs, triton_each: Fast, shape, has_bias, num_rows):
    num_inputs, num_outputs = shape
    wide_TI = triton_each.randn(num_rows, 2 * num_inputs)
    x_TI, weight_OI = wide_TI[:, :num_inputs], triton_each.randn(num_outputs, num_inputs) / num_inputs**0.5
    bias_O = triton_each.randn(num_outputs) if has_bias else None
    out_TO = thin_linear(x_TI, weight_OI, bias_O)
    triton_each.assert_close(out_TO, expected(x_TI, weight_OI, bias_O).to(triton_each.dtype))


@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(512, 8), (100, 31)], ids=str)
def test_a_gated_one_is_what_gates_its_outputs(triton_each: Fast, shape, has_bias, num_rows):
    num_inputs, num_outputs = shape
    x_TI = triton_each.randn(num_rows, num_inputs)
    weight_OI = triton_each.randn(2 * num_outputs, num_inputs) / num_inputs**0.5
    bias_O = triton_each.randn(2 * num_outputs) if has_bias else None
    gate_up_TF2 = expected(x_TI, weight_OI, bias_O).to(triton_each.dtype)
    out_TO = thin_silu_and_mul(x_TI, weight_OI, bias_O)
    triton_each.assert_close(out_TO, TritonOps(1).silu_and_mul(gate_up_TF2))


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS, MAX_ROWS + 1, 40])
def test_layers_of_a_model_are_the_same_by_one_way_and_by_the_other(triton_fast: Fast, num_rows):
    x_TI, weight_OI = triton_fast.randn(num_rows, 96), triton_fast.randn(64, 96) / 10
    assert is_thin(x_TI, weight_OI) == (num_rows <= MAX_ROWS)
    _, plain = DenseMethod().tie(weight_OI)
    for ops in (TritonOps(1), FixedOps(1)):
        _, layer = DenseMethod(ops).tie(weight_OI)
        triton_fast.assert_close(layer(x_TI), plain(x_TI))
        gated = layer.silu_and_mul()
        triton_fast.assert_close(gated(x_TI), ops.silu_and_mul(plain(x_TI)))
    assert plain.silu_and_mul() is None


def test_other_shapes_are_left_to_matrix_units():
    row, weight = torch.empty(1, 64, dtype=torch.float16), torch.empty(MAX_OUTPUTS, 64, dtype=torch.float16)
    assert is_thin(row, weight)
    assert not is_thin(row[:0], weight)
    assert not is_thin(row.float(), weight.float())
    assert not is_thin(row, torch.empty(MAX_OUTPUTS + 1, 64, dtype=torch.float16))
