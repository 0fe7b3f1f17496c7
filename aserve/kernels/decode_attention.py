"""Paged attention of one query token a sequence, in Triton: grouped heads packed, the context split. Twin: `attend`.

It reads each key and value once and is bound by that. One program serves one key head of one sequence, so that the
group of query heads that shares the key fills the rows of a matrix product (16 at least, the smallest there is), and
one of the splits of the context, so that a small batch fills the device (flash decoding: Dao, Haziza, Massa and Sizov,
2023). With several splits each leaves a normalised partial result and its log-sum-exp, float32, which a second kernel
weighs together:

    program (s, k, i)                                       combine (s, h)
      q [group, D] . K[split i]^T -> softmax . V[split i]     out = sum_i 2^(lse_i - lse) partial_i
         -> partial [s, h, i, D], lse [s, h, i]

Exponentials are base 2: the scores are scaled by log2(e) beforehand. The number of splits follows from what the host
knows (batch, heads, longest context), never from the lengths on the device; how long a split is, each program computes
from its sequence's own length, so that a captured launch serves every length. Whatever changes from step to step
(lengths, splits, the table's width, where metadata starts in memory) is kept from Triton's specialisation, which would
compile anew.
"""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.attention_tiles import (
    Capability,
    Tiles,
    as_multiplied,
    crowded_tiles,
    decode_tiles,
    offsets_in_tile,
    soft_cap_scores,
    softmax_step,
    table_copies,
    tile_starts,
)
from aserve.kernels.launch import SHAPES, Launch, let_next_start, wait_for_previous
from aserve.kernels.ops import AttentionBatch

