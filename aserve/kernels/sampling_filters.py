"""The filters of sampling in Triton: how small a weight may be, found without sorting. And what a weight is.

The floor under the weights is found bit by bit: positive floats are ordered like their bits, so the largest floor with
enough weights (top_k) or enough mass (top_p) not under it takes one pass a bit, 30 in all. To make them passes over few
weights, the likeliest are set aside first: a histogram of the weights' powers of two says which are at most
_MAX_LIKELIEST. They nearly always hold the floor; for a flat distribution a vocabulary is read up to 15 times a filter,
two bits each. A row is cut into J tiles, as everywhere in sampling.py, and only the last kernel is one program a row:

    logits -> weights [S, V], mass [S, J], numbers by power [S, J, powers] -> likeliest [S, L] -> floor [S]
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch
from aserve.kernels.ops import SamplingBatch
from aserve.kernels.reference import MASS_UNIT

_MASS_UNIT = tl.constexpr(MASS_UNIT)
_POWERS = tl.constexpr(32)
"""Powers of two that weights are counted by. A weight under the last is less than a unit of mass."""
_MAX_LIKELIEST = 4096
_BLOCK = 2048
"""Weights that a program of 8 warps tallies at a time: its sums leave registers for a second program beside it."""
ROW_POINTERS = ["banned_ptr", "temperature_ptr"]
"""Per-row numbers may begin anywhere in a packed buffer, and a kernel reads one of each: it needs no alignment."""
_FILTERS = ["top_k_ptr", "top_p_ptr"]


@triton.jit
def load_logits(row_ptr, ids, vocab_size, banned_ptr, num_banned):
    """Logits of one row as float32, -inf at banned ids and past the end. banned_ptr: that row's ids, or None."""
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    if banned_ptr is not None:
        for i in range(num_banned):
            logits = tl.where(ids == tl.load(banned_ptr + i), float("-inf"), logits)
    return logits


