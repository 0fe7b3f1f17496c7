"""A linear layer whose sums do not depend on the number of rows, in Triton. Twin: torch's linear.

Every output is one program's, which adds its inputs up tile after tile; the tiles have the same shape for one row as
for thousands, and no sum is split. cuBLAS takes another order for another number of rows.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILES: Final = {2: (64, 64, 64), 4: (32, 32, 32)}
"""Rows, outputs and inputs of a tile, by the bytes of a number."""


@triton.jit(do_not_specialize=["num_rows"])
def _fixed_linear_kernel(
    x_ptr,
    weight_ptr,
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
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    out_offsets = rows[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


def fixed_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W^T + b, [T, O], in the type of x. The weight is contiguous; rows of x may be strided."""
    num_rows, num_inputs = x_TI.shape
    num_outputs = weight_OI.shape[0]
    assert weight_OI.is_contiguous()
    assert x_TI.stride(1) == 1
    out_TO = torch.empty((num_rows, num_outputs), dtype=x_TI.dtype, device=x_TI.device)
    block_t, block_o, block_i = _TILES[x_TI.element_size()]
    if num_rows:
        _fixed_linear_kernel[(triton.cdiv(num_outputs, block_o), triton.cdiv(num_rows, block_t))](
            x_TI,
            weight_OI,
            bias_O,
            out_TO,
            num_rows,
            x_TI.stride(0),
            NUM_INPUTS=num_inputs,
            NUM_OUTPUTS=num_outputs,
            BLOCK_T=block_t,
            BLOCK_O=block_o,
            BLOCK_I=block_i,
            num_warps=4,
            num_stages=4 if x_TI.element_size() == 2 else 2,
        )
    return out_TO
