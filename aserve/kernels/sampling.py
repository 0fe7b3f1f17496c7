"""Sampling in Triton: what reference.py defines, without sorting a vocabulary. Twin: ReferenceOps.sample.

A row is cut into J tiles that are worked on side by side; the mass of a token is a whole number, so the sums do not
depend on the cut. Greedy rows take the first two kernels, all rows when the batch is greedy.

    tile maxima [S, J] -> row maximum and its id [S] -> (floor [S], when a row filters) -> tile mass [S, J] -> draw [S]

The floor under the weights is found bit by bit: positive floats are ordered like their bits, so the largest floor with
enough weights (top_k) or enough mass (top_p) not under it takes one pass a bit, 30 in all. To make them passes over few
weights, the likeliest are set aside first: a histogram of the weights' powers of two says which are at most _MAX_TILE.
They nearly always hold the floor, and the vocabulary is read twice; for a flat distribution it is read up to 15 times a
filter, two bits each. A program does this for one row; rows without a filter leave at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.ops import NO_TOKEN, SamplingBatch
from aserve.kernels.reference import MASS_UNIT

_MAX_TILE = 4096
_MASS_UNIT = tl.constexpr(MASS_UNIT)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_POWERS = tl.constexpr(32)
"""Powers of two that weights are counted by. A weight under the last is less than a unit of mass."""
# Per-row numbers may begin anywhere in a packed buffer, and a kernel reads one of each: alignment means nothing to it.
_ROW_POINTERS = ["banned_ptr", "temperature_ptr"]


@triton.jit
def _load_logits(row_ptr, ids, vocab_size, banned_ptr, num_banned):
    """Logits of one row as float32, -inf at banned ids and past the end. banned_ptr: that row's ids, or None."""
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    if banned_ptr is not None:
        for i in range(num_banned):
            logits = tl.where(ids == tl.load(banned_ptr + i), float("-inf"), logits)
    return logits


