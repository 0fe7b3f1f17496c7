"""Inputs for the kernel tests: paged contexts with shuffled blocks, sampling batches and logit controls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from aserve.core.columns import PenaltyColumns, SamplingColumns
from aserve.kernels.native.library import NativeUnavailableError, library
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import AttentionBatch, BadWords, LogitControls, Ops, SamplingBatch
from aserve.kernels.reference_fp8 import as_kept


def native_ops() -> NativeOps:
    """Our own kernels, for this processor. Skips the test where there is no compiler for them, or no variant."""
    try:
        return NativeOps(library())
    except NativeUnavailableError as reason:
        if not str(reason).startswith(("no C++ compiler", "there are none")):
            raise  # a compiler that refuses our sources is a failure
        pytest.skip(str(reason))


TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Fast:
    """A fast implementation under test, and what to run it with. Its twin runs on the same tensors.

    interpreted: by Triton's interpreter, a thousand times slower than compiled; statistics are left to the others.
    """

    ops: Ops
    device: torch.device
    dtype: torch.dtype
    interpreted: bool = False

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape).to(device=self.device, dtype=dtype or self.dtype)

    def assert_close(self, actual: Tensor, expected: Tensor) -> None:
        assert actual.dtype == expected.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@dataclass(frozen=True)
class Paged:
    """One layer's cache, full of noise, and a step over it."""

    q_THD: Tensor
    k_cache_BPKD: Tensor
    v_cache_BPKD: Tensor
    batch: AttentionBatch

    def only(self, sequence: int, token: int, context_len: int) -> "Paged":
        """One of the tokens as if it were the last of its sequence, and alone in its step."""
        batch = AttentionBatch(
            num_decodes=1,
            slots_T=self.batch.slots_T[token : token + 1],
            block_table_SM=self.batch.block_table_SM[sequence : sequence + 1],
            seq_lens_S=self.batch.seq_lens_S.new_tensor([context_len]),
            query_starts_S1=self.batch.query_starts_S1.new_tensor([0, 1]),
            max_query_len=1,
            max_seq_len=context_len,
        )
        return Paged(self.q_THD[token : token + 1], self.k_cache_BPKD, self.v_cache_BPKD, batch)

    def attend(self, ops: Ops, **options: float | int) -> Tensor:
        scale = self.q_THD.shape[-1] ** -0.5
        return ops.attend(self.q_THD, self.k_cache_BPKD, self.v_cache_BPKD, self.batch, scale=scale, **options)


def paged(
    fast: Fast,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 8,
    cache_dtype: torch.dtype | None = None,
) -> Paged:
    """heads: (query heads, key heads). Blocks are shuffled over the cache; the table is padded with block 0.

    cache_dtype: if it is another than that of queries.
    """
    blocks = [-(-n // block_size) for n in seq_lens]
    ids = (torch.randperm(sum(blocks)) + 1).split(blocks)
    table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).int()
    num_heads, num_kv_heads = heads
    cache_shape = (sum(blocks) + 1, block_size, num_kv_heads, head_dim)
    batch = AttentionBatch(
        num_decodes=sum(n == 1 for n in query_lens),
        slots_T=torch.zeros(sum(query_lens), dtype=torch.int64, device=fast.device),  # attend does not read them
        block_table_SM=table.to(fast.device),
        seq_lens_S=torch.tensor(seq_lens, dtype=torch.int32, device=fast.device),
        query_starts_S1=torch.tensor([0, *query_lens]).cumsum(0).int().to(fast.device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    q_THD = fast.randn(sum(query_lens), num_heads, head_dim)
    caches = (as_kept(fast.randn(*cache_shape), cache_dtype or fast.dtype) for _ in range(2))
    return Paged(q_THD, *caches, batch)


def sampling(
    num_rows: int,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    banned: Sequence[Sequence[int]] | None = None,
    device: torch.device | None = None,
) -> SamplingBatch:
    """One value for all rows, or one each."""

    def rows(value: float | Sequence[float], dtype: torch.dtype) -> Tensor:
        values = value if isinstance(value, Sequence) else [value] * num_rows
        return torch.tensor(values, dtype=dtype, device=device)

    columns_S = SamplingColumns(
        temperature=rows(temperature, torch.float32),
        top_k=rows(top_k, torch.int32),
        top_p=rows(top_p, torch.float32),
        min_p=rows(min_p, torch.float32),
        seed=rows(seeds if seeds is not None else list(range(num_rows)), torch.int64),
    )
    return SamplingBatch(
        columns_S=columns_S,
        positions_S=rows(positions if positions is not None else [7] * num_rows, torch.int64),
        banned_SC=None if banned is None else torch.tensor(banned, dtype=torch.int64, device=device),
        all_greedy=not bool(columns_S.temperature.any()),
        any_filter=bool(((columns_S.top_k > 0) | (columns_S.top_p < 1) | (columns_S.min_p > 0)).any()),
    )


def controls(
    rows: Sequence[int],
    *,
    vocab_size: int,
    bias: Mapping[int, Mapping[int, float]] | None = None,
    counts: Mapping[int, Mapping[int, int]] | None = None,
    repetition: Sequence[float] = (),
    presence: Sequence[float] = (),
    frequency: Sequence[float] = (),
    banned: Sequence[Sequence[int]] | None = None,
    words: Sequence[tuple[int, Sequence[int]]] = (),
    recent: Sequence[Sequence[int]] = (),
    device: torch.device | None = None,
) -> LogitControls:
    """Table row q + 1 belongs to rows[q], q counting from 0, which is also what `bias` and `counts` are keyed by.

    words: (q, token ids). recent: for each q, its generated tokens.
    """

    def table(entries: Mapping[int, Mapping[int, float]] | None, dtype: torch.dtype) -> Tensor | None:
        if entries is None:
            return None
        table_RV = torch.zeros(len(rows) + 1, vocab_size, dtype=dtype)
        for q, row_entries in entries.items():
            for token_id, value in row_entries.items():
                table_RV[q + 1, token_id] = value
        return table_RV.to(device)

    def numbers(values: Sequence[float], neutral: float) -> Tensor:
        return torch.tensor(values or [neutral] * len(rows), dtype=torch.float32, device=device)

    def padded(lists: Sequence[Sequence[int]], width: int) -> Tensor:
        return torch.tensor([[-1] * (width - len(ids)) + list(ids) for ids in lists], device=device)

    bad_words = None
    if words:
        longest = max(len(ids) for _, ids in words)
        bad_words = BadWords(
            words_WM=padded([ids for _, ids in words], longest),
            word_rows_W=torch.tensor([q for q, _ in words], device=device),
            recent_RH=padded([[], *recent], max([longest, *map(len, recent)])),
        )
    return LogitControls(
        rows_Q=torch.tensor(rows, device=device),
        table_rows_Q=torch.arange(1, len(rows) + 1, device=device),
        bias_RV=table(bias, torch.float32),
        counts_RV=table(counts, torch.int32),
        penalties_Q=PenaltyColumns(
            presence_penalty=numbers(presence, 0.0),
            frequency_penalty=numbers(frequency, 0.0),
            repetition_penalty=numbers(repetition, 1.0),
        ),
        banned_QC=None if banned is None else torch.tensor(banned, device=device),
        bad_words=bad_words,
    )
