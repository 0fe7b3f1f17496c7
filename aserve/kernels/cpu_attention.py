"""Paged attention on a CPU: gather the context, then torch's fused attention over it.

    decode   sequences of like length together; each key head sees its group of query heads as so many queries,
             so that grouped-query attention copies no key:   q [N, K, G, D]   k, v [N, K, C, D]
    prefill  one sequence at a time, queries in chunks that read only the keys they can see:   q [K, 1, G * Q, D]

A query's result has the same bits in any step. torch adds keys up by tiles of 512; within one, the order depends on
whether it has 16 n keys, on whether it has more than 384 (192 where MKL goes without AVX-512, as it does on every
processor that is not Intel's), and on whether there are but a few queries. So keys are read from the beginning of a
tile up to where `padded_keys` says, and `_rows_to_add` says how many queries to add. What is added is hidden, and an
exact 0 in every sum.

Which blocks are read, and which query sees what of them, is the same in every layer: it is worked out once a step, as
`Read`s. What a sliding window has left behind is not read, for it may be somebody else's by now: the null block is.
Soft-capped scores take plain matrix products: torch's fused attention has no place for them.
Shape letters: ops.py, and  N sequences in a group   G query heads a key head   C context positions   Q queries.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.kernels.ops import AttentionBatch
from aserve.kernels.packed_linear import has_amx

_QUERY_CHUNK = 128
"""Queries of a prefill that are attended together: the longer, the more keys are computed only to be masked."""
_MAX_STACKED_MASK = 1 << 22
"""Elements of a chunk's mask, repeated for each query head of a key head."""
_MIN_BUCKET = 128
"""Sequences shorter than this share a decode group: a call costs more than the padding."""
_KEY_TILE, _HALF_TILE, _KEY_STEP = 512, 256, 16
_MAX_RUN, _MAX_PART_TILE = 192, 384
"""Of a tile's keys MKL adds up at most so many in one run: the second with AVX-512, the first without, where up to the
second it takes two halves. Both hold on every processor, for what MKL will use cannot be asked."""
_QUERY_TILE = 32
"""torch attends to 32, 64 or 256 queries at once; what is left over of them is left over of 32 too."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's cache, the buffers that gathered blocks go to, and the type that these are computed with."""

    k_cache_BPKD: Tensor
    v_cache_BPKD: Tensor
    gather: "ContextGather"
    dtype: torch.dtype

    def read(self, num_seqs: int, blocks_X: Tensor) -> list[Tensor]:
        """Keys and values of the blocks of N sequences, [N, C, K, D] each, valid until the next read."""
        caches = (self.k_cache_BPKD, self.v_cache_BPKD)
        return [self.gather.read(which, cache, num_seqs, blocks_X).to(self.dtype) for which, cache in enumerate(caches)]


class ContextGather:
    """Two buffers, for keys and values, that grow to the largest context gathered so far."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0), torch.empty(0)]

    def read(self, which: int, cache_BPKD: Tensor, num_seqs: int, blocks_X: Tensor) -> Tensor:
        """Copy blocks to buffer `which` and view them as [N, C, K, D]."""
        num_numbers = len(blocks_X) * cache_BPKD[0].numel()
        buffer = self._buffers[which]
        if buffer.dtype != cache_BPKD.dtype or buffer.numel() < num_numbers:
            buffer = self._buffers[which] = cache_BPKD.new_empty(num_numbers)
        gathered = buffer[:num_numbers].view(len(blocks_X), -1)
        torch.index_select(cache_BPKD.flatten(1), 0, blocks_X, out=gathered)
        return gathered.view(num_seqs, -1, *cache_BPKD.shape[2:])


class Read(Protocol):
    """Some of a step's tokens, and how they attend in any of the layers that read the same blocks.

    tokens: which of the T.
    """

    tokens: slice | Tensor

    def attend(self, q_QHD: Tensor, layer: Layer, scale: float, soft_cap: float | None) -> Tensor:
        """The outputs of these tokens, [Q, H, D], from their queries."""
        ...


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The type that queries of this type attend in: torch's float16 products on a CPU are 3 to 15 times slower than to
    convert first.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def plan_reads(batch: AttentionBatch, block_size: int, sliding_window: int | None, dtype: torch.dtype) -> list[Read]:
    """What a step's layers with this window read, decoding sequences first. dtype: `computed_in`."""
    seq_lens, starts = batch.seq_lens_S.tolist(), batch.query_starts_S1.tolist()
    table_SM, num_decodes = batch.block_table_SM, batch.num_decodes
    reads: list[Read] = list(_decodes(table_SM, seq_lens[:num_decodes], block_size, sliding_window, dtype))
    for s in range(num_decodes, len(seq_lens)):
        tokens = slice(starts[s], starts[s + 1])
        reads.append(PrefillRead(tokens, table_SM[s], seq_lens[s], block_size, sliding_window, dtype))
    return reads