@triton.jit
def _is_finite(x):
    """Whether a number is neither infinite nor NaN."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def _weights(logits, largest, temperature):
    """exp((logit - largest) / temperature): 1 for the likeliest token."""
    return tl.exp((logits - largest) / temperature)


@triton.jit
def _mass(weights, floor):
    """Whole units of mass of the weights that are kept."""
    return tl.where(weights >= floor, (weights * _MASS_UNIT).to(tl.int64), 0)


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
    logits = _load_logits(logits_ptr + row * logits_stride, ids, VOCAB_SIZE, banned_ptr, num_banned)
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
    tl.store(token_ptr + row, tl.where(_is_finite(largest), token, _NO_TOKEN))


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
def _likeliest(weights_ptr, likeliest_ptr, num_by_power, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Set the likeliest weights aside, BLOCK at most; returns how many. num_by_power: of weights in [2^-i, 2^(1-i))."""
    num_powers = tl.sum((tl.cumsum(num_by_power, axis=0) <= BLOCK).to(tl.int32), axis=0)
    # The last of the _POWERS holds everything smaller too. At least one power has to fit.
    smallest = tl.where(num_powers == _POWERS, 0, (128 - num_powers) << 23).to(tl.float32, bitcast=True)
    num_likeliest = 0
    if num_powers > 0:
        for start in range(0, VOCAB_SIZE, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            weights = tl.load(weights_ptr + ids, mask=ids < VOCAB_SIZE, other=-1.0)
            taken = (weights >= smallest).to(tl.int32)
            places = num_likeliest + tl.cumsum(taken, axis=0) - 1
            tl.store(likeliest_ptr + places, weights, mask=taken > 0)
            num_likeliest += tl.sum(taken, axis=0)
        tl.debug_barrier()  # the passes to come read what other threads wrote
    return num_likeliest


@triton.jit(
    do_not_specialize=["num_banned"],
    do_not_specialize_on_alignment=[*_ROW_POINTERS, "top_k_ptr", "top_p_ptr", "min_p_ptr"],
)
def _floor_kernel(
    logits_ptr,
    banned_ptr,
    largest_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    weights_ptr,
    likeliest_ptr,
    floor_ptr,
    logits_stride,
    num_banned,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest weight that the filters of a row keep. Scratch: weights_ptr [S, V], likeliest_ptr [S, BLOCK]."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row)
    has_top_k = (top_k > 0) & (top_k < VOCAB_SIZE)
    largest = tl.load(largest_ptr + row)
    floor = 0.0
    if (temperature > 0) & _is_finite(largest) & (has_top_k | (top_p < 1)):
        if banned_ptr is not None:
            banned_ptr += row * num_banned
        weights_ptr += row * VOCAB_SIZE
        likeliest_ptr += row * BLOCK
        num_by_power = tl.zeros([_POWERS], dtype=tl.int32)
        mass = tl.zeros([BLOCK], dtype=tl.int64)
        for start in range(0, VOCAB_SIZE, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            logits = _load_logits(logits_ptr + row * logits_stride, ids, VOCAB_SIZE, banned_ptr, num_banned)
            weights = _weights(logits, largest, temperature)
            tl.store(weights_ptr + ids, weights, mask=ids < VOCAB_SIZE)
            powers = 127 - (weights.to(tl.int32, bitcast=True) >> 23)
            num_by_power += tl.histogram(tl.minimum(tl.maximum(powers, 0), _POWERS - 1), _POWERS)
            mass += _mass(weights, 0.0)
        tl.debug_barrier()
        num_likeliest = _likeliest(weights_ptr, likeliest_ptr, num_by_power, VOCAB_SIZE, BLOCK)
        total = tl.sum(mass, axis=0)
        if has_top_k:
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


@triton.jit(do_not_specialize=["num_banned"], do_not_specialize_on_alignment=_ROW_POINTERS)
def _tile_mass_kernel(
    logits_ptr,
    banned_ptr,
    largest_ptr,
    temperature_ptr,
    floor_ptr,
    tile_mass_ptr,
    logits_stride,
    num_banned,
    VOCAB_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The mass that is kept in a tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    largest = tl.load(largest_ptr + row)
    if (temperature > 0) & _is_finite(largest):
        if banned_ptr is not None:
            banned_ptr += row * num_banned
        floor = 0.0
        if floor_ptr is not None:
            floor = tl.load(floor_ptr + row)
        ids = tile * TILE + tl.arange(0, TILE)
        logits = _load_logits(logits_ptr + row * logits_stride, ids, VOCAB_SIZE, banned_ptr, num_banned)
        mass = _mass(_weights(logits, largest, temperature), floor)
        tl.store(tile_mass_ptr + row * NUM_TILES + tile, tl.sum(mass, axis=0))


@triton.jit(
    do_not_specialize=["num_banned"], do_not_specialize_on_alignment=[*_ROW_POINTERS, "seeds_ptr", "positions_ptr"]
)
def _draw_kernel(
    logits_ptr,
    banned_ptr,
    largest_ptr,
    temperature_ptr,
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
    if (temperature > 0) & _is_finite(largest):
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
        logits = _load_logits(logits_ptr + row * logits_stride, ids, VOCAB_SIZE, banned_ptr, num_banned)
        mass = _mass(_weights(logits, largest, temperature), floor)
        inside = before + tl.cumsum(mass, axis=0)
        tl.store(token_ptr + row, (tile * TILE + tl.sum((inside <= target).to(tl.int32), axis=0)).to(tl.int64))


def sample(logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
    """One token id a row, int64 [S], in two kernels for a greedy batch, four for a sampled, five for a filtered one."""
    num_rows, vocab_size = logits_SV.shape
    tile = min(_MAX_TILE, max(16, triton.next_power_of_2(vocab_size)))
    num_tiles = triton.cdiv(vocab_size, tile)
    block_tiles = triton.next_power_of_2(num_tiles)
    new = logits_SV.new_empty
    tile_max_SJ, tile_id_SJ = (
        new((num_rows, num_tiles), dtype=torch.float32),
        new((num_rows, num_tiles), dtype=torch.int32),
    )
    largest_S, tokens_S = new(num_rows, dtype=torch.float32), new(num_rows, dtype=torch.int64)
    if not num_rows:
        return tokens_S
    banned_SC = batch.banned_SC
    num_banned = 0 if banned_SC is None else banned_SC.shape[1]
    row_of = (logits_SV.stride(0), num_banned)
    _tile_max_kernel[(num_rows, num_tiles)](
        logits_SV, banned_SC, tile_max_SJ, tile_id_SJ, *row_of, VOCAB_SIZE=vocab_size, NUM_TILES=num_tiles, TILE=tile
    )
    _row_max_kernel[(num_rows,)](
        tile_max_SJ, tile_id_SJ, largest_S, tokens_S, NUM_TILES=num_tiles, BLOCK_TILES=block_tiles, num_warps=1
    )
    if batch.all_greedy:
        return tokens_S
    row_inputs = (logits_SV, banned_SC, largest_S, batch.temperature_S)
    floor_S = None
    if batch.any_filter:
        floor_S = new(num_rows, dtype=torch.float32)
        scratch = [new((num_rows, width), dtype=torch.float32) for width in (vocab_size, tile)]
        filters = (batch.top_k_S, batch.top_p_S, batch.min_p_S)
        _floor_kernel[(num_rows,)](
            *row_inputs, *filters, *scratch, floor_S, *row_of, VOCAB_SIZE=vocab_size, BLOCK=tile, num_warps=16
        )
    tile_mass_SJ = new((num_rows, num_tiles), dtype=torch.int64)
    tiling = {"VOCAB_SIZE": vocab_size, "NUM_TILES": num_tiles, "TILE": tile}
    _tile_mass_kernel[(num_rows, num_tiles)](*row_inputs, floor_S, tile_mass_SJ, *row_of, **tiling)
    draw_inputs = (floor_S, tile_mass_SJ, batch.seeds_S, batch.positions_S)
    _draw_kernel[(num_rows,)](*row_inputs, *draw_inputs, tokens_S, *row_of, **tiling, BLOCK_TILES=block_tiles)
    return tokens_S
