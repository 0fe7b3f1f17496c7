"""A linear layer of some rows, in Triton: bound by memory, by matrix units that the weight fills. Twin: torch's linear.

The rows of a decoding batch do not fill a tile of matrix units, which has 64 rows. So the weight takes that side, and
the batch is the short one, y^T = W x^T. Where the outputs are too few for a program on most processors, the inputs are
split between programs, and a second launch adds up what they have, in their order, so that the same step gives the same
bits:

    program (o, s)   W rows o BLOCK_O ... + BLOCK_O   .   x^T of the inputs of split s   -> [T, BLOCK_O], float32
                     |<- BLOCK_I ->|<- BLOCK_I ->|        several tiles are on their way at once
    sum (t, o)       out[t, o] = sum over s

Rows and weight may both be of float8, with a scale for each row and each output, which multiply the sums.
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
MAX_FP8_ROWS: Final = 128
"""The same of float8, for layers that have no more tiles than there are processors: torch splits none of those."""
MAX_OUTPUTS: Final = 1 << 16
"""A layer as tall as the head of a large vocabulary has programs enough by any tile."""
_LEAST_ROWS: Final = 16
"""Of a tile: fewer are a product of another kind, which takes longer but for the smallest layers."""
_LEAST_INPUT_TILES: Final = 2
"""Of a split."""
_SUM_BLOCK: Final = 512
_CROWDING_ROWS: Final = 32
"""More take so much shared memory that fewer stages of long tiles are faster, or fit at all."""


class Tile(NamedTuple):
    """outputs, inputs: of a program's step. num_stages: of its pipeline."""

    outputs: int
    inputs: int
    num_stages: int


class Scales(NamedTuple):
    """What multiplies each row, [T], and each output, [O], float32; and the type of the product."""

    rows_T: Tensor
    outputs_O: Tensor
    dtype: torch.dtype


_TILES: Final = {2: (Tile(64, 128, 6), Tile(128, 64, 4)), 1: (Tile(64, 256, 6), Tile(128, 128, 4))}
"""By the bytes of a number. The second is for a layer that has more of the first than there are processors: two of it
share one."""


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    row_scale_ptr,
    output_scale_ptr,
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
    if output_scale_ptr is not None:
        row_scales = tl.load(row_scale_ptr + rows, mask=has_row, other=0.0)
        out *= row_scales[:, None] * tl.load(output_scale_ptr + outputs)[None, :]
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


def is_few(x_TI: Tensor, weight_OI: Tensor, num_sms: int) -> bool:
    """Whether there are so few rows, of such a type and size, that this is the faster way; on a Hopper GPU.

    x: as it comes, in 16 bits, also where it will become float8 because the weight is.
    """
    num_outputs, num_inputs = weight_OI.shape
    tile = _TILES[weight_OI.element_size()][0] if x_TI.element_size() == 2 else None
    if tile is None or num_outputs % tile.outputs or num_inputs % tile.inputs or num_outputs > MAX_OUTPUTS:
        return False
    leaves_some_idle = weight_OI.element_size() == 1 and num_outputs <= num_sms * tile.outputs
    return 0 < x_TI.shape[0] <= (MAX_FP8_ROWS if leaves_some_idle else MAX_ROWS)


def few_rows_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, num_sms: int, scales: Scales | None = None
) -> Tensor:
    """x W^T + b, [T, O], in the type of x, where `is_few`. The weight is contiguous, rows of x may be strided.

    num_sms: how many processors the device has; inputs are split so that most have something to do. scales: where both
    x and weight are of float8.
    """
    assert weight_OI.is_contiguous()
    assert x_TI.stride(1) == 1
    num_rows, num_outputs = x_TI.shape[0], weight_OI.shape[0]
    rows_T, outputs_O, dtype = scales or (None, None, x_TI.dtype)
    out_TO = x_TI.new_empty_strided((num_rows, num_outputs), (num_outputs, 1), dtype=dtype)
    num_splits, multiply, add_up = _shaped(x_TI.shape, x_TI.stride(0), num_outputs, weight_OI.element_size(), num_sms)
    if num_splits == 1:
        multiply(x_TI, weight_OI, rows_T, outputs_O, bias_O, out_TO)
        return out_TO
    partial_STO = x_TI.new_empty((num_splits, num_rows, num_outputs), dtype=torch.float32)
    multiply(x_TI, weight_OI, rows_T, outputs_O, None, partial_STO)
    add_up(partial_STO, bias_O, out_TO)
    return out_TO


def choose_tile(num_outputs: int, num_inputs: int, num_sms: int, weight_bytes: int = 2) -> tuple[Tile, int]:
    """The tile, and into how many parts the inputs are split: the fewest by which two thirds of the processors work."""
    tile, tall = _TILES[weight_bytes]
    num_tiles = num_outputs // tile.outputs
    if num_tiles > num_sms and num_outputs % tall.outputs == 0:
        return tall, 1
    most = max(1, num_inputs // tile.inputs // _LEAST_INPUT_TILES)
    return tile, min(most, -(-2 * num_sms // (3 * num_tiles)))


@lru_cache(maxsize=SHAPES)
def _shaped(
    shape_TI: torch.Size, x_stride: int, num_outputs: int, weight_bytes: int, num_sms: int
) -> tuple[int, Launch, Launch]:
    """The number of splits, the product, and what adds up its splits. weight_bytes: of a number."""
    num_rows, num_inputs = shape_TI
    tile, num_splits = choose_tile(num_outputs, num_inputs, num_sms, weight_bytes)
    if num_rows > _CROWDING_ROWS and weight_bytes == 1:
        tile = tile._replace(num_stages=4)
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
