"""What the two attention kernels share: the shapes of their tiles, and where a tile of keys lies in the paged cache.

A tile is as large as its share of the registers and of the shared memory allows. A load through the block table is two
loads in a row, and Triton deals a loop's pipeline stages out among them: of five, two tiles are in flight; of three or
four, one, and the loop waits for each. Float32 multiplies without tensor cores, in registers, which a larger tile
overflows.
"""

from dataclasses import dataclass, replace
from typing import Final

import triton
import triton.language as tl

Capability = tuple[int, int]
"""CUDA's number for a kind of GPU: (9, 0) is an H100 or H200, (8, 0) an A100, (8, 9) an L4 or RTX 40."""

LARGE_SHARED_MEMORY: Final = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)})
"""Kinds whose processors have 163 KiB of shared memory or more for a program. The others have 99 KiB, or 64."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """rows: of queries at most. keys: in a step of the loop. programs_per_sm: what fits a processor side by side.

    max_registers: of a thread, None where the compiler may take all.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a table: the tiles for heads of at most these sizes. group: query heads that share a key head."""

    element_bytes: int
    head_dim: int
    group: int
    large: Tiles
    small: Tiles
    """large, small: with large shared memory, and without."""


_MANY: Final = 1 << 20
_FEW_ROWS: Final = (16, 64)
"""Of tiles for prompts so short that a larger one would stay empty."""
_DECODE_128: Final = Tiles(16, 64, 4, 5, 3)
_CROWDED_128: Final = Tiles(16, 64, 2, 3, 4)
"""Decoding over heads of 128: two tiles under way, or one and a program more, of half the warps, on each processor."""
# fmt: off
_DECODE: Final = (
    #     bytes  dim  group   rows keys warps stages per SM
    _Line(2,   64,   16, Tiles( 16, 128, 4, 5, 3), Tiles(16, 64, 4, 5, 2)),
    _Line(2,  128,   16, _DECODE_128, Tiles(16, 32, 4, 5, 2)),
    _Line(2,  256,   16, Tiles( 16, 32, 4, 5, 3), Tiles(16, 16, 4, 5, 2)),
    _Line(2, _MANY,  16, Tiles( 16, 16, 8, 5, 2), Tiles(16, 16, 8, 2, 1)),
    _Line(2,  128, _MANY, Tiles(_MANY, 64, 8, 5, 2), Tiles(_MANY, 32, 8, 5, 1)),
    _Line(2, _MANY, _MANY, Tiles(_MANY, 32, 8, 5, 1), Tiles(_MANY, 16, 8, 2, 1)),
    _Line(4, _MANY, _MANY, Tiles(_MANY, 16, 8, 2, 2), Tiles(_MANY, 16, 8, 2, 1)),
)
_PREFILL: Final = (
    _Line(2,  128, _MANY, Tiles(128, 64, 8, 5), Tiles(64, 32, 4, 5)),
    _Line(2, _MANY, _MANY, Tiles(128, 32, 8, 5), Tiles(64, 16, 4, 5)),
    _Line(4, _MANY, _MANY, Tiles( 16, 16, 4, 2), Tiles(16, 16, 4, 2)),
)
_LONG_PREFILL: Final = (
    _Line(2,   64, _MANY, Tiles(128, 64, 8, 5, 2, 128), Tiles(64, 32, 4, 5)),
    _Line(2,  128, _MANY, Tiles(128, 128, 8, 3), Tiles(64, 32, 4, 5)),
    *_PREFILL[1:],
)
"""Where a tile has all its rows and scores have no cap, which takes registers. Two programs a processor multiply and
exponentiate in turns; a single one does best with many keys between two waits."""
# fmt: on


def _look_up(table: tuple[_Line, ...], head_dim: int, group: int, element_bytes: int, capability: Capability) -> Tiles:
    line = next(
        line
        for line in table
        if line.element_bytes == element_bytes and head_dim <= line.head_dim and group <= line.group
    )
    return line.large if capability in LARGE_SHARED_MEMORY else line.small


def decode_tiles(head_dim: int, group: int, element_bytes: int, capability: Capability) -> Tiles:
    """For one query token a sequence: the group fills the rows."""
    tiles = _look_up(_DECODE, head_dim, group, element_bytes, capability)
    rows = max(16, triton.next_power_of_2(group))  # the smallest matrix product has 16
    return Tiles(rows, tiles.keys, tiles.num_warps, tiles.num_stages, tiles.programs_per_sm)


def crowded_tiles(tiles: Tiles) -> Tiles:
    """For decoding in so many programs that a few would be left over for a second wave: all in one, where they fit.

    That is slower where there is room, unless contexts are split, and takes 0.77 to 0.91 of the time where there is
    none (an H200: 50 to 66 sequences of 8 key heads of 128, contexts of 512 to 4,096). Tiles that have no such twin are
    returned as they are.
    """
    return _CROWDED_128 if tiles == _DECODE_128 else tiles


def prefill_tiles(
    max_rows: int, head_dim: int, group: int, element_bytes: int, capability: Capability, *, soft_cap: bool = False
) -> Tiles:
    """For many query tokens a sequence, no larger than the longest needs. max_rows: its tokens times the group."""
    table = _LONG_PREFILL if max_rows > _FEW_ROWS[-1] and not soft_cap else _PREFILL
    tiles = _look_up(table, head_dim, group, element_bytes, capability)
    smallest = max(16, triton.next_power_of_2(group))
    wanted = next((rows for rows in _FEW_ROWS if max_rows <= rows), tiles.rows)
    rows = max(min(wanted, tiles.rows), smallest)
    return replace(tiles, rows=rows, num_warps=8 if rows >= 128 else 4)


@triton.jit
def soft_cap_scores(scores, cap):
    """cap * tanh(scores / cap), by an exponential that cannot overflow. Both are in units of ln 2."""
    decay = tl.exp2(tl.abs(scores) / cap * -2.8853900817779268)  # e^(-2x) = 2^(-2x / ln 2)
    tanh = (1.0 - decay) / (1.0 + decay)
    return tl.where(scores < 0, -tanh, tanh) * cap


@triton.jit
def softmax_step(scores, row_max, row_sum, scale):
    """A tile's weights 2^(scale * score - row maximum), and what comes of the rows: rescaling, sum and maximum.

    The scale is positive, so that the largest score stays the largest, and one instruction scales and subtracts.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    return weights, rescale, row_sum * rescale + tl.sum(weights, axis=1), new_max


