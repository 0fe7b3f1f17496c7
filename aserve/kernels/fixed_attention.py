"""Paged attention whose sums do not depend on the batch, in Triton. Twin: `attend`.

A query is added up in the same order whether it decodes or is one of a chunk, beside whom, and on which device of a
kind: always in a tile of as many rows, over tiles of keys and splits of tiles that begin at multiples of their sizes.
A split leaves a normalised result and its log-sum-exp, and splits are weighed together one after the other:

    prompts   program (tile of queries, key head, sequence): its splits in turn
    decoding  program (split, key head, sequence) -> partial [S, H, splits, D], lse [S, H, splits];  then merge (s, h)

What a split, or a tile, holds of keys that a query does not see adds an exact 0. Rows as in prefill_attention.py.
"""

import math
from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.attention_tiles import Capability, Tiles, as_multiplied, prefill_tiles, table_copies
from aserve.kernels.launch import SHAPES, Launch
from aserve.kernels.ops import AttentionBatch
from aserve.kernels.prefill_attention import _visit_tiles

_LOG2_E: Final = math.log2(math.e)
_ROWS: Final = 64
_LARGE_HEAD: Final = 64
"""Dimensions of which the sums of a tile fill the registers of four warps."""
_SPLIT: Final = 1024
"""Keys of a split: a multiple of every tile."""


@triton.jit
def _add_split(acc, total, largest, partial, lse):
    """The splits before, weighed together with one more: their sum, the sum of weights, and the largest lse."""
    new_largest = tl.maximum(largest, lse)
    rescale = tl.exp2(largest - new_largest)
    weight = tl.exp2(lse - new_largest)
    acc = tl.fma(acc, rescale[:, None] + tl.zeros_like(acc), partial * weight[:, None])
    return acc, tl.fma(total, rescale, weight), new_largest


