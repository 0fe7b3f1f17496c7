"""Linear layers whose weights are float8 (e4m3), a scale for each output; rows become float8 as well, but one or two.

A row or two are multiplied as they are (thin_linear.py). More go through matrix units, which take both sides in float8:
each row is divided by a scale of its own, so that its largest number is the type's largest, and either our kernel for
some rows multiplies (few_rows_linear.py) or torch (cuBLAS). Twin: reference_fp8.py. Source of the format: Micikevicius
et al., "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from functools import lru_cache
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from aserve.kernels.few_rows_linear import Scales, few_rows_linear, is_few
from aserve.kernels.launch import SHAPES, Launch, let_next_start, wait_for_previous
from aserve.kernels.reference_fp8 import FP8, FP8_MULTIPLE, LARGEST, LEAST, quantize

_BLOCK: Final = 2048
"""Numbers of a row that a program looks at in a step."""


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    NUM_INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST_NUMBER: tl.constexpr,
    LEAST_OF_A_ROW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A row a program: it is read twice, the second time from the cache."""
    wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK):
        x = tl.load(x_ptr + row * x_stride + start + columns, mask=start + columns < NUM_INPUTS, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, axis=0), LEAST_OF_A_ROW) / LARGEST_NUMBER
    tl.store(scale_ptr + row, scale)
    for start in range(0, NUM_INPUTS, BLOCK):
        mask = start + columns < NUM_INPUTS
        x = tl.load(x_ptr + row * x_stride + start + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * NUM_INPUTS + start + columns, (x / scale).to(tl.float8e4nv), mask=mask)


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in float8, [T, I], and what each was divided by, [T], float32. Rows may be strided."""
    num_rows, num_inputs = x_TI.shape
    out_TI = x_TI.new_empty((num_rows, num_inputs), dtype=FP8)
    scale_T = x_TI.new_empty((num_rows,), dtype=torch.float32)
    if num_rows:
        _shaped(num_rows, num_inputs, x_TI.stride(0))(x_TI, out_TI, scale_T)
    return out_TI, scale_T


def fp8_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O: Tensor, hopper_sms: int | None = None
) -> Tensor:
    """x W^T + b, [T, O], in the type of x: float16 or bfloat16. Sizes of the weight are multiples of FP8_MULTIPLE.

    hopper_sms: how many processors a Hopper GPU has, whose products of some rows are our own. Raises RuntimeError where
    the device, or its torch, has no such product.
    """
    rows_TI, scale_T = quantize_rows(x_TI)
    if hopper_sms is not None and is_few(x_TI, weight_OI, hopper_sms):
        return few_rows_linear(rows_TI, weight_OI, bias_O, hopper_sms, Scales(scale_T, scale_O, x_TI.dtype))
    by_row = F.ScalingType.RowWise
    return F.scaled_mm(
        rows_TI,
        weight_OI.t(),
        scale_T[:, None],
        by_row,
        scale_O[None, :],
        by_row,
        bias=bias_O,
        output_dtype=x_TI.dtype,
        use_fast_accum=True,
    )


def why_no_fp8(device: torch.device) -> str | None:
    """What keeps the device from products of many rows: the error of the smallest one. None where there is none."""
    zeros = torch.zeros(FP8_MULTIPLE, FP8_MULTIPLE, dtype=torch.bfloat16, device=device)
    weight_OI, scale_O = quantize(zeros)
    try:
        fp8_linear(zeros, weight_OI, None, scale_O)
    except (RuntimeError, ValueError, TritonError) as error:
        return f"this GPU does not multiply it: {str(error).splitlines()[0]}"
    return None


@lru_cache(maxsize=SHAPES)
def _shaped(num_rows: int, num_inputs: int, x_stride: int) -> Launch:
    constants = {"NUM_INPUTS": num_inputs, "BLOCK": _BLOCK, "LARGEST_NUMBER": LARGEST, "LEAST_OF_A_ROW": LEAST}
    return Launch(_quantize_rows_kernel, (num_rows,), (x_stride,), overlaps=True, **constants, num_warps=8)
