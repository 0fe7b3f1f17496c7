"""Sampling in Triton: what reference.py defines, without sorting a vocabulary. Twin: ReferenceOps.sample.

A row is cut into J tiles that are worked on side by side; the mass of a token is a whole number, so the sums do not
depend on the cut. Greedy rows take the first two kernels, all rows when the batch is greedy.

    tile maxima [S, J] -> row maximum and its id [S] -> (weights [S, V] and floor [S], when a row filters)
                       -> tile mass [S, J] -> draw [S]

Logits are read as they are, in half precision too, and twice at most: for the maxima, and for what is relative to them.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch
from aserve.kernels.ops import NO_TOKEN, SamplingBatch
from aserve.kernels.sampling_filters import ROW_POINTERS, filter_weights, is_finite, load_logits, mass_of, weights_of

_MAX_TILE = 4096
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit(do_not_specialize=["num_banned"], do_not_specialize_on_alignment=["banned_ptr"])
def _tile_max_kernel(
    logits_ptr,
    banned_ptr,
    tile_max_ptr,
    tile_id_ptr,
    logits_stride,
    num_banned,
    VOCAB_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest logit of a tile, and the lowest id that has it. NaN counts as infinity."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if banned_ptr is not None:
        banned_ptr += row * num_banned
    ids = tile * TILE + tl.arange(0, TILE)
    logits = load_logits(logits_ptr + row * logits_stride, ids, VOCAB_SIZE, banned_ptr, num_banned)
    largest = tl.max(tl.where(logits == logits, logits, float("inf")), axis=0)
    tl.store(tile_max_ptr + row * NUM_TILES + tile, largest)
    tl.store(tile_id_ptr + row * NUM_TILES + tile, tl.min(tl.where(logits == largest, ids, VOCAB_SIZE), axis=0))


@triton.jit
def _row_max_kernel(
    tile_max_ptr, tile_id_ptr, largest_ptr, token_ptr, NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr
):
    """The largest logit of a row, and the lowest id that has it: the greedy token. NO_TOKEN if it is not finite."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    mask = tiles < NUM_TILES
    maxima = tl.load(tile_max_ptr + row * NUM_TILES + tiles, mask=mask, other=float("-inf"))
    ids = tl.load(tile_id_ptr + row * NUM_TILES + tiles, mask=mask, other=2147483647)
    largest = tl.max(maxima, axis=0)
    tl.store(largest_ptr + row, largest)
    token = tl.min(tl.where(maxima == largest, ids, 2147483647), axis=0).to(tl.int64)
    tl.store(token_ptr + row, tl.where(is_finite(largest), token, _NO_TOKEN))