def attend_all(reads: Sequence[Read], q_THD: Tensor, layer: Layer, scale: float, soft_cap: float | None) -> Tensor:
    """[T, H, D]. The reads cover every token."""
    if len(reads) == 1:
        return reads[0].attend(q_THD, layer, scale, soft_cap)
    out_THD = torch.empty_like(q_THD)
    for read in reads:
        out_THD[read.tokens] = read.attend(q_THD[read.tokens], layer, scale, soft_cap)
    return out_THD


# ---- decode


@dataclass(frozen=True, slots=True)
class DecodeRead:
    """One query each of N sequences, padded to the longest context. mask_N11C: None where nothing is hidden.

    tails: positions, of N * C, that blocks hold behind the sequences' ends, where there are any. They are cleared:
    what is there is the last owners', and a weight of 0 times NaN is NaN.
    """

    tokens: slice | Tensor
    num_seqs: int
    blocks_X: Tensor
    num_keys: int
    mask_N11C: Tensor | None
    tails: slice | Tensor | None = None

    def attend(self, q_NHD: Tensor, layer: Layer, scale: float, soft_cap: float | None) -> Tensor:
        """[N, H, D]."""
        context = layer.read(self.num_seqs, self.blocks_X)
        if self.tails is not None:
            for x_NCKD in context:
                _clear(x_NCKD.flatten(0, 1), self.tails)
        k_NKCD, v_NKCD = (x_NCKD[:, : self.num_keys].transpose(1, 2) for x_NCKD in context)
        q_NKGD = q_NHD.unflatten(1, (k_NKCD.shape[1], -1))
        out_NKGD = _attention(q_NKGD, k_NKCD, v_NKCD, self.mask_N11C, scale, soft_cap)
        return out_NKGD.flatten(1, 2).to(q_NHD.dtype)


