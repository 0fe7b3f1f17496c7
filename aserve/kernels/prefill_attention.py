"""Paged attention of many query tokens a sequence, in Triton: ragged, causal, over a cached prefix. Twin: `attend`.

The queries of a sequence are the last positions of its context; whatever lies before them was cached. One program
serves one key head and a tile of BLOCK_M rows; a row is a (token, head of the group) pair, so that short prompts of
grouped heads fill a tile too:

    row r of tile i   ->   query token i * (BLOCK_M // GROUP) + r // GROUP,   head r % GROUP of the group

The keys that a tile can see are visited in up to three runs, of which the middle one needs no mask. Tiles of keys begin
at multiples of BLOCK_N. What no row sees is not even read: a freed block may hold NaN. Online softmax as in
FlashAttention-2 (Dao, 2023), float32, base 2; the scale is a factor of the exponent's one multiply-add.

    |<- window start: masked ->|<------ every row sees every key ------>|<- diagonal: masked ->|
"""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.attention_tiles import (
    Capability,
    as_multiplied,
    offsets_in_tile,
    prefill_tiles,
    soft_cap_scores,
    softmax_step,
    table_copies,
    tile_starts,
)
from aserve.kernels.launch import SHAPES, Launch
from aserve.kernels.ops import AttentionBatch