@triton.jit(do_not_specialize=["num_banned"], do_not_specialize_on_alignment=ROW_POINTERS)
def _tile_mass_kernel(
    logits_ptr,
    banned_ptr,
    largest_ptr,
    temperature_ptr,
    weights_ptr,
    floor_ptr,
    tile_mass_ptr,
    logits_stride,
    num_banned,
    VOCAB_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The mass that is kept in a tile. Of logits, or where a row of the batch filters of weights, with their floor."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    largest = tl.load(largest_ptr + row)
    if (temperature > 0) & is_finite(largest):
        if banned_ptr is not None:
            banned_ptr += row * num_banned
        floor = 0.0
        if floor_ptr is not None:
            floor = tl.load(floor_ptr + row)
        ids = tile * TILE + tl.arange(0, TILE)
        if weights_ptr is not None:
            weights = tl.load(weights_ptr + row * VOCAB_SIZE + ids, mask=ids < VOCAB_SIZE, other=0.0)
        else:
            logits = load_logits(logits_ptr + row * logits_stride, ids, VOCAB_SIZE, banned_ptr, num_banned)
            weights = weights_of(logits, largest, temperature)
        mass = mass_of(weights, floor)
        tl.store(tile_mass_ptr + row * NUM_TILES + tile, tl.sum(mass, axis=0))


@triton.jit(
    do_not_specialize=["num_banned"], do_not_specialize_on_alignment=[*ROW_POINTERS, "seeds_ptr", "positions_ptr"]
)
def _draw_kernel(
    logits_ptr,
    banned_ptr,
    largest_ptr,
    temperature_ptr,
    weights_ptr,
    floor_ptr,
    tile_mass_ptr,
    seeds_ptr,
    positions_ptr,
    token_ptr,
    logits_stride,
    num_banned,
    VOCAB_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The first id whose cumulative mass exceeds the row's random share of the total: find its tile, then the id."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    largest = tl.load(largest_ptr + row)
    if (temperature > 0) & is_finite(largest):
        if banned_ptr is not None:
            banned_ptr += row * num_banned
        floor = 0.0
        if floor_ptr is not None:
            floor = tl.load(floor_ptr + row)
        tiles = tl.arange(0, BLOCK_TILES)
        tile_mass = tl.load(tile_mass_ptr + row * NUM_TILES + tiles, mask=tiles < NUM_TILES, other=0)
        total = tl.sum(tile_mass, axis=0)
        position = tl.load(positions_ptr + row).to(tl.int64)
        low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        zero = low * 0
        word, _, _, _ = tl.philox(tl.load(seeds_ptr + row), low, high, zero, zero)
        share = word.to(tl.float64) * 2.3283064365386963e-10  # 2^-32
        target = tl.floor(share * total.to(tl.float64)).to(tl.int64)

        passed = tl.cumsum(tile_mass, axis=0) <= target
        tile = tl.sum(passed.to(tl.int32), axis=0)
        before = tl.sum(tl.where(passed, tile_mass, 0), axis=0)
        ids = tile * TILE + tl.arange(0, TILE)
        if weights_ptr is not None:
            weights = tl.load(weights_ptr + row * VOCAB_SIZE + ids, mask=ids < VOCAB_SIZE, other=0.0)
        else:
            logits = load_logits(logits_ptr + row * logits_stride, ids, VOCAB_SIZE, banned_ptr, num_banned)
            weights = weights_of(logits, largest, temperature)
        mass = mass_of(weights, floor)
        inside = before + tl.cumsum(mass, axis=0)
        tl.store(token_ptr + row, (tile * TILE + tl.sum((inside <= target).to(tl.int32), axis=0)).to(tl.int64))


class _Launches(NamedTuple):
    """In order. A greedy batch takes the first two."""

    tile_max: Launch
    row_max: Launch
    tile_mass: Launch
    draw: Launch


def sample(logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
    """One token id a row, int64 [S], in two kernels for a greedy batch, four for a sampled, seven for a filtered."""
    num_rows, vocab_size = logits_SV.shape
    new = logits_SV.new_empty
    tokens_S = new((num_rows,), dtype=torch.int64)
    if not num_rows:
        return tokens_S
    tile = min(_MAX_TILE, max(16, triton.next_power_of_2(vocab_size)))
    num_tiles = triton.cdiv(vocab_size, tile)
    tile_max_SJ = new((num_rows, num_tiles), dtype=torch.float32)
    tile_id_SJ = new((num_rows, num_tiles), dtype=torch.int32)
    largest_S = new((num_rows,), dtype=torch.float32)
    banned_SC = batch.banned_SC
    num_banned = 0 if banned_SC is None else banned_SC.shape[1]
    launches = _shaped(num_rows, vocab_size, logits_SV.stride(0), num_banned, tile)
    launches.tile_max(logits_SV, banned_SC, tile_max_SJ, tile_id_SJ)
    launches.row_max(tile_max_SJ, tile_id_SJ, largest_S, tokens_S)
    if batch.all_greedy:
        return tokens_S
    source = (logits_SV, banned_SC, largest_S, batch.columns_S.temperature, None, None)
    if batch.any_filter:
        source = (None, None, *source[2:4], *filter_weights(logits_SV, largest_S, batch, tile))
    tile_mass_SJ = new((num_rows, num_tiles), dtype=torch.int64)
    row_inputs = (*source, tile_mass_SJ)
    launches.tile_mass(*row_inputs)
    launches.draw(*row_inputs, batch.columns_S.seed, batch.positions_S, tokens_S)
    return tokens_S


@lru_cache(maxsize=SHAPES)
def _shaped(num_rows: int, vocab_size: int, stride: int, num_banned: int, tile: int) -> _Launches:
    num_tiles = triton.cdiv(vocab_size, tile)
    grid, numbers = (num_rows, num_tiles), (stride, num_banned)
    tiling = {"VOCAB_SIZE": vocab_size, "NUM_TILES": num_tiles, "TILE": tile}
    block_tiles = triton.next_power_of_2(num_tiles)
    return _Launches(
        Launch(_tile_max_kernel, grid, numbers, **tiling),
        Launch(_row_max_kernel, (num_rows,), NUM_TILES=num_tiles, BLOCK_TILES=block_tiles, num_warps=1),
        Launch(_tile_mass_kernel, grid, numbers, **tiling),
        Launch(_draw_kernel, (num_rows,), numbers, **tiling, BLOCK_TILES=block_tiles),
    )