def _decodes(
    table_SM: Tensor, seq_lens: Sequence[int], block_size: int, sliding_window: int | None, dtype: torch.dtype
) -> Iterator[DecodeRead]:
    """The first sequences of the table, in groups of like lengths."""
    starts = [_first_key(length - 1, sliding_window) for length in seq_lens]
    groups = _length_groups([length - start for length, start in zip(seq_lens, starts, strict=True)])
    for members in groups:
        is_all = len(groups) == 1
        tokens = slice(0, len(members)) if is_all else torch.tensor(members)
        lens = [seq_lens[s] for s in members]
        lens_N1 = torch.tensor(lens).unsqueeze(1)
        num_keys = padded_keys(max(seq_lens[s] - starts[s] for s in members))
        num_blocks = -(-num_keys // block_size)
        slides = sliding_window is not None and max(lens) > sliding_window
        mask_N11C = tails = None
        if slides:
            assert sliding_window is not None
            starts_N1 = torch.tensor([starts[s] for s in members]).unsqueeze(1)
            blocks_NM = _visible_blocks(table_SM[tokens], lens_N1, starts_N1, num_blocks, sliding_window, block_size)
            keys_NC = starts_N1 + torch.arange(num_keys)
        else:
            blocks_NM, keys_NC = _first_blocks(table_SM[tokens], num_blocks), torch.arange(num_keys).unsqueeze(0)
            if min(lens) != num_keys:
                blocks_NM = blocks_NM.masked_fill(torch.arange(num_blocks) > (lens_N1 - 1) // block_size, 0)
        if slides or min(lens) != num_keys:
            mask_N11C = _mask(keys_NC, lens_N1 - 1, sliding_window, dtype)[:, None, None]
            tails = _tails(lens_N1 - keys_NC[:, :1], num_blocks, block_size)
        yield DecodeRead(tokens, len(members), blocks_NM.flatten(), num_keys, mask_N11C, tails)


def _length_groups(nums_keys: Sequence[int]) -> list[list[int]]:
    """Sequences whose keys round up to the same power of two, so that padding costs less than reading twice.

    Those whose last tile must not be a whole one are with their like, or in a whole one it would be added up in halves.
    """
    groups: dict[int, list[int]] = {}
    for s, num_keys in enumerate(nums_keys):
        tile, rest = divmod(num_keys, _KEY_TILE)
        has_part_tile = _HALF_TILE < rest <= _MAX_PART_TILE
        bucket = max(num_keys - 1, _MIN_BUCKET - 1).bit_length()
        groups.setdefault(-1 - tile if has_part_tile else bucket, []).append(s)
    return list(groups.values())


def _first_blocks(table_NM: Tensor, num_blocks: int) -> Tensor:
    """So many columns of the table; behind its last, the null block."""
    missing = num_blocks - table_NM.shape[1]
    return F.pad(table_NM, (0, missing)) if missing > 0 else table_NM[:, :num_blocks]


def _visible_blocks(
    table_NM: Tensor, lens_N1: Tensor, starts_N1: Tensor, num_blocks: int, window: int, block_size: int
) -> Tensor:
    """The blocks from each sequence's first key on; the null block stands for those that its last position hides."""
    columns_NM = starts_N1 // block_size + torch.arange(num_blocks)
    blocks_NM = table_NM.gather(1, columns_NM.clamp(max=table_NM.shape[1] - 1))
    first_N1, last_N1 = (lens_N1 - window).clamp_(min=0) // block_size, (lens_N1 - 1) // block_size
    return blocks_NM.masked_fill_((columns_NM < first_N1) | (columns_NM > last_N1), 0)


def _tails(nums_keys_N1: Tensor, num_blocks: int, block_size: int) -> slice | Tensor:
    """Where, in N * C, the last block of each sequence lies behind its end."""
    context_len = num_blocks * block_size
    if len(nums_keys_N1) == 1:
        return slice(int(nums_keys_N1), context_len)
    tails_NP = nums_keys_N1 + torch.arange(block_size)
    return (tails_NP + torch.arange(len(nums_keys_N1)).unsqueeze(1) * context_len)[tails_NP < context_len]


def _clear(x_XKD: Tensor, positions: slice | Tensor) -> None:
    if isinstance(positions, slice):
        x_XKD[positions].zero_()
    else:
        x_XKD.index_fill_(0, positions, 0.0)


# ---- prefill


class _Chunk:
    """Some of a prefill's queries, the keys that they read of those gathered, and what is hidden of these."""

    def __init__(self, queries: slice, keys: slice, mask_QC: Tensor) -> None:
        self.queries = queries
        self.keys = keys
        self._mask_QC = mask_QC
        self._stacked: Tensor | None = None

    def mask(self, group: int) -> Tensor:
        """[group * Q, C], where that is not too large, so that a key head's query heads are so many more queries.

        Else [Q, C]. Every layer has the same.
        """
        if group * self._mask_QC.numel() > _MAX_STACKED_MASK:
            return self._mask_QC
        if self._stacked is None:
            self._stacked = self._mask_QC.repeat(group, 1)
        return self._stacked


class PrefillRead:
    """The last Q positions of one sequence's context, in chunks of queries, each with keys of its own."""

    def __init__(
        self,
        tokens: slice,
        table_M: Tensor,
        context_len: int,
        block_size: int,
        sliding_window: int | None,
        dtype: torch.dtype,
    ) -> None:
        self.tokens: slice | Tensor = tokens
        first_query = context_len - (tokens.stop - tokens.start)
        first_read = _first_key(first_query, sliding_window)
        self._num_keys = context_len - first_read
        num_hidden = 0 if sliding_window is None else max(0, first_query - sliding_window + 1 - first_read)
        blocks_1X = table_M[None, first_read // block_size : -(-context_len // block_size)]
        self._blocks_X = _first_blocks(blocks_1X, -(-padded_keys(self._num_keys) // block_size))[0].clone()
        self._blocks_X[: num_hidden // block_size] = 0
        self._chunks: list[_Chunk] = []
        for begin in _chunk_starts(first_query, context_len):
            end = min(begin - begin % _QUERY_CHUNK + _QUERY_CHUNK, context_len)
            first_key = _first_key(begin, sliding_window)
            keys = torch.arange(first_key, first_key + padded_keys(end - first_key))
            mask_QC = _mask(keys, torch.arange(begin, end)[:, None], sliding_window, dtype)
            read_keys = slice(first_key - first_read, first_key - first_read + len(keys))
            self._chunks.append(_Chunk(slice(begin - first_query, end - first_query), read_keys, mask_QC))

    def attend(self, q_QHD: Tensor, layer: Layer, scale: float, soft_cap: float | None) -> Tensor:
        """[Q, H, D]. Of a key head, X queries together Y times: all of its group at once, or a query head at a time."""
        k_KCD, v_KCD = (self._context(x_1CKD[0]).transpose(0, 1) for x_1CKD in layer.read(1, self._blocks_X))
        q_KGQD = q_QHD.unflatten(1, (len(k_KCD), -1)).permute(1, 2, 0, 3)
        out_QHD = torch.empty_like(q_QHD)
        out_KGQD = out_QHD.view(len(q_QHD), *q_KGQD.shape[:2], -1).permute(1, 2, 0, 3)
        for chunk in self._chunks:
            q_KgQD = q_KGQD[:, :, chunk.queries]
            mask_XC = chunk.mask(q_KgQD.shape[1])
            q_KYXD = q_KgQD.reshape(len(q_KgQD), -1, len(mask_XC), q_KgQD.shape[3])
            k_KYCD, v_KYCD = (
                x_KCD[:, None, chunk.keys].expand(-1, q_KYXD.shape[1], -1, -1) for x_KCD in (k_KCD, v_KCD)
            )
            out_KYXD = _attention(q_KYXD, k_KYCD, v_KYCD, mask_XC, scale, soft_cap)
            out_KGQD[:, :, chunk.queries] = out_KYXD.reshape(q_KgQD.shape)
        return out_QHD

    def _context(self, x_CKD: Tensor) -> Tensor:
        """What was read, cleared behind the sequence's end: there it is others', who may have left NaN."""
        x_CKD[self._num_keys :].zero_()
        return x_CKD


def _chunk_starts(first_query: int, end: int) -> list[int]:
    """Chunks end at multiples of their size, so that their queries' last tiles are all of one kind (`padded_keys`)."""
    return [first_query, *range(first_query - first_query % _QUERY_CHUNK + _QUERY_CHUNK, end, _QUERY_CHUNK)]


# ---- both


def padded_keys(num_keys: int) -> int:
    """How many keys to read, the first of them at the beginning of a tile, so that sums do not depend on who reads on.

    A tile that would be halved is filled up: where, depends on how many keys it has.
    """
    tile, rest = divmod(num_keys, _KEY_TILE)
    if rest <= _MAX_RUN:
        return tile * _KEY_TILE + -(-rest // _KEY_STEP) * _KEY_STEP
    return tile * _KEY_TILE + (_MAX_PART_TILE if rest <= _MAX_PART_TILE else _KEY_TILE)


def _first_key(query: int, sliding_window: int | None) -> int:
    """The beginning of the tile of the first key that a query sees, by position."""
    return 0 if sliding_window is None else max(0, query - sliding_window + 1) // _KEY_TILE * _KEY_TILE


def _mask(keys_C: Tensor, queries_Q1: Tensor, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
    """To be added to scores: 0 where a query sees a key, by position, else -inf."""
    visible_QC = keys_C <= queries_Q1
    if sliding_window is not None:
        visible_QC &= keys_C > queries_Q1 - sliding_window
    return torch.zeros(visible_QC.shape, dtype=dtype).masked_fill_(~visible_QC, -math.inf)


def _attention(
    q_XQD: Tensor, k_XCD: Tensor, v_XCD: Tensor, mask: Tensor | None, scale: float, soft_cap: float | None
) -> Tensor:
    """softmax(cap(q k^T * scale) + mask) v over any two leading dimensions X, in the type of the keys.

    In float32 where bfloat16 would be multiplied by matrix units (AMX): of more queries torch adds up otherwise there.
    """
    if k_XCD.dtype == torch.bfloat16 and has_amx():
        mask = None if mask is None else mask.float()
        return _attention(q_XQD.float(), k_XCD.float(), v_XCD.float(), mask, scale, soft_cap).to(k_XCD.dtype)
    q_XQD = q_XQD.to(k_XCD.dtype)
    if soft_cap is None:
        return _fused_attention(q_XQD, k_XCD, v_XCD, mask, scale)
    scores_XQC = (q_XQD @ k_XCD.transpose(-1, -2)).float().mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores_XQC += mask
    return scores_XQC.softmax(-1).to(v_XCD.dtype) @ v_XCD


def _fused_attention(q_XQD: Tensor, k_XCD: Tensor, v_XCD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """torch's, with enough rows in its last tile of queries, and never for one head's tile alone.

    What is alone has all of torch's threads for its products, which take another order for them.
    """
    num_seqs, num_heads, num_queries, head_dim = q_XQD.shape
    num_added = _rows_to_add(num_queries, head_dim, q_XQD.dtype)
    is_alone = num_seqs * num_heads == 1 and num_queries <= _QUERY_TILE
    if not num_added and not is_alone:
        return F.scaled_dot_product_attention(q_XQD, k_XCD, v_XCD, attn_mask=mask, scale=scale)
    q_XQD = F.pad(q_XQD, (0, 0, 0, num_added))
    if mask is not None and mask.shape[-2] > 1:
        mask = F.pad(mask, (0, 0, 0, num_added))
    if is_alone:
        q_XQD, k_XCD, v_XCD = (x.expand(2, -1, -1, -1) for x in (q_XQD, k_XCD, v_XCD))
    out_XQD = F.scaled_dot_product_attention(q_XQD, k_XCD, v_XCD, attn_mask=mask, scale=scale)
    return out_XQD[:num_seqs, :, :num_queries]


def _rows_to_add(num_rows: int, head_dim: int, dtype: torch.dtype) -> int:
    """So many that torch's last tile of queries has enough rows for MKL to multiply each in the same way: measured.

    Its products for AVX2 take four rows at a time, and what is left over in another way.
    """
    num_last = num_rows % _QUERY_TILE
    least = head_dim // 16 if dtype == torch.float32 else 1
    return -(-max(num_last, least) // 4) * 4 - num_last if num_last else 0
