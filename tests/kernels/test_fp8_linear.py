"""Products of weights of float8: those of the twin, whatever the number of rows, by each kernel that has one."""

from dataclasses import replace

import pytest
import torch

from aserve.kernels import fp8_linear as many_rows
from aserve.kernels import reference_fp8
from aserve.kernels.few_rows_linear import MAX_FP8_ROWS, Scales, few_rows_linear, is_few
from aserve.kernels.few_rows_linear import MAX_ROWS as FEW
from aserve.kernels.fixed_linear import fixed_linear
from aserve.kernels.fixed_ops import FixedOps
from aserve.kernels.fp8_linear import quantize_rows, why_no_fp8
from aserve.kernels.ops import Fp8Ops
from aserve.kernels.reference_fp8 import FP8, LARGEST, fp8_linear, quantize
from aserve.kernels.thin_linear import MAX_ROWS as THIN
from aserve.kernels.thin_linear import thin_linear, thin_silu_and_mul
from aserve.kernels.triton_ops import TritonOps
from tests.kernels.cases import Fast

pytestmark = pytest.mark.torch
SHAPES = [(256, 128), (1024, 64)]
"""(inputs, outputs). With `PROCESSORS` of them the sums of the second are split between programs."""
PROCESSORS = 4
EXACT, NEAR = 0.005, 0.04
"""How far off a product may be whose rows are float8: from the twin's, since a GPU's matrix units keep some 14 bits of
its sums, and from that of rows as they came."""
STEP, SMALLEST = 1 / 8, 2**-9
"""Between numbers of float8, over the number, and the smallest. A GPU divides a little less exactly than the twin."""


@pytest.fixture(params=[torch.float16, *[torch.bfloat16] * torch.cuda.is_available()], ids=str)
def half(request: pytest.FixtureRequest, triton_fast: Fast) -> Fast:
    """Triton in each type that such rows may have and that it multiplies here."""
    return replace(triton_fast, dtype=request.param)


def layer(fast: Fast, num_inputs, num_outputs, num_rows, has_bias=False):
    """Rows that lie apart, the weight in float8, its scales, which differ by a thousand, and a bias."""
    x_TI = fast.randn(num_rows, 2 * num_inputs)[:, :num_inputs]
    sizes_O = torch.logspace(-2, 1, num_outputs)[:, None].to(fast.device)
    weight_OI, scale_O = quantize((fast.randn(num_outputs, num_inputs) * sizes_O / num_inputs**0.5).to(fast.dtype))
    return x_TI, weight_OI, scale_O, fast.randn(num_outputs) if has_bias else None


def off(found_TO, expected_TO):
    """The size of the difference over that of what was expected."""
    assert found_TO.dtype == expected_TO.dtype
    return float((found_TO.float() - expected_TO.float()).norm() / expected_TO.float().norm())


def test_quantized_rows_are_those_of_the_twin(half: Fast):
    """Also a row of zeros, one that holds what is not a number, and one longer than a program's step."""
    for num_inputs in (16, 5000):
        x_TI = (
            half.randn(5, 2 * num_inputs)[:, :num_inputs]
            * torch.logspace(-3, 2, 5).to(half.device, half.dtype)[:, None]
        )
        x_TI[1] = 0
        x_TI[2, 3] = torch.nan
        found_TI, scale_T = quantize_rows(x_TI)
        expected_TI, expected_T = quantize(x_TI)
        known = torch.tensor([0, 1, 3, 4])
        torch.testing.assert_close(scale_T[known], expected_T[known])
        wrong = (found_TI.float() - expected_TI.float())[known].abs()
        assert (wrong <= STEP * expected_TI.float()[known].abs() + SMALLEST).all()
        assert (wrong > 0).float().mean() < 0.001
        assert found_TI.float()[known].abs().amax() <= LARGEST
        assert found_TI[2, 3].float().isnan()
    assert quantize_rows(x_TI[:0])[0].shape == (0, 5000)