@triton.jit(
    do_not_specialize=["first_seq", "table_stride", "window"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "query_starts_ptr"],
)
def _fixed_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, seq_lens_ptr, query_starts_ptr,
    first_seq, q_token_stride, q_head_stride, slot_stride, table_stride, window, scale_log2, soft_cap_log2,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TABLE_COPIES: tl.constexpr, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """lse_ptr: None for prompts. Else each sequence has one query, and the program one split of its context."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0) if lse_ptr is None else 0
    kv_head = tl.program_id(1)
    seq = (first_seq + tl.program_id(2)).to(tl.int64)
    query_start = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - query_start
    if tile * TOKENS >= num_queries:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = tile * TOKENS + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = (rows < TOKENS * GROUP) & (queries < num_queries)
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (query_start + queries).to(tl.int64)
    q_offsets = tokens[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    q = as_multiplied(tl.load(q_ptr + q_offsets, mask=mask, other=0.0), k_ptr)

    query_positions = seq_len - num_queries + queries
    first_query = seq_len - num_queries + tile * TOKENS
    end = tl.minimum(first_query + TOKENS, seq_len)
    first = tl.maximum(first_query - window + 1, 0) if HAS_WINDOW else 0
    first_split = first // SPLIT if lse_ptr is None else tl.program_id(0)
    end_split = tl.cdiv(end, SPLIT) if lse_ptr is None else first_split + 1
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
    for split in range(first_split, end_split):
        begin = tl.maximum(split * SPLIT, first // BLOCK_N * BLOCK_N)
        sums, row_max, row_sum = _visit_tiles(
            begin, first, tl.minimum(split * SPLIT + SPLIT, end), q, query_positions,
            tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32), tl.full([BLOCK_M], -1e30, dtype=tl.float32),
            tl.zeros([BLOCK_M], dtype=tl.float32), k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM,
            table_ptr + seq * table_stride, slot_stride, window, scale_log2, soft_cap_log2,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, TABLE_COPIES, HAS_WINDOW, HAS_SOFT_CAP, MASKED=True,
        )  # fmt: skip
        # A split of which a row sees nothing has the sum 0, and weighs nothing.
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)
        partial, lse = sums / row_sum[:, None], row_max + tl.log2(row_sum)
        if lse_ptr is None:
            acc, total, largest = _add_split(acc, total, largest, partial, lse)
        else:
            out_rows = (seq * NUM_HEADS + heads) * tl.num_programs(0) + split
            tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :], partial, mask=mask)
            tl.store(lse_ptr + out_rows, lse, mask=row_mask)
    if lse_ptr is None:
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_offsets = (tokens[:, None] * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(partial_ptr, lse_ptr, out_ptr, num_splits, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """One head of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    acc = tl.zeros([1, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    largest = tl.full([1], -1e30, dtype=tl.float32)
    in_head = (dims < HEAD_DIM)[None, :]
    for split in range(num_splits):
        split_rows = row * num_splits + split + one
        lse = tl.load(lse_ptr + split_rows)
        partial = tl.load(partial_ptr + split_rows[:, None] * HEAD_DIM + dims[None, :], mask=in_head, other=0.0)
        acc, total, largest = _add_split(acc, total, largest, partial, lse)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_offsets = (row + one)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=in_head)


def fixed_attention(
    q_THD: Tensor,
    k_cache_BPKD: Tensor,
    v_cache_BPKD: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    capability: Capability,
) -> Tensor:
    """`Ops.attend`. A sequence of length 0 gives zeros."""
    assert k_cache_BPKD.is_contiguous()
    assert v_cache_BPKD.is_contiguous()
    num_decodes, num_seqs, num_heads = batch.num_decodes, batch.seq_lens_S.shape[0], q_THD.shape[1]
    inputs = (batch.block_table_SM, batch.seq_lens_S, batch.query_starts_S1)
    shape = (
        (*q_THD.shape[1:], *k_cache_BPKD.shape[1:3]),
        (*q_THD.stride()[:2], batch.block_table_SM.stride(0)),
        (scale, sliding_window, soft_cap),
        prefill_tiles(_ROWS, q_THD.shape[2], num_heads // k_cache_BPKD.shape[2], q_THD.element_size(), capability),
    )
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    if num_decodes:
        num_splits = max(1, triton.cdiv(batch.max_seq_len, _SPLIT))
        lse = q_THD.new_empty((num_decodes, num_heads, num_splits), dtype=torch.float32)
        partial = q_THD.new_empty((*lse.shape, q_THD.shape[2]), dtype=torch.float32)
        _shaped(num_splits, (0, num_decodes), *shape)(q_THD, k_cache_BPKD, v_cache_BPKD, partial, lse, *inputs)
        _shaped_merge(partial.shape)(partial, lse, out_THD)
    if num_decodes < num_seqs:
        num_tiles = triton.cdiv(batch.max_query_len, shape[-1].rows * k_cache_BPKD.shape[2] // num_heads)
        launch = _shaped(num_tiles, (num_decodes, num_seqs), *shape)
        launch(q_THD, k_cache_BPKD, v_cache_BPKD, out_THD, None, *inputs)
    return out_THD


@lru_cache(maxsize=SHAPES)
def _shaped(
    num_programs: int,
    sequences: tuple[int, int],
    sizes: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    limits: tuple[float, int | None, float | None],
    tiles: Tiles,
) -> Launch:
    """sequences: the first and the end of those to attend. sizes: H, D, P, K. limits: scale, window and soft cap.

    strides: of a token and of a head of q, and of the table.
    """
    num_heads, head_dim, block_size, num_kv_heads = sizes
    scale, sliding_window, soft_cap = limits
    first_seq, end_seq = sequences
    return Launch(
        _fixed_attention_kernel,
        (num_programs, num_kv_heads, end_seq - first_seq),
        (
            first_seq,
            *strides[:2],
            num_kv_heads * head_dim,
            strides[2],
            sliding_window or 0,
            scale * _LOG2_E,
            (soft_cap or 0.0) * _LOG2_E,
        ),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BLOCK_D=_padded(head_dim),
        TABLE_COPIES=table_copies(tiles, head_dim),
        SPLIT=_SPLIT,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        num_warps=8 if head_dim > _LARGE_HEAD else tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@lru_cache(maxsize=SHAPES)
def _shaped_merge(partial_shape: torch.Size) -> Launch:
    num_seqs, num_heads, num_splits, head_dim = partial_shape
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": _padded(head_dim), "num_warps": 4}
    return Launch(_merge_splits_kernel, (num_seqs * num_heads,), (num_splits,), **sizes)


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))
