"""A linear layer whose sums do not depend on the number of rows, in Triton. Twin: torch's linear.

Every output is one program's, which adds its inputs up tile after tile; the tiles have the same shape for one row as
for thousands, and no sum is split. cuBLAS takes another order for another number of rows.
"""

from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch

_TILES: Final = {2: (64, 64, 64), 4: (32, 32, 32)}
"""Rows, outputs and inputs of a tile, by the bytes of a number."""


@triton.jit(do_not_specialize=["num_rows"])
def _fixed_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    rows = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    outputs = tl.program_id(0).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    has_row, has_output = rows < num_rows, outputs < NUM_OUTPUTS
    acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_I):
        inputs = start + tl.arange(0, BLOCK_I)
        has_input = (inputs < NUM_INPUTS)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + inputs[None, :], mask=has_row[:, None] & has_input, other=0.0)
        weight_offsets = outputs[:, None] * NUM_INPUTS + inputs[None, :]
        weight = tl.load(weight_ptr + weight_offsets, mask=has_output[:, None] & has_input, other=0.0)
        acc = tl.dot(x, tl.trans(weight.to(x.dtype)), acc, input_precision="ieee")
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + outputs, mask=has_output, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    out_offsets = rows[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


def fixed_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, scale_O: Tensor | None = None
) -> Tensor:
    """x W^T + b, [T, O], in the type of x. The weight is contiguous; rows of x may be strided.

    scale_O: what multiplies each output of a weight of float8, float32.
    """
    assert weight_OI.is_contiguous()
    assert x_TI.stride(1) == 1
    out_TO = x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))
    if x_TI.shape[0]:
        launch = _shaped(x_TI.shape, x_TI.stride(0), weight_OI.shape[0], x_TI.element_size())
        launch(x_TI, weight_OI, scale_O, bias_O, out_TO)
    return out_TO


@lru_cache(maxsize=SHAPES)
def _shaped(shape_TI: torch.Size, stride: int, num_outputs: int, element_bytes: int) -> Launch:
    num_rows, num_inputs = shape_TI
    block_t, block_o, block_i = _TILES[element_bytes]
    return Launch(
        _fixed_linear_kernel,
        (triton.cdiv(num_outputs, block_o), triton.cdiv(num_rows, block_t)),
        (num_rows, stride),
        NUM_INPUTS=num_inputs,
        NUM_OUTPUTS=num_outputs,
        BLOCK_T=block_t,
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        num_warps=4,
        num_stages=4 if element_bytes == 2 else 2,
    )
