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
knows (batch, heads, longest context), never from the lengths on the device. Whatever changes from step to step
(lengths, the table's width, where metadata starts in memory) is kept from Triton's specialisation, which would compile
anew.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = math.log2(math.e)
_PROGRAMS_PER_SM = 4
_MAX_SPLITS = 64
_MIN_TILES_PER_SPLIT = 2


@triton.jit
def soft_cap_scores(scores, cap):
    """cap * tanh(scores / cap), by an exponential that cannot overflow. Both are in units of ln 2."""
    decay = tl.exp2(tl.abs(scores) / cap * -2.8853900817779268)  # e^(-2x) = 2^(-2x / ln 2)
    tanh = (1.0 - decay) / (1.0 + decay)
    return tl.where(scores < 0, -tanh, tanh) * cap


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
    NUM_SPLITS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    row_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]

    # The visible context [first, seq_len), in whole tiles from its start; this split takes an equal share of them.
    seq_len = tl.load(seq_lens_ptr + seq)
    first = tl.maximum(seq_len - window, 0)
    split_len = tl.cdiv(tl.cdiv(seq_len - first, BLOCK_N), NUM_SPLITS) * BLOCK_N
    begin = first + split * split_len
    end = tl.minimum(begin + split_len, seq_len)

    q_offsets = seq * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)
    k_head_ptr = k_ptr + kv_head * HEAD_DIM
    v_head_ptr = v_ptr + kv_head * HEAD_DIM
    seq_table_ptr = table_ptr + seq * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    # The mask is applied to every tile: it costs nothing in a loop that waits for memory, where a tail of its own would
    # wait once more.
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < end
        kv_mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        blocks = tl.load(seq_table_ptr + positions // BLOCK_SIZE, mask=inside, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        offsets = slots[:, None] * slot_stride + dims[None, :]
        k = tl.load(k_head_ptr + offsets, mask=kv_mask, other=0.0)
        v = tl.load(v_head_ptr + offsets, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if HAS_SOFT_CAP:
            scores = soft_cap_scores(scores, soft_cap_log2)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max

    # An empty split has row_sum 0: its result is 0 and its log-sum-exp very small, so that it weighs nothing.
    safe_sum = tl.where(row_sum > 0, row_sum, 1.0)
    out_rows = (seq * NUM_HEADS + heads) * NUM_SPLITS + split
    out = (acc / safe_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :], out, mask=row_mask)
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + out_rows, row_max + tl.log2(safe_sum), mask=rows < GROUP)


@triton.jit
def _combine_kernel(
    partial_ptr, lse_ptr, out_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NUM_SPLITS: tl.constexpr
):
    """One head of one sequence: weigh its splits by their share of the softmax's sum."""
    row = tl.program_id(0).to(tl.int64)
    splits = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + splits)
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    offsets = splits[:, None] * HEAD_DIM + dims[None, :]
    partial = tl.load(partial_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    out = tl.sum(partial * weights[:, None], axis=0)
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def choose_num_splits(num_programs: int, num_tiles: int, num_sms: int) -> int:
    """Into how many parts, a power of two, each context is split.

    num_programs: sequences times key heads. num_tiles: of the longest visible context. As many as fill the device
    `_PROGRAMS_PER_SM` times, but none so small that the combining costs more than it saves.
    """
    wanted = num_sms * _PROGRAMS_PER_SM // max(num_programs, 1)
    allowed = min(wanted, num_tiles // _MIN_TILES_PER_SPLIT, _MAX_SPLITS)
    return 1 << (allowed.bit_length() - 1) if allowed > 1 else 1


def decode_attention(
    q_SHD: Tensor,
    k_cache_BPKD: Tensor,
    v_cache_BPKD: Tensor,
    block_table_SM: Tensor,
    seq_lens_S: Tensor,
    out_SHD: Tensor,
    *,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    num_sms: int,
) -> None:
    """Attend one query a sequence to its whole context; written to out, contiguous. A length of 0 gives zeros.

    max_seq_len: an upper bound of seq_lens_S. num_sms: how many processors the device has, for the number of splits.
    """
    num_seqs, num_heads, head_dim = q_SHD.shape
    _, block_size, num_kv_heads, _ = k_cache_BPKD.shape
    assert all(x.is_contiguous() for x in (k_cache_BPKD, v_cache_BPKD, out_SHD))
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_n, num_warps, num_stages = _tile_shape(block_d, q_SHD.element_size())
    window = max_seq_len if sliding_window is None else min(sliding_window, max_seq_len)
    num_splits = choose_num_splits(num_seqs * num_kv_heads, triton.cdiv(window, block_n), num_sms)
    partial, lse = out_SHD, None
    if num_splits > 1:
        shape = (num_seqs, num_heads, num_splits, head_dim)
        partial = torch.empty(shape, dtype=torch.float32, device=q_SHD.device)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=q_SHD.device)
    _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        q_SHD,
        k_cache_BPKD,
        v_cache_BPKD,
        partial,
        lse,
        block_table_SM,
        seq_lens_S,
        *q_SHD.stride()[:2],
        num_kv_heads * head_dim,
        block_table_SM.stride(0),
        window,
        scale * _LOG2_E,
        (soft_cap or 0.0) * _LOG2_E,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        NUM_SPLITS=num_splits,
        HAS_SOFT_CAP=soft_cap is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if num_splits > 1:
        _combine_kernel[(num_seqs * num_heads,)](
            partial, lse, out_SHD, HEAD_DIM=head_dim, BLOCK_D=block_d, NUM_SPLITS=num_splits, num_warps=2
        )


def _tile_shape(block_d: int, element_bytes: int) -> tuple[int, int, int]:
    """(keys a tile, warps, pipeline stages).

    A load through the block table is two loads in a row, and Triton deals its stages out among them: of five, two tiles
    are in flight; of three or four, one, and the loop waits for each. Float32 multiplies without tensor cores, in
    registers, which a larger tile overflows.
    """
    if element_bytes == 4:
        return 16, 8, 2
    return (64 if block_d <= 128 else 32), 4, 5
