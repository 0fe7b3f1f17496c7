"""What adapters add to a linear layer, in Triton: rows of several adapters and of none in one launch. Twin: reference.

Two kernels, shrink and expand, after Punica's grouped products (Chen et al., "Punica: Multi-Tenant LoRA Serving", MLSys
2024). A program has a tile of tokens of one adapter, which it finds by counting the tiles of those before it:

    starts   0        5   5            21          tokens of adapter 0, 1 (none), 2
    tiles    |0       |   |1      2    |           of 16 tokens at most; programs behind the last have nothing to do

The grid depends on the number of tokens alone, and all else is read from memory, so that a captured launch serves any
mixture. A row's sums are taken in tiles of one shape, whatever else is in the step.
"""

from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch
from aserve.kernels.ops import LoraBatch, LoraWeights

_BLOCK_T: Final = 16
_BLOCK_O: Final = 64
_BLOCK_I: Final = 64
_MAX_PARTS: Final = 3


@triton.jit
def _find_tile(starts_ptr, NUM_ADAPTERS: tl.constexpr, BLOCK_T: tl.constexpr):
    """The program's adapter, and the places of its first token and of the one behind that adapter's last."""
    tile = tl.program_id(0)
    num_passed, adapter, first, last = 0, 0, 0, 0
    for g in range(NUM_ADAPTERS):
        start, end = tl.load(starts_ptr + g), tl.load(starts_ptr + g + 1)
        num_tiles = tl.cdiv(end - start, BLOCK_T)
        is_here = (tile >= num_passed) & (tile < num_passed + num_tiles)
        adapter = tl.where(is_here, g, adapter)
        first = tl.where(is_here, start + (tile - num_passed) * BLOCK_T, first)
        last = tl.where(is_here, end, last)
        num_passed += num_tiles
    return adapter, first, last


@triton.jit
def _shrink_kernel(
    x_ptr,
    a_ptr,
    tokens_ptr,
    starts_ptr,
    ranks_ptr,
    shrunk_ptr,
    x_stride,
    a_stride,
    NUM_INPUTS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_ADAPTERS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    adapter, first, last = _find_tile(starts_ptr, NUM_ADAPTERS, BLOCK_T)
    part, first_rank = tl.program_id(1) // (RANK // BLOCK_R), tl.program_id(1) % (RANK // BLOCK_R) * BLOCK_R
    if first >= last or first_rank >= tl.load(ranks_ptr + adapter):
        return
    places = first + tl.arange(0, BLOCK_T)
    has_token = places < last
    tokens = tl.load(tokens_ptr + places, mask=has_token, other=0)
    ranks = first_rank + tl.arange(0, BLOCK_R)
    a_ptr += adapter.to(tl.int64) * a_stride + part * NUM_INPUTS * RANK
    acc = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_I):
        inputs = start + tl.arange(0, BLOCK_I)
        has_input = inputs < NUM_INPUTS
        x_offsets = tokens[:, None] * x_stride + inputs[None, :]
        x = tl.load(x_ptr + x_offsets, mask=has_token[:, None] & has_input[None, :], other=0.0)
        a = tl.load(a_ptr + inputs[:, None] * RANK + ranks[None, :], mask=has_input[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    shrunk_offsets = (places.to(tl.int64)[:, None] * NUM_PARTS + part) * RANK + ranks[None, :]
    tl.store(shrunk_ptr + shrunk_offsets, acc, mask=has_token[:, None])


@triton.jit
def _expand_kernel(
    shrunk_ptr,
    b_ptr,
    tokens_ptr,
    starts_ptr,
    ranks_ptr,
    out_ptr,
    out_stride,
    b_stride,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    NUM_ADAPTERS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    adapter, first, last = _find_tile(starts_ptr, NUM_ADAPTERS, BLOCK_T)
    if first >= last:
        return
    places = first + tl.arange(0, BLOCK_T)
    has_token = places < last
    tokens = tl.load(tokens_ptr + places, mask=has_token, other=0)
    TILES_0: tl.constexpr = (SIZE_0 + BLOCK_O - 1) // BLOCK_O
    TILES_1: tl.constexpr = TILES_0 + (SIZE_1 + BLOCK_O - 1) // BLOCK_O
    tile = tl.program_id(1)
    part = (tile >= TILES_0).to(tl.int32) + (tile >= TILES_1).to(tl.int32)
    first_tile = tl.where(part == 0, 0, tl.where(part == 1, TILES_0, TILES_1))
    size = tl.where(part == 0, SIZE_0, tl.where(part == 1, SIZE_1, SIZE_2))
    first_output = tl.where(part == 0, 0, tl.where(part == 1, SIZE_0, SIZE_0 + SIZE_1))
    in_part = (tile - first_tile) * BLOCK_O + tl.arange(0, BLOCK_O)
    has_output = in_part < size
    outputs = first_output + in_part
    b_ptr += adapter.to(tl.int64) * b_stride
    shrunk_ptr += part * RANK
    acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
    for start in range(0, tl.load(ranks_ptr + adapter), BLOCK_R):
        ranks = start + tl.arange(0, BLOCK_R)
        shrunk_offsets = places.to(tl.int64)[:, None] * (NUM_PARTS * RANK) + ranks[None, :]
        shrunk = tl.load(shrunk_ptr + shrunk_offsets, mask=has_token[:, None], other=0.0)
        b_offsets = ranks[:, None] * (SIZE_0 + SIZE_1 + SIZE_2) + outputs[None, :]
        b = tl.load(b_ptr + b_offsets, mask=has_output[None, :], other=0.0).to(tl.float32)
        acc = tl.dot(shrunk, b, acc, input_precision="ieee")
    out_offsets = tokens[:, None] * out_stride + outputs[None, :]
    mask = has_token[:, None] & has_output[None, :]
    out = tl.load(out_ptr + out_offsets, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def add_lora(out_TO: Tensor, x_TI: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
    """Write out += x A B into the rows that `batch` names; see `Ops.add_lora`."""
    assert out_TO.stride(1) == x_TI.stride(1) == 1
    num_tokens = len(batch.tokens_N)
    if not num_tokens:
        return
    _, num_parts, num_inputs, rank = weights.a_GPIR.shape
    shrunk_NPR = torch.empty(num_tokens, num_parts, rank, dtype=torch.float32, device=x_TI.device)
    shape = (num_tokens, len(batch.starts_G1) - 1, num_inputs, rank, weights.sizes)
    strides = (x_TI.stride(0), weights.a_GPIR.stride(0), out_TO.stride(0), weights.b_GRO.stride(0))
    shrink, expand = _shaped(shape, strides)
    shrink(x_TI, weights.a_GPIR, batch.tokens_N, batch.starts_G1, weights.ranks_G, shrunk_NPR)
    expand(shrunk_NPR, weights.b_GRO, batch.tokens_N, batch.starts_G1, weights.ranks_G, out_TO)


@lru_cache(maxsize=SHAPES)
def _shaped(shape: tuple[int, int, int, int, tuple[int, ...]], strides: tuple[int, ...]) -> tuple[Launch, Launch]:
    num_tokens, num_adapters, num_inputs, rank, sizes = shape
    x_stride, a_stride, out_stride, b_stride = strides
    assert len(sizes) <= _MAX_PARTS, f"a layer of {len(sizes)} parts"
    num_tiles = triton.cdiv(num_tokens, _BLOCK_T) + min(num_adapters, num_tokens)
    block_r = next(block for block in (64, 32, 16) if rank % block == 0)
    shared = {"RANK": rank, "NUM_PARTS": len(sizes), "NUM_ADAPTERS": num_adapters, "BLOCK_T": _BLOCK_T}
    size_0, size_1, size_2 = (*sizes, 0, 0)[:_MAX_PARTS]
    return (
        Launch(
            _shrink_kernel,
            (num_tiles, len(sizes) * (rank // block_r)),
            (x_stride, a_stride),
            NUM_INPUTS=num_inputs,
            **shared,
            BLOCK_R=block_r,
            BLOCK_I=_BLOCK_I,
            num_warps=4,
            num_stages=3,
        ),
        Launch(
            _expand_kernel,
            (num_tiles, sum(triton.cdiv(size, _BLOCK_O) for size in sizes)),
            (out_stride, b_stride),
            **shared,
            SIZE_0=size_0,
            SIZE_1=size_1,
            SIZE_2=size_2,
            BLOCK_R=block_r,
            BLOCK_O=_BLOCK_O,
            num_warps=4,
            num_stages=2,
        ),
    )