@triton.jit
def _visit_tiles(
    begin,
    first,
    end,
    q,
    query_positions,
    acc,
    row_max,
    row_sum,
    k_ptr,
    v_ptr,
    table_ptr,
    slot_stride,
    window,
    scale_log2,
    soft_cap_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TABLE_COPIES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys at positions [first, end), in tiles from begin on. Unless MASKED, whole tiles that every row sees."""
    in_head = tl.arange(0, BLOCK_D) < HEAD_DIM
    in_tile = offsets_in_tile(slot_stride, BLOCK_SIZE, BLOCK_N, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        offsets = in_tile + tile_starts(
            table_ptr, start, first, end, slot_stride, BLOCK_SIZE, BLOCK_N, TABLE_COPIES, MASKED
        )
        if MASKED:
            inside = (positions >= first) & (positions < end)
            k = tl.load(k_ptr + offsets, mask=inside[:, None] & in_head[None, :], other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside[:, None] & in_head[None, :], other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        else:
            k = tl.load(k_ptr + offsets, mask=in_head[None, :], other=0.0)
            v = tl.load(v_ptr + offsets, mask=in_head[None, :], other=0.0)

        k, v = k.to(q.dtype), v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SOFT_CAP:
            scores = soft_cap_scores(scores * scale_log2, soft_cap_log2)
        if MASKED:
            distance = query_positions[:, None] - positions[None, :]
            visible = (distance >= 0) & inside[None, :]
            if HAS_WINDOW:
                visible = visible & (distance < window)
            scores = tl.where(visible, scores, float("-inf"))
        factor = 1.0 if HAS_SOFT_CAP else scale_log2
        weights, rescale, row_sum, row_max = softmax_step(scores, row_max, row_sum, factor)
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=["first_seq", "table_stride", "window"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "query_starts_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    seq_lens_ptr,
    query_starts_ptr,
    first_seq,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    seq = (first_seq + tl.program_id(2)).to(tl.int64)
    query_start = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - query_start
    # The last tiles see the most keys: those of all heads go first, so that the device does not end on them.
    tile = tl.cdiv(num_queries, TOKENS) - 1 - tl.program_id(1)
    if tile < 0:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = tile * TOKENS + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = ((rows < TOKENS * GROUP) & (queries < num_queries))[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (query_start + queries).to(tl.int64)
    q_offsets = tokens[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    q = as_multiplied(tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0), k_ptr)

    query_positions = seq_len - num_queries + queries
    first_query = seq_len - num_queries + tile * TOKENS
    last_query = tl.minimum(first_query + TOKENS, seq_len) - 1
    first = 0
    begin = 0
    full_begin = 0
    if HAS_WINDOW:
        first = tl.maximum(first_query - window + 1, 0)
        begin = first // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(last_query - window + 1, 0), BLOCK_N) * BLOCK_N
    full_end = full_begin + tl.maximum(first_query + 1 - full_begin, 0) // BLOCK_N * BLOCK_N

    k_head_ptr = k_ptr + kv_head * HEAD_DIM
    v_head_ptr = v_ptr + kv_head * HEAD_DIM
    seq_table_ptr = table_ptr + seq * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_WINDOW:
        acc, row_max, row_sum = _visit_tiles(
            begin, first, tl.minimum(full_begin, last_query + 1), q, query_positions, acc, row_max, row_sum,
            k_head_ptr, v_head_ptr, seq_table_ptr, slot_stride, window, scale_log2, soft_cap_log2,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, TABLE_COPIES, HAS_WINDOW, HAS_SOFT_CAP, MASKED=True,
        )  # fmt: skip
    acc, row_max, row_sum = _visit_tiles(
        full_begin, first, full_end, q, query_positions, acc, row_max, row_sum, k_head_ptr, v_head_ptr, seq_table_ptr,
        slot_stride, window, scale_log2, soft_cap_log2, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, TABLE_COPIES,
        HAS_WINDOW, HAS_SOFT_CAP, MASKED=False,
    )  # fmt: skip
    acc, row_max, row_sum = _visit_tiles(
        full_end, first, last_query + 1, q, query_positions, acc, row_max, row_sum, k_head_ptr, v_head_ptr,
        seq_table_ptr, slot_stride, window, scale_log2, soft_cap_log2, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        TABLE_COPIES, HAS_WINDOW, HAS_SOFT_CAP, MASKED=True,
    )  # fmt: skip

    # Every query sees itself; only padding rows, which are not stored, may have summed to nothing.
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    out_offsets = (tokens[:, None] * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=row_mask)


def prefill_attention(
    q_THD: Tensor,
    k_cache_BPKD: Tensor,
    v_cache_BPKD: Tensor,
    batch: AttentionBatch,
    out_THD: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    capability: Capability,
) -> None:
    """Attend the queries of the sequences that do not decode to their contexts; written to out, contiguous."""
    assert k_cache_BPKD.is_contiguous()
    assert v_cache_BPKD.is_contiguous()
    table_SM = batch.block_table_SM
    launch = _shaped(
        q_THD.shape[1:],
        q_THD.stride(),
        k_cache_BPKD.shape[1:],
        q_THD.element_size(),
        (batch.num_decodes, table_SM.shape[0]),
        table_SM.stride(0),
        batch.max_query_len,
        (scale, sliding_window, soft_cap),
        capability,
    )
    launch(q_THD, k_cache_BPKD, v_cache_BPKD, out_THD, table_SM, batch.seq_lens_S, batch.query_starts_S1)


@lru_cache(maxsize=SHAPES)
def _shaped(
    shape_HD: torch.Size,
    q_strides: tuple[int, ...],
    shape_PKD: torch.Size,
    element_bytes: int,
    sequences: tuple[int, int],
    table_stride: int,
    max_query_len: int,
    limits: tuple[float, int | None, float | None],
    capability: Capability,
) -> Launch:
    """sequences: the first and the end of those to attend. limits: scale, sliding window and soft cap."""
    num_heads, head_dim = shape_HD
    block_size, num_kv_heads, _ = shape_PKD
    group = num_heads // num_kv_heads
    first_seq, end_seq = sequences
    scale, sliding_window, soft_cap = limits
    assert scale > 0, "the kernel takes the largest score before it scales"
    max_rows = max_query_len * group
    tiles = prefill_tiles(max_rows, head_dim, group, element_bytes, capability, soft_cap=soft_cap is not None)
    log2_e = math.log2(math.e)
    return Launch(
        _prefill_kernel,
        (num_kv_heads, triton.cdiv(max_query_len, tiles.rows // group), end_seq - first_seq),
        (
            first_seq,
            *q_strides[:2],
            num_kv_heads * head_dim,
            table_stride,
            sliding_window or 0,
            scale * log2_e,
            (soft_cap or 0.0) * log2_e,
        ),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        TABLE_COPIES=table_copies(tiles, head_dim),
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )
