"""Paged attention on a CPU: gather the context, then torch's fused attention over it.

    decode   sequences of like length together; each key head sees its group of query heads as so many queries,
             so that grouped-query attention copies no key:   q [N, K, G, D]   k, v [N, K, C, D]
    prefill  one sequence at a time, queries in chunks that read only the keys they can see

Soft-capped scores take plain matrix products: torch's fused attention has no place for them.
Shape letters: ops.py, and  N sequences in a group   G query heads a key head   C context positions   Q queries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_QUERY_CHUNK = 256
"""Queries of a prefill that are attended together: the longer, the more keys are computed only to be masked."""
_MIN_BUCKET = 128
"""Sequences shorter than this share a decode group: a call costs more than the padding."""


@dataclass(frozen=True, slots=True)
class PagedContext:
    """One layer's cache and the step's block table, with the buffers that gathered blocks go to."""

    k_cache_BPKD: Tensor
    v_cache_BPKD: Tensor
    block_table_SM: Tensor
    gather: "ContextGather"

    def read(self, blocks_NM: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks of N sequences, [N, K, C, D] each, valid until the next read."""
        k_NKCD = self.gather.read(0, self.k_cache_BPKD, blocks_NM)
        return k_NKCD, self.gather.read(1, self.v_cache_BPKD, blocks_NM)

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self.k_cache_BPKD.shape[1]


class ContextGather:
    """Two buffers, for keys and values, that grow to the largest context gathered so far."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0), torch.empty(0)]

    def over(self, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor, block_table_SM: Tensor) -> PagedContext:
        """The context of one layer and step."""
        return PagedContext(k_cache_BPKD, v_cache_BPKD, block_table_SM, self)

    def read(self, which: int, cache_BPKD: Tensor, blocks_NM: Tensor) -> Tensor:
        """Copy blocks to buffer `which` and view them as [N, K, M * P, D]; float16 returns as float32.

        torch's float16 products on a CPU are 3 to 15 times slower than to convert first.
        """
        _, block_size, num_kv_heads, head_dim = cache_BPKD.shape
        num_seqs, num_blocks = blocks_NM.shape
        rows_BX = cache_BPKD.flatten(1)
        num_rows = num_seqs * num_blocks
        buffer = self._buffers[which]
        if buffer.dtype != cache_BPKD.dtype or buffer.numel() < num_rows * rows_BX.shape[1]:
            buffer = self._buffers[which] = cache_BPKD.new_empty(num_rows * rows_BX.shape[1])
        gathered = buffer[: num_rows * rows_BX.shape[1]].view(num_rows, -1)
        torch.index_select(rows_BX, 0, blocks_NM.reshape(-1), out=gathered)
        if gathered.dtype == torch.float16:
            gathered = gathered.float()
        return gathered.view(num_seqs, num_blocks * block_size, num_kv_heads, head_dim).transpose(1, 2)


def attend_decodes(
    q_NHD: Tensor,
    context: PagedContext,
    seq_lens: Sequence[int],
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """One query a sequence, for the first N sequences of the table: [N, H, D]."""
    limits = (scale, sliding_window, soft_cap)
    groups = _length_groups(seq_lens)
    if len(groups) == 1:
        return _attend_group(q_NHD, context, context.block_table_SM[: len(seq_lens)], seq_lens, *limits)
    out_NHD = torch.empty_like(q_NHD)
    for members in groups:
        rows = torch.tensor(members)
        lens = [seq_lens[s] for s in members]
        table_NM = context.block_table_SM.index_select(0, rows)
        out_NHD.index_copy_(0, rows, _attend_group(q_NHD.index_select(0, rows), context, table_NM, lens, *limits))
    return out_NHD


def _length_groups(seq_lens: Sequence[int]) -> list[list[int]]:
    """Sequences whose lengths round up to the same power of two, so that padding costs less than reading twice."""
    groups: dict[int, list[int]] = {}
    for s, length in enumerate(seq_lens):
        groups.setdefault(max(length - 1, _MIN_BUCKET - 1).bit_length(), []).append(s)
    return list(groups.values())


def _attend_group(
    q_NHD: Tensor,
    context: PagedContext,
    table_NM: Tensor,
    seq_lens: Sequence[int],
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """One query a sequence, padded to the longest of the group."""
    num_seqs, num_heads, head_dim = q_NHD.shape
    block_size = context.block_size
    longest = max(seq_lens)
    first_block = 0
    if sliding_window is not None:
        first_block = max(0, min(seq_lens) - sliding_window) // block_size
    begin = first_block * block_size
    k_NKCD, v_NKCD = context.read(table_NM[:, first_block : -(-longest // block_size)])
    k_NKCD, v_NKCD = k_NKCD[:, :, : longest - begin], v_NKCD[:, :, : longest - begin]
    mask_N11C = None
    if sliding_window is not None or min(seq_lens) != longest:
        lens_N1 = torch.tensor(seq_lens).unsqueeze(1)
        mask_N11C = _visible(torch.arange(begin, longest), lens_N1 - 1, sliding_window)[:, None, None]
    q_NKGD = q_NHD.view(num_seqs, k_NKCD.shape[1], -1, head_dim)
    out_NKGD = _attention(q_NKGD, k_NKCD, v_NKCD, mask_N11C, scale, soft_cap)
    return out_NKGD.reshape(num_seqs, num_heads, head_dim).to(q_NHD.dtype)


def attend_prefill(
    q_QHD: Tensor,
    out_QHD: Tensor,
    context: PagedContext,
    s: int,
    context_len: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    """Attend the last Q positions of sequence s's context; written to out."""
    num_queries, _, head_dim = q_QHD.shape
    num_blocks = -(-context_len // context.block_size)
    k_1KCD, v_1KCD = context.read(context.block_table_SM[s : s + 1, :num_blocks])
    num_kv_heads = k_1KCD.shape[1]
    for begin in range(0, num_queries, _QUERY_CHUNK):
        end = min(begin + _QUERY_CHUNK, num_queries)
        last_key = context_len - num_queries + end
        queries = torch.arange(last_key - (end - begin), last_key)
        first_key = 0 if sliding_window is None else max(0, int(queries[0]) - sliding_window + 1)
        keys = torch.arange(first_key, last_key)
        visible_QC = _visible(keys, queries[:, None], sliding_window)
        # [Q, H, D] -> [K, G, Q, D]; each key head is broadcast over its group without a copy.
        q_KGQD = q_QHD[begin:end].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        k_KGCD, v_KGCD = (
            x[0, :, None, first_key:last_key].expand(-1, q_KGQD.shape[1], -1, -1) for x in (k_1KCD, v_1KCD)
        )
        out_KGQD = _attention(q_KGQD, k_KGCD, v_KGCD, visible_QC, scale, soft_cap)
        out_QHD[begin:end].view(end - begin, num_kv_heads, -1, head_dim).copy_(out_KGQD.permute(2, 0, 1, 3))


def _visible(keys_C: Tensor, queries_Q1: Tensor, sliding_window: int | None) -> Tensor:
    """Whether a query sees a key, by position."""
    visible_QC = keys_C <= queries_Q1
    return visible_QC if sliding_window is None else visible_QC & (keys_C > queries_Q1 - sliding_window)


def _attention(
    q_XQD: Tensor, k_XCD: Tensor, v_XCD: Tensor, visible: Tensor | None, scale: float, soft_cap: float | None
) -> Tensor:
    """softmax(cap(q k^T * scale)) v over any two leading dimensions X, in the type of the keys."""
    q_XQD = q_XQD.to(k_XCD.dtype)
    if soft_cap is None:
        return F.scaled_dot_product_attention(q_XQD, k_XCD, v_XCD, attn_mask=visible, scale=scale)
    scores_XQC = (q_XQD @ k_XCD.transpose(-1, -2)).float().mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if visible is not None:
        scores_XQC.masked_fill_(~visible, -math.inf)
    return scores_XQC.softmax(-1).to(v_XCD.dtype) @ v_XCD