@triton.jit
def is_finite(x):
    """Whether a number is neither infinite nor NaN."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def weights_of(logits, largest, temperature):
    """exp((logit - largest) / temperature): 1 for the likeliest token."""
    return tl.exp((logits - largest) / temperature)


@triton.jit
def mass_of(weights, floor):
    """Whole units of mass of the weights that are kept."""
    return tl.where(weights >= floor, (weights * _MASS_UNIT).to(tl.int64), 0)


@triton.jit
def _tally(weights_ptr, num_weights, candidate, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many weights are not under the candidate, or their mass."""
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, num_weights, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weights = tl.load(weights_ptr + ids, mask=ids < num_weights, other=-1.0)
        total += tl.where(weights >= candidate, (weights * _MASS_UNIT).to(tl.int64) if BY_MASS else 1, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _tally_three(weights_ptr, num_weights, low_bits, step_bits, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The tallies of three candidates, a step apart, in one pass."""
    first = (low_bits + step_bits).to(tl.float32, bitcast=True)
    second = (low_bits + 2 * step_bits).to(tl.float32, bitcast=True)
    third = (low_bits + 3 * step_bits).to(tl.float32, bitcast=True)
    zero = tl.zeros([BLOCK], dtype=tl.int64)
    total1, total2, total3 = zero, zero, zero
    for start in range(0, num_weights, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weights = tl.load(weights_ptr + ids, mask=ids < num_weights, other=-1.0)
        units = (weights * _MASS_UNIT).to(tl.int64) if BY_MASS else tl.full([BLOCK], 1, tl.int64)
        total1 += tl.where(weights >= first, units, 0)
        total2 += tl.where(weights >= second, units, 0)
        total3 += tl.where(weights >= third, units, 0)
    return tl.sum(total1, axis=0), tl.sum(total2, axis=0), tl.sum(total3, axis=0)


@triton.jit
def _largest_floor(weights_ptr, num_weights, needed, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest floor that leaves a tally of `needed`, two of its bits a pass; 0 where nothing does."""
    floor_bits = 0
    bit = 28  # bits 29 and 28 first: bit 29 is the highest that is set in the float 1.0, 0x3f800000
    while bit >= 0:
        step_bits = 1 << bit
        tally1, tally2, tally3 = _tally_three(weights_ptr, num_weights, floor_bits, step_bits, BY_MASS, BLOCK)
        enough = (tally1 >= needed).to(tl.int32) + (tally2 >= needed).to(tl.int32) + (tally3 >= needed).to(tl.int32)
        floor_bits += enough * step_bits
        bit -= 2
    return floor_bits.to(tl.float32, bitcast=True)


@triton.jit
def _narrows(top_k_ptr, top_p_ptr, temperature_ptr, largest_ptr, row, VOCAB_SIZE: tl.constexpr):
    """Whether a row is sampled, and has a top_k or top_p that takes something away."""
    top_k = tl.load(top_k_ptr + row)
    sampled = (tl.load(temperature_ptr + row) > 0) & is_finite(tl.load(largest_ptr + row))
    return sampled & (((top_k > 0) & (top_k < VOCAB_SIZE)) | (tl.load(top_p_ptr + row) < 1))


@triton.jit(do_not_specialize=["num_banned"], do_not_specialize_on_alignment=[*ROW_POINTERS, *_FILTERS])
def _weigh_kernel(
    logits_ptr,
    banned_ptr,
    largest_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    weights_ptr,
    tile_mass_ptr,
    num_by_power_ptr,
    logits_stride,
    num_banned,
    VOCAB_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile's weights; and of a row that filters, their mass and how many are in [2^-i, 2^(1-i)) for each i."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    largest = tl.load(largest_ptr + row)
    if (temperature > 0) & is_finite(largest):
        if banned_ptr is not None:
            banned_ptr += row * num_banned
        ids = tile * TILE + tl.arange(0, TILE)
        logits = load_logits(logits_ptr + row * logits_stride, ids, VOCAB_SIZE, banned_ptr, num_banned)
        weights = weights_of(logits, largest, temperature)
        tl.store(weights_ptr + row * VOCAB_SIZE + ids, weights, mask=ids < VOCAB_SIZE)
        if _narrows(top_k_ptr, top_p_ptr, temperature_ptr, largest_ptr, row, VOCAB_SIZE):
            place = row * NUM_TILES + tile
            tl.store(tile_mass_ptr + place, tl.sum(mass_of(weights, 0.0), axis=0))
            powers = 127 - (weights.to(tl.int32, bitcast=True) >> 23)
            num_by_power = tl.histogram(tl.minimum(tl.maximum(powers, 0), _POWERS - 1), _POWERS)
            # What lies past the end of the vocabulary has the weight 0, and is counted with the smallest.
            each = tl.arange(0, _POWERS)
            past_end = tl.maximum((tile + 1) * TILE - VOCAB_SIZE, 0)
            num_by_power -= tl.where(each == _POWERS - 1, past_end, 0)
            tl.store(num_by_power_ptr + place * _POWERS + each, num_by_power)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", *_FILTERS])
def _set_aside_kernel(
    weights_ptr,
    num_by_power_ptr,
    largest_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    likeliest_ptr,
    num_likeliest_ptr,
    VOCAB_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    MAX_LIKELIEST: tl.constexpr,
):
    """The likeliest weights of a tile, behind those of the tiles before it: whole powers of two, as many as fit."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if _narrows(top_k_ptr, top_p_ptr, temperature_ptr, largest_ptr, row, VOCAB_SIZE):
        tiles, each = tl.arange(0, BLOCK_TILES), tl.arange(0, _POWERS)
        counts = (row * NUM_TILES + tiles)[:, None] * _POWERS + each[None, :]
        num_by_power = tl.load(num_by_power_ptr + counts, mask=(tiles < NUM_TILES)[:, None], other=0)
        fits = tl.cumsum(tl.sum(num_by_power, axis=0), axis=0) <= MAX_LIKELIEST
        num_powers = tl.sum(fits.to(tl.int32), axis=0)
        taken_by_tile = tl.sum(tl.where((each < num_powers)[None, :], num_by_power, 0), axis=1)
        if tile == 0:
            tl.store(num_likeliest_ptr + row, tl.sum(taken_by_tile, axis=0))
        if num_powers > 0:
            # The last of the _POWERS holds everything smaller too.
            smallest = tl.where(num_powers == _POWERS, 0, (128 - num_powers) << 23).to(tl.float32, bitcast=True)
            ids = tile * TILE + tl.arange(0, TILE)
            weights = tl.load(weights_ptr + row * VOCAB_SIZE + ids, mask=ids < VOCAB_SIZE, other=-1.0)
            taken = (weights >= smallest).to(tl.int32)
            before = tl.sum(tl.where(tiles < tile, taken_by_tile, 0), axis=0)
            places = before + tl.cumsum(taken, axis=0) - 1
            tl.store(likeliest_ptr + row * MAX_LIKELIEST + places, weights, mask=taken > 0)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", *_FILTERS, "min_p_ptr"])
def _floor_kernel(
    weights_ptr,
    likeliest_ptr,
    num_likeliest_ptr,
    tile_mass_ptr,
    largest_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floor_ptr,
    VOCAB_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    MAX_LIKELIEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest weight that the filters of a row keep."""
    row = tl.program_id(0).to(tl.int64)
    floor = 0.0
    if _narrows(top_k_ptr, top_p_ptr, temperature_ptr, largest_ptr, row, VOCAB_SIZE):
        top_k = tl.load(top_k_ptr + row).to(tl.int64)
        top_p = tl.load(top_p_ptr + row)
        weights_ptr += row * VOCAB_SIZE
        likeliest_ptr += row * MAX_LIKELIEST
        num_likeliest = tl.load(num_likeliest_ptr + row)
        tiles = tl.arange(0, BLOCK_TILES)
        total = tl.sum(tl.load(tile_mass_ptr + row * NUM_TILES + tiles, mask=tiles < NUM_TILES, other=0), axis=0)
        if (top_k > 0) & (top_k < VOCAB_SIZE):
            source_ptr, num_weights = weights_ptr, VOCAB_SIZE
            if top_k <= num_likeliest:
                source_ptr, num_weights = likeliest_ptr, num_likeliest
            floor = _largest_floor(source_ptr, num_weights, top_k, False, BLOCK)
            total = _tally(source_ptr, num_weights, floor, True, BLOCK)
        if top_p < 1:
            needed = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
            source_ptr, num_weights = weights_ptr, VOCAB_SIZE
            if needed <= _tally(likeliest_ptr, num_likeliest, 0.0, True, BLOCK):
                source_ptr, num_weights = likeliest_ptr, num_likeliest
            floor = tl.maximum(floor, _largest_floor(source_ptr, num_weights, needed, True, BLOCK))
    tl.store(floor_ptr + row, tl.maximum(floor, tl.load(min_p_ptr + row)))


class _Launches(NamedTuple):
    """In order."""

    weigh: Launch
    set_aside: Launch
    find_floor: Launch


def filter_weights(logits_SV: Tensor, largest_S: Tensor, batch: SamplingBatch, tile: int) -> tuple[Tensor, Tensor]:
    """The weights [S, V] of the rows that are sampled, and the floor [S] under those that each row keeps, float32."""
    num_rows, vocab_size = logits_SV.shape
    num_tiles = triton.cdiv(vocab_size, tile)
    banned_SC = batch.banned_SC
    num_banned = 0 if banned_SC is None else banned_SC.shape[1]
    new = logits_SV.new_empty
    weights_SV = new((num_rows, vocab_size), dtype=torch.float32)
    likeliest_SL = new((num_rows, _MAX_LIKELIEST), dtype=torch.float32)
    num_likeliest_S = new((num_rows,), dtype=torch.int32)
    tile_mass_SJ = new((num_rows, num_tiles), dtype=torch.int64)
    num_by_power_SJ = new((num_rows, num_tiles, _POWERS.value), dtype=torch.int32)
    floor_S = new((num_rows,), dtype=torch.float32)
    columns_S = batch.columns_S
    row_inputs = (largest_S, columns_S.temperature, columns_S.top_k, columns_S.top_p)
    launches = _shaped(num_rows, vocab_size, logits_SV.stride(0), num_banned, tile)
    launches.weigh(logits_SV, banned_SC, *row_inputs, weights_SV, tile_mass_SJ, num_by_power_SJ)
    launches.set_aside(weights_SV, num_by_power_SJ, *row_inputs, likeliest_SL, num_likeliest_S)
    launches.find_floor(weights_SV, likeliest_SL, num_likeliest_S, tile_mass_SJ, *row_inputs, columns_S.min_p, floor_S)
    return weights_SV, floor_S


@lru_cache(maxsize=SHAPES)
def _shaped(num_rows: int, vocab_size: int, stride: int, num_banned: int, tile: int) -> _Launches:
    num_tiles = triton.cdiv(vocab_size, tile)
    tiling = {"VOCAB_SIZE": vocab_size, "NUM_TILES": num_tiles}
    room = {"BLOCK_TILES": triton.next_power_of_2(num_tiles), "MAX_LIKELIEST": _MAX_LIKELIEST}
    grid = (num_rows, num_tiles)
    block = min(_BLOCK, tile)
    return _Launches(
        Launch(_weigh_kernel, grid, (stride, num_banned), **tiling, TILE=tile, num_warps=8),
        Launch(_set_aside_kernel, grid, **tiling, **room, TILE=tile, num_warps=8),
        Launch(_floor_kernel, (num_rows,), **tiling, **room, BLOCK=block, num_warps=8),
    )