_LOG2_E = math.log2(math.e)
_MAX_SPLITS = 64
_MIN_TILES_PER_SPLIT = tl.constexpr(2)
_START_TILES = 1.0
"""What a program costs beyond its tiles, in the time of a tile: its launch, its queries, and its first keys' way."""
_COMBINE_TILES = 1.0
"""What the second launch costs, in the time of a tile."""
_ALONE = 0.15
"""How long a program takes for a tile when nobody shares the memory bus with it, in the time that it takes on a full
device: about 0.5 us of latency and arithmetic, against 396 tiles of 32 KiB at an H200's 4 TB/s, 3.2 us."""
_ALONE_CROWDED = 0.2
"""Likewise of crowded tiles, which have half the warps for the arithmetic: so their splits come out as measured."""
_FEW_PROGRAMS = 16
"""Unsplit, one for so many processors: a sequence of 8 key heads on an H200."""
_SPLITS_AT_ONCE = 16


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    seq_lens_ptr,
    q_token_stride,
    q_head_stride,
    slot_stride,
    table_stride,
    window,
    scale_log2,
    soft_cap_log2,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TABLE_COPIES: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """lse_ptr: None where there is one split, whose result is final."""
    wait_for_previous(OVERLAPS)
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    heads = kv_head * GROUP + rows
    row_mask = (rows < GROUP)[:, None] & in_head[None, :]

    # The visible context is [first, seq_len). Its tiles begin at multiples of BLOCK_N, the first one before `first`
    # perhaps; this split takes an equal share of them.
    seq_len = tl.load(seq_lens_ptr + seq)
    first = tl.maximum(seq_len - window, 0)
    first_tile = first // BLOCK_N
    num_tiles = tl.cdiv(seq_len, BLOCK_N) - first_tile
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), _MIN_TILES_PER_SPLIT)
    begin = (first_tile + split * tiles_per_split) * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, seq_len)

    q_offsets = seq * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    q = as_multiplied(tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0), k_ptr)
    # Where a key lies in its block never changes: what the loop adds is where its block begins.
    in_tile = kv_head * HEAD_DIM + offsets_in_tile(slot_stride, BLOCK_SIZE, BLOCK_N, BLOCK_D)
    seq_table_ptr = table_ptr + seq * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    # The mask is applied to every tile: it costs nothing in a loop that waits for memory, where a tail of its own would
    # wait once more. It covers the loads, since a weight of 0 does not remove the NaN that a freed block may hold.
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        visible = (positions >= first) & (positions < end)
        kv_mask = visible[:, None] & in_head[None, :]
        starts = tile_starts(
            seq_table_ptr, start, first, end, slot_stride, BLOCK_SIZE, BLOCK_N, TABLE_COPIES, MASKED=True
        )
        offsets = starts + in_tile
        k = tl.load(k_ptr + offsets, mask=kv_mask, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + offsets, mask=kv_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SOFT_CAP:
            scores = soft_cap_scores(scores * scale_log2, soft_cap_log2)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        factor = 1.0 if HAS_SOFT_CAP else scale_log2
        weights, rescale, row_sum, row_max = softmax_step(scores, row_max, row_sum, factor)
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")

    let_next_start(OVERLAPS)
    # An empty split has row_sum 0: its result is 0 and its log-sum-exp very small, so that it weighs nothing.
    safe_sum = tl.where(row_sum > 0, row_sum, 1.0)
    out_rows = (seq * NUM_HEADS + heads) * num_splits + split
    out = (acc / safe_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :], out, mask=row_mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + out_rows, row_max + tl.log2(safe_sum), mask=rows < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One head of one sequence: weigh its splits by their share of the softmax's sum, some at once."""
    wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    largest = -1e30
    total = 0.0
    for start in range(0, num_splits, BLOCK_SPLITS):
        splits = start + tl.arange(0, BLOCK_SPLITS)
        inside = splits < num_splits
        split_rows = row * num_splits + splits
        lse = tl.load(lse_ptr + split_rows, mask=inside, other=float("-inf"))
        offsets = split_rows[:, None] * HEAD_DIM + dims[None, :]
        partial = tl.load(partial_ptr + offsets, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(lse, axis=0))
        weights = tl.exp2(lse - new_largest)
        rescale = tl.exp2(largest - new_largest)
        total = total * rescale + tl.sum(weights, axis=0)
        acc = acc * rescale + tl.sum(partial * weights[:, None], axis=0)
        largest = new_largest
    tl.store(out_ptr + row * HEAD_DIM + dims, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def launch_cost(num_programs: int, num_tiles: int, num_splits: int, num_places: int, alone: float = _ALONE) -> float:
    """Predicted time of a launch, in that of one tile on a full device.

    num_programs: sequences times key heads. num_tiles: of the longest visible context. num_places: programs that the
    device runs side by side. Programs run in waves; one that leaves places free is faster, for what its tiles wait for
    is their own latency and then the others' tiles.
    """
    waves, rest = divmod(num_programs * num_splits, num_places)
    last_wave = alone + (1.0 - alone) * rest / num_places if rest else 0.0
    tiles = max(-(-num_tiles // num_splits), _MIN_TILES_PER_SPLIT.value) if num_splits > 1 else num_tiles
    combine = _COMBINE_TILES if num_splits > 1 else 0.0
    return (waves + last_wave) * (tiles + _START_TILES) + combine


@lru_cache(maxsize=4096)
def choose_num_splits(num_programs: int, num_tiles: int, num_places: int, alone: float = _ALONE) -> int:
    """Into how many parts each context is split: the least `launch_cost`, and the fewest of equals."""
    most = max(1, min(num_tiles // _MIN_TILES_PER_SPLIT.value, _MAX_SPLITS))
    return min(range(1, most + 1), key=lambda splits: launch_cost(num_programs, num_tiles, splits, num_places, alone))


def fit_to_device(tiles: Tiles, num_programs: int, num_keys: int, num_sms: int) -> tuple[Tiles, int]:
    """The tiles for so many programs, and into how many parts each context of `num_keys` is split.

    Crowded ones where they save a second wave, and where contexts of several sequences are split by either: there they
    take 0.93 to 0.98 of the time (an H200: 2 to 16 sequences of 8 key heads, contexts of 4,096). A single sequence is
    no faster by them, and a whole step of one slower. A batch that fits unsplit stays so: 32 sequences of 1,024 take
    35.5 us, and 40.2 in crowded tiles by two splits.
    """
    crowded = crowded_tiles(tiles)
    places, crowded_places = num_sms * tiles.programs_per_sm, num_sms * crowded.programs_per_sm
    if places < num_programs <= crowded_places:
        return crowded, 1
    num_tiles = triton.cdiv(num_keys, tiles.keys)  # of as many keys in either
    num_splits = choose_num_splits(num_programs, num_tiles, places)
    if num_splits > 1 and crowded != tiles and num_programs > num_sms // _FEW_PROGRAMS:
        crowded_splits = choose_num_splits(num_programs, num_tiles, crowded_places, _ALONE_CROWDED)
        if crowded_splits > 1:
            return crowded, crowded_splits
    return tiles, num_splits


def decode_attention(
    q_THD: Tensor,
    k_cache_BPKD: Tensor,
    v_cache_BPKD: Tensor,
    batch: AttentionBatch,
    out_THD: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    num_sms: int,
    capability: Capability,
) -> None:
    """Attend the sequences that decode, the first of q, each to its whole context; written to out, contiguous.

    A length of 0 gives zeros. num_sms: how many processors the device has, for the number of splits. The block size is
    a power of two.
    """
    assert k_cache_BPKD.is_contiguous()
    assert v_cache_BPKD.is_contiguous()
    table_SM, num_seqs = batch.block_table_SM, batch.num_decodes
    num_splits, attend, combine = _shaped(
        q_THD.shape[1:],
        q_THD.stride(),
        k_cache_BPKD.shape[1:],
        q_THD.element_size(),
        num_seqs,
        table_SM.stride(0),
        batch.max_seq_len,
        (scale, sliding_window, soft_cap),
        (num_sms, capability),
    )
    if num_splits == 1:
        attend(q_THD, k_cache_BPKD, v_cache_BPKD, out_THD, None, table_SM, batch.seq_lens_S)
        return
    _, num_heads, head_dim = q_THD.shape
    partial = q_THD.new_empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32)
    lse = q_THD.new_empty((num_seqs, num_heads, num_splits), dtype=torch.float32)
    attend(q_THD, k_cache_BPKD, v_cache_BPKD, partial, lse, table_SM, batch.seq_lens_S)
    combine(partial, lse, out_THD)


@lru_cache(maxsize=SHAPES)
def _shaped(
    shape_HD: torch.Size,
    q_strides: tuple[int, ...],
    shape_PKD: torch.Size,
    element_bytes: int,
    num_seqs: int,
    table_stride: int,
    max_seq_len: int,
    limits: tuple[float, int | None, float | None],
    device: tuple[int, Capability],
) -> tuple[int, Launch, Launch]:
    """The number of splits, the attention, and what combines its splits. limits: scale, sliding window and soft cap."""
    num_heads, head_dim = shape_HD
    block_size, num_kv_heads, _ = shape_PKD
    scale, sliding_window, soft_cap = limits
    num_sms, capability = device
    group = num_heads // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    window = max_seq_len if sliding_window is None else min(sliding_window, max_seq_len)
    tiles = decode_tiles(head_dim, group, element_bytes, capability)
    tiles, num_splits = fit_to_device(tiles, num_seqs * num_kv_heads, window, num_sms)
    attend = Launch(
        _decode_kernel,
        (num_kv_heads, num_seqs, num_splits),
        (
            *q_strides[:2],
            num_kv_heads * head_dim,
            table_stride,
            window,
            scale * _LOG2_E,
            (soft_cap or 0.0) * _LOG2_E,
        ),
        overlaps=True,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BLOCK_D=block_d,
        TABLE_COPIES=table_copies(tiles, head_dim, decodes=True),
        HAS_SOFT_CAP=soft_cap is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_SPLITS": _SPLITS_AT_ONCE}
    combine = Launch(_combine_kernel, (num_seqs * num_heads,), (num_splits,), overlaps=True, **sizes, num_warps=4)
    return num_splits, attend, combine