@triton.jit
def as_multiplied(q, k_ptr):
    """Queries in the type that they are multiplied in, and keys and values with them: their own.

    Keys of float8 become float16 by an instruction for two numbers, and bfloat16 by four: there queries of bfloat16 are
    multiplied as float16, and one beyond its largest number, 65504, as that.
    """
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return q


@triton.jit
def offsets_in_tile(slot_stride, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """What a key's number adds to the start of its block (or of its tile, where that is smaller), [BLOCK_N, BLOCK_D].

    It is the same in every tile, so it is computed once, before the loop.
    """
    return (tl.arange(0, BLOCK_N) % BLOCK_SIZE)[:, None] * slot_stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def tile_starts(
    table_ptr,
    start,
    first,
    end,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TABLE_COPIES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Where the block (or tile) of each key begins, [BLOCK_N, 1]. start: the tile's first position, a multiple of it.

    Table entries are read at positions in [first, end) where MASKED; the others may not exist. TABLE_COPIES: how often
    each is read, see `table_copies`.
    """
    positions = start + tl.arange(0, BLOCK_N * TABLE_COPIES) // TABLE_COPIES
    if MASKED:
        inside = (positions >= first) & (positions < end)
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=inside, other=0)
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
    if TABLE_COPIES > 1:
        blocks = tl.max(tl.reshape(blocks, [BLOCK_N, TABLE_COPIES]), axis=1)
    starts = blocks.to(tl.int64) * (BLOCK_SIZE * slot_stride)
    if BLOCK_SIZE > BLOCK_N:
        starts += start % BLOCK_SIZE * slot_stride
    return starts[:, None]


def table_copies(tiles: Tiles, head_dim: int, *, decodes: bool = False) -> int:
    """How often each of a tile's table entries is read, so that there is one for each thread of a program.

    Triton takes a load of fewer numbers than threads for free, and has each thread read all that it needs by itself: 8
    entries of 64 keys. One for each thread is a single instruction. Prompts over wide heads lack the registers for it.
    """
    return max(1, 32 * tiles.num_warps // tiles.keys) if decodes or head_dim <= 128 else 1