def test_a_quantized_weight_is_as_near_as_its_type_allows(half: Fast, monkeypatch):
    monkeypatch.setattr(reference_fp8, "ROWS_AT_ONCE", 30)
    weight_OI = half.randn(64, 512)
    weight_OI[3] = 0
    quantized_OI, scale_O = TritonOps(1).quantize_weight(weight_OI)
    assert quantized_OI.dtype is FP8
    assert quantized_OI.is_contiguous()
    back_OI = quantized_OI.float() * scale_O[:, None]
    assert (back_OI.abs().amax(1) - weight_OI.float().abs().amax(1)).abs().max() < 1e-3
    assert ((back_OI - weight_OI).abs() <= weight_OI.abs() / 16 + scale_O[:, None] * 2**-10).all()


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_of_a_few_rows_is_the_twins(half: Fast, shape, has_bias):
    """By the kernel for a row or two, by that for some, and by that of which no batch changes a bit."""
    for num_rows in (1, THIN, 3, FEW):
        x_TI, weight_OI, scale_O, bias_O = layer(half, *shape, num_rows, has_bias)
        expected_TO = fp8_linear(x_TI, weight_OI, bias_O, scale_O, quantizes_rows=False)
        half.assert_close(fixed_linear(x_TI, weight_OI, bias_O, scale_O), expected_TO)
        if num_rows <= THIN:
            half.assert_close(thin_linear(x_TI, weight_OI, bias_O, scale_O), expected_TO)
        quantized_TI, scale_T = quantize(x_TI)
        out_TO = few_rows_linear(quantized_TI, weight_OI, bias_O, PROCESSORS, Scales(scale_T, scale_O, half.dtype))
        assert off(out_TO, fp8_linear(x_TI, weight_OI, bias_O, scale_O, quantizes_rows=True)) < EXACT


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_a_gated_one_of_a_row_or_two_gates_what_it_multiplies(half: Fast, has_bias):
    for num_rows in range(1, THIN + 1):
        x_TI, weight_OI, scale_O, bias_O = layer(half, 1024, 62, num_rows, has_bias)
        gate_up_TF2 = fp8_linear(x_TI, weight_OI, bias_O, scale_O, quantizes_rows=False)
        half.assert_close(thin_silu_and_mul(x_TI, weight_OI, bias_O, scale_O), TritonOps(1).silu_and_mul(gate_up_TF2))


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_one_of_more_rows_is_of_rows_that_are_quantized(half: Fast, has_bias):
    """Of many by torch, of some by torch too where the GPU is no Hopper."""
    x_TI, weight_OI, scale_O, bias_O = layer(half, 512, 64, FEW + 3, has_bias)
    out_TO = many_rows.fp8_linear(x_TI, weight_OI, bias_O, scale_O, PROCESSORS)
    expected_TO = fp8_linear(x_TI, weight_OI, bias_O, scale_O, quantizes_rows=True)
    assert out_TO.dtype is half.dtype
    assert off(out_TO, expected_TO) < EXACT
    some = slice(3, 20)
    for sms in (None, PROCESSORS):
        assert off(many_rows.fp8_linear(x_TI[some], weight_OI, bias_O, scale_O, sms), expected_TO[some]) < EXACT
    exact_TO = fp8_linear(x_TI, weight_OI, bias_O, scale_O, quantizes_rows=False)
    assert EXACT < off(expected_TO, exact_TO) < NEAR


@pytest.mark.parametrize("num_rows", [1, 3, FEW + 1])
def test_operations_choose_a_product_by_the_rows(half: Fast, num_rows):
    """All that have one: near to each other, and gated alike."""
    x_TI, weight_OI, scale_O, bias_O = layer(half, 256, 128, num_rows, has_bias=True)
    exact_TO = fp8_linear(x_TI, weight_OI, bias_O, scale_O, quantizes_rows=False)
    for ops in (TritonOps(PROCESSORS), TritonOps(PROCESSORS, (8, 9)), FixedOps(PROCESSORS)):
        assert isinstance(ops, Fp8Ops)
        assert ops.why_no_fp8(half.device) is None
        out_TO = ops.linear(x_TI, weight_OI, bias_O, scale_O)
        assert off(out_TO, exact_TO) < NEAR
        gated_TO = ops.linear_silu_and_mul(x_TI, weight_OI, bias_O, scale_O)
        half.assert_close(gated_TO, ops.silu_and_mul(out_TO))


@pytest.mark.parametrize("num_rows", [1, FEW, FEW + 1, MAX_FP8_ROWS, MAX_FP8_ROWS + 1])
def test_more_rows_are_few_where_torch_would_split_no_sums(num_rows):
    """Of layers with a tile of 64 outputs for each of 132 processors at most."""
    x_TI = torch.empty(num_rows, 512, dtype=torch.bfloat16, device="meta")
    few = {
        outputs: is_few(x_TI, torch.empty(outputs, 512, dtype=FP8, device="meta"), 132)
        for outputs in (64, 132 * 64, 133 * 64)
    }
    assert few == {64: num_rows <= MAX_FP8_ROWS, 132 * 64: num_rows <= MAX_FP8_ROWS, 133 * 64: num_rows <= FEW}
    assert not is_few(x_TI[:, :384], torch.empty(64, 384, dtype=FP8, device="meta"), 132)


def test_a_device_without_the_product_is_told_of(half: Fast, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nin a place of its own")

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuse)
    assert why_no_fp8(half.device) == "this GPU does not multiply it: CUBLAS_STATUS_NOT_SUPPORTED"
