"""A linear layer of some rows, in Triton: bound by memory, by matrix units that the weight fills. Twin: torch's linear.

The rows of a decoding batch do not fill a tile of matrix units, which has 64 rows. So the weight takes that side, and
the batch is the short one, y^T = W x^T. Where the outputs are too few for a program on most processors, the inputs are
split between programs, and a second launch adds up what they have, in their order, so that the same step gives the same
bits:

    program (o, s)   W rows o BLOCK_O ... + BLOCK_O   .   x^T of the inputs of split s   -> [T, BLOCK_O], float32
                     |<- BLOCK_I ->|<- BLOCK_I ->|        several tiles are on their way at once
    sum (t, o)       out[t, o] = sum over s
"""

from functools import lru_cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch, let_next_start, wait_for_previous

MAX_ROWS: Final = 64
"""More fill matrix units by themselves."""
MAX_OUTPUTS: Final = 1 << 16
"""A layer as tall as the head of a large vocabulary has programs enough by any tile."""
_LEAST_ROWS: Final = 16
"""Of a tile: fewer are a product of another kind, which takes longer but for the smallest layers."""
_LEAST_INPUT_TILES: Final = 2
"""Of a split."""
_SUM_BLOCK: Final = 512


class Tile(NamedTuple):
    """outputs, inputs: of a program's step. num_stages: of its pipeline."""

    outputs: int
    inputs: int
    num_stages: int


_TILE: Final = Tile(64, 128, 6)
_TALL: Final = Tile(128, 64, 4)
"""For a layer that has more of the other tiles than there are processors: two of these share one."""


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
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
    OVERLAPS: tl.constexpr,
):
    """out is of float32, one after another of all splits, where there are several. Sizes are whole tiles."""
    wait_for_previous(OVERLAPS)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    rows = tl.arange(0, BLOCK_T)
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    inputs = tl.arange(0, BLOCK_I)
    has_row = rows < num_rows
    x_ptrs = x_ptr + rows[:, None] * x_stride + inputs[None, :]
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    num_tiles = num_inputs // BLOCK_I
    acc = tl.zeros([BLOCK_O, BLOCK_T], dtype=tl.float32)
    begin, end = split * num_tiles // num_splits, (split + 1) * num_tiles // num_splits
    for tile in tl.range(begin, end, num_stages=NUM_STAGES):
        weight = tl.load(weight_ptrs + tile * BLOCK_I)
        x = tl.load(x_ptrs + tile * BLOCK_I, mask=has_row[:, None], other=0.0)
        acc = tl.dot(weight, x.T, acc)
    let_next_start(OVERLAPS)
    out = acc.T
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outputs).to(tl.float32)[None, :]
    offsets = (split * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=has_row[:, None])


@triton.jit(do_not_specialize=["num_splits"])
def _sum_splits_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    num_splits,
    num_outputs,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outputs < num_outputs
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(num_splits):
        total += tl.load(partial_ptr + (split * num_rows + row) * num_outputs + outputs, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_outputs + outputs, total.to(out_ptr.dtype.element_ty), mask=mask)


def is_few(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether there are so few rows, of such a type and size, that this is the faster way; on a Hopper GPU."""
    num_outputs, num_inputs = weight_OI.shape
    return (
        0 < x_TI.shape[0] <= MAX_ROWS
        and x_TI.element_size() == 2
        and num_outputs <= MAX_OUTPUTS
        and num_outputs % _TILE.outputs == 0
        and num_inputs % _TILE.inputs == 0
    )


def few_rows_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, num_sms: int) -> Tensor:
    """x W^T + b, [T, O], in the type of x, where `is_few`. The weight is contiguous, rows of x may be strided.

    num_sms: how many processors the device has; inputs are split so that most have something to do.
    """
    assert weight_OI.is_contiguous()
    assert x_TI.stride(1) == 1
    num_rows, num_outputs = x_TI.shape[0], weight_OI.shape[0]
    out_TO = x_TI.new_empty_strided((num_rows, num_outputs), (num_outputs, 1))
    num_splits, multiply, add_up = _shaped(x_TI.shape, x_TI.stride(0), num_outputs, num_sms)
    if num_splits == 1:
        multiply(x_TI, weight_OI, bias_O, out_TO)
        return out_TO
    partial_STO = x_TI.new_empty((num_splits, num_rows, num_outputs), dtype=torch.float32)
    multiply(x_TI, weight_OI, None, partial_STO)
    add_up(partial_STO, bias_O, out_TO)
    return out_TO


def choose_tile(num_outputs: int, num_inputs: int, num_sms: int) -> tuple[Tile, int]:
    """The tile, and into how many parts the inputs are split: the fewest by which two thirds of the processors work."""
    num_tiles = num_outputs // _TILE.outputs
    if num_tiles > num_sms and num_outputs % _TALL.outputs == 0:
        return _TALL, 1
    most = max(1, num_inputs // _TILE.inputs // _LEAST_INPUT_TILES)
    return _TILE, min(most, -(-2 * num_sms // (3 * num_tiles)))


@lru_cache(maxsize=SHAPES)
def _shaped(shape_TI: torch.Size, x_stride: int, num_outputs: int, num_sms: int) -> tuple[int, Launch, Launch]:
    """The number of splits, the product, and what adds up its splits."""
    num_rows, num_inputs = shape_TI
    tile, num_splits = choose_tile(num_outputs, num_inputs, num_sms)
    multiply = Launch(
        _few_rows_kernel,
        (num_outputs // tile.outputs, num_splits),
        (num_rows, x_stride, num_inputs, num_outputs),
        overlaps=True,
        BLOCK_T=max(_LEAST_ROWS, triton.next_power_of_2(num_rows)),
        BLOCK_O=tile.outputs,
        BLOCK_I=tile.inputs,
        NUM_STAGES=tile.num_stages,
        num_warps=4,
    )
    add_up = Launch(
        _sum_splits_kernel,
        (num_rows, triton.cdiv(num_outputs, _SUM_BLOCK)),
        (num_splits, num_outputs),
        overlaps=True,
        BLOCK=_SUM_BLOCK,
        num_warps=4,
    )
    return num_splits, multiply, add_up
