"""A linear layer of a few rows, in Triton: bound by memory, the weight is read once. Twin: torch's linear.

The weight may be of float8 with a scale for each output, which multiplies the sum: then half as much is read.

cuBLAS computes a row by tiles of matrix units, which are all but empty, and splits the sums of small layers between
programs that a second launch adds up. Here a program has a few outputs to itself and multiplies without matrix units:
each thread adds up its own inputs of each output, and only at the end are these sums added up between threads.

    program o        W rows o BLOCK_O ... + BLOCK_O   x   x rows        -> [T, BLOCK_O] outputs
                     |<- BLOCK_I ->|<- BLOCK_I ->|      several tiles are on their way at once

A layer that is gated reads the row of the gate and that of what it gates side by side, and writes their product.
"""

from functools import lru_cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch, let_next_start, wait_for_previous

MAX_ROWS: Final = 2
"""More are left to matrix units, which are no slower then."""
MAX_OUTPUTS: Final = 1 << 16
"""Nor are they for a layer as tall as the head of a large vocabulary."""


class Tile(NamedTuple):
    """outputs, inputs: of a program's step. num_stages: of its pipeline."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


_TILES: Final = {
    2: (Tile(4, 256, 2, 5), Tile(4, 512, 4, 5), Tile(2, 512, 2, 5)),
    1: (Tile(8, 512, 4, 4), Tile(4, 512, 2, 5), Tile(4, 256, 2, 4)),
}
"""By the bytes of a weight, 2 at most: of most layers; of those with so few outputs that there are not many programs;
and of either half of a gated layer."""
_FEW_OUTPUTS: Final = 3072


@triton.jit(do_not_specialize=["num_rows"])
def _thin_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    num_inputs,
    num_outputs,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """num_outputs: of those that are written; a gated layer's weight has twice as many rows, the gates' first."""
    wait_for_previous(OVERLAPS)
    rows = tl.arange(0, BLOCK_T)
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    inputs = tl.arange(0, BLOCK_I)
    has_row, has_output = rows < num_rows, outputs < num_outputs
    x_ptrs = x_ptr + rows[:, None] * x_stride + inputs[None, :]
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    other_ptrs = weight_ptrs + num_outputs.to(tl.int64) * num_inputs
    acc = tl.zeros([BLOCK_T, BLOCK_O, BLOCK_I], dtype=tl.float32)
    other_acc = tl.zeros([BLOCK_T, BLOCK_O, BLOCK_I], dtype=tl.float32)
    for start in tl.range(0, num_inputs, BLOCK_I, num_stages=NUM_STAGES):
        has_input = start + inputs < num_inputs
        x = tl.load(x_ptrs + start, mask=has_row[:, None] & has_input[None, :], other=0.0).to(tl.float32)
        if EVEN:
            weight = tl.load(weight_ptrs + start)
        else:
            weight = tl.load(weight_ptrs + start, mask=has_output[:, None] & has_input[None, :], other=0.0)
        acc += x[:, None, :] * weight.to(tl.float32)[None, :, :]
        if GATED:
            if EVEN:
                other = tl.load(other_ptrs + start)
            else:
                other = tl.load(other_ptrs + start, mask=has_output[:, None] & has_input[None, :], other=0.0)
            other_acc += x[:, None, :] * other.to(tl.float32)[None, :, :]
    let_next_start(OVERLAPS)
    out = tl.sum(acc, axis=2)
    gated = tl.sum(other_acc, axis=2)
    if scale_ptr is not None:
        out *= tl.load(scale_ptr + outputs, mask=has_output, other=0.0)[None, :]
        if GATED:
            gated *= tl.load(scale_ptr + num_outputs + outputs, mask=has_output, other=0.0)[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gated += tl.load(bias_ptr + num_outputs + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    if GATED:
        # Rounded as if they had been written: more rows are, and a row has to be as exact beside many as beside few.
        gate = out.to(out_ptr.dtype.element_ty).to(tl.float32)
        out = gate * tl.sigmoid(gate) * gated.to(out_ptr.dtype.element_ty).to(tl.float32)
    offsets = rows[:, None] * num_outputs + outputs[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


def is_thin(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether there are so few rows, of such a type, that this is the faster way."""
    return 0 < x_TI.shape[0] <= MAX_ROWS and x_TI.element_size() == 2 and weight_OI.shape[0] <= MAX_OUTPUTS


def thin_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, scale_O: Tensor | None = None) -> Tensor:
    """x W^T + b, [T, O], in the type of x; T from 1 to MAX_ROWS. The weight is contiguous, rows of x may be strided.

    scale_O: of a weight of float8, float32.
    """
    return _multiply(x_TI, weight_OI, scale_O, bias_O, gated=False)


def thin_silu_and_mul(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, scale_O: Tensor | None = None
) -> Tensor:
    """silu(a) * b, [T, O / 2], of the halves of x W^T + b; else as `thin_linear`."""
    return _multiply(x_TI, weight_OI, scale_O, bias_O, gated=True)


def _multiply(x_TI: Tensor, weight_OI: Tensor, scale_O: Tensor | None, bias_O: Tensor | None, *, gated: bool) -> Tensor:
    assert weight_OI.is_contiguous()
    assert x_TI.stride(1) == 1
    num_outputs = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
    out_TO = x_TI.new_empty_strided((x_TI.shape[0], num_outputs), (num_outputs, 1))
    launch = _shaped(x_TI.shape, x_TI.stride(0), num_outputs, weight_OI.element_size(), gated)
    launch(x_TI, weight_OI, scale_O, bias_O, out_TO)
    return out_TO


@lru_cache(maxsize=SHAPES)
def _shaped(shape_TI: torch.Size, x_stride: int, num_outputs: int, weight_bytes: int, gated: bool) -> Launch:
    """weight_bytes: of a number."""
    num_rows, num_inputs = shape_TI
    wide, narrow, of_gated = _TILES[min(weight_bytes, 2)]
    tile = of_gated if gated else narrow if num_outputs <= _FEW_OUTPUTS else wide
    return Launch(
        _thin_linear_kernel,
        (triton.cdiv(num_outputs, tile.outputs),),
        (num_rows, x_stride, num_inputs, num_outputs),
        overlaps=True,
        BLOCK_T=triton.next_power_of_2(num_rows),
        BLOCK_O=tile.outputs,
        BLOCK_I=tile.inputs,
        NUM_STAGES=tile.num_stages,
        EVEN=num_inputs % tile.inputs == 0 and num_outputs % tile.outputs == 0,
        GATED=gated,
        num_warps=tile.num_warps,
    )
