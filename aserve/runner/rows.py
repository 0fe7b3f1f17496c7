"""What the runner remembers of each row between steps, so that a plan need only tell what changed.

On the device: the block table, which grows with the context, and the last token, which the device itself makes. On the
host, as numpy columns: how a row is sampled, 24 bytes that travel with each step that samples it.
Knows nothing of sequences, of the order of a batch, or of models.

Letters beyond those of kernels/ops.py:  R rows   N sampled rows of a step   C banned ids, padded
  I rows set up in a step   U entries that the block table gains in a step
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.columns import SAMPLING, SamplingColumns
from aserve.core.ids import AdapterId, BlockId, Row
from aserve.core.plan import RowInit, StepPlan
from aserve.kernels.ops import PADDING_ID
from aserve.runner.device import Array

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]


class RowChanges(NamedTuple):
    """What a plan does to the block table: rows to clear, then entries (flat index, block) to write."""

    cleared_I: Ints
    entries_U: Ints
    blocks_U: Ints32


class RowSamplings(NamedTuple):
    """The sampling state of N rows. banned_NC is padded with PADDING_ID and has no column when nothing is banned."""

    columns_N: SamplingColumns[Array]
    banned_NC: Ints

    @property
    def all_greedy(self) -> bool:
        """Whether every row takes its likeliest token."""
        return not self.columns_N.temperature.any()

    @property
    def any_filter(self) -> bool:
        """Whether any row leaves out unlikely tokens."""
        pairs = zip(SAMPLING, self.columns_N, strict=True)
        return any(column.is_filter and (values_N != column.neutral).any() for column, values_N in pairs)


class RowTable:
    """The state of all rows. Used by the runner's thread alone, in launch order."""

    def __init__(self, num_rows: int, max_blocks_per_seq: int, device: torch.device) -> None:
        """max_blocks_per_seq: entries of a row's table; spans take as many as there are layer groups, side by side."""
        self.width = max_blocks_per_seq
        self.block_table_RM = torch.zeros((num_rows, max_blocks_per_seq), dtype=torch.int32, device=device)
        self.last_token_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._num_blocks_R = [0] * num_rows
        self._columns_R = SamplingColumns[Array](
            *(np.full(num_rows, column.neutral, column.dtype) for column in SAMPLING)
        )
        self.adapters: dict[Row, AdapterId] = {}
        """Of the rows that have one."""
        self.per_token: set[Row] = set()
        """Of a model that pools: those of whose tokens each has a vector."""
        self._banned: dict[Row, tuple[tuple[int, ...], int]] = {}
        self._scored: dict[Row, tuple[int, tuple[int, ...]]] = {}
        self._num_prompt_logprobs: dict[Row, int] = {}

    def stage(self, plan: StepPlan) -> RowChanges:
        """Take in a plan's inits and new blocks; what the device has to do for it is returned.

        Once staged they stay, even if the step then fails: a plan that is tried again must not bring them again.
        """
        entries: list[int] = []
        blocks: list[int] = []
        for init in plan.inits:
            self._reset(init)
            self._append(init.row, init.block_ids, entries, blocks)
        for piece in plan.slices:
            if piece.new_blocks:
                self._append(piece.row, piece.new_blocks, entries, blocks)
        return RowChanges(
            np.array([init.row for init in plan.inits], np.int64),
            np.array(entries, np.int64),
            np.array(blocks, np.int32),
        )

    def apply(self, cleared_I: Tensor, entries_U: Tensor, blocks_U: Tensor) -> None:
        """RowChanges, uploaded, to the block table."""
        if len(cleared_I):
            self.block_table_RM.index_fill_(0, cleared_I, 0)
        if len(entries_U):
            self.block_table_RM.view(-1).index_copy_(0, entries_U, blocks_U)

    def write(self, changes: RowChanges) -> None:
        """As `apply`, where the block table is the host's."""
        table_RM = self.block_table_RM.numpy()
        table_RM[changes.cleared_I] = 0
        table_RM.reshape(-1)[changes.entries_U] = changes.blocks_U

    def samplings(self, rows_N: Ints, positions_N: Ints) -> RowSamplings:
        """How these rows are sampled, for tokens that will take these positions."""
        return RowSamplings(self.columns(rows_N), self._banned_ids(rows_N, positions_N))

    def columns(self, rows_N: Ints) -> SamplingColumns[Array]:
        """The parameters that are one number a row."""
        return SamplingColumns[Array](*(column_R.take(rows_N) for column_R in self._columns_R))

    def is_plain(self, row: Row, position: int) -> bool:
        """Whether those say all that is needed to choose a row's token for a position."""
        return (
            row not in self.adapters
            and row not in self._scored
            and (row not in self._banned or position >= self._banned[row][1])
        )

    @property
    def scores_any(self) -> bool:
        """Whether sampled tokens of any row are scored."""
        return bool(self._scored)

    def scored(self, row: Row) -> tuple[int, tuple[int, ...]] | None:
        """How many tokens a row wants beside a sampled one, and which, unless the likeliest; None for none at all."""
        return self._scored.get(row)

    def num_prompt_logprobs(self, row: Row) -> int:
        """How many of the likeliest it wants beside those of its prompt."""
        return self._num_prompt_logprobs.get(row, 0)

    def _reset(self, init: RowInit) -> None:
        row, sampling = init.row, init.sampling
        self._num_blocks_R[row] = 0
        self.adapters.pop(row, None)
        if init.adapter is not None:
            self.adapters[row] = init.adapter
        self.per_token.discard(row)
        if init.per_token:
            self.per_token.add(row)
        for column_R, value in zip(self._columns_R, sampling.columns, strict=True):
            column_R[row] = value
        self._banned.pop(row, None)
        if sampling.banned_ids:
            self._banned[row] = (sampling.banned_ids, sampling.banned_before)
        self._scored.pop(row, None)
        if sampling.num_logprobs is not None:
            self._scored[row] = (sampling.num_logprobs, sampling.named_ids)
        self._num_prompt_logprobs.pop(row, None)
        if sampling.num_prompt_logprobs is not None:
            self._num_prompt_logprobs[row] = sampling.num_prompt_logprobs

    def _append(self, row: Row, block_ids: tuple[BlockId, ...], entries: list[int], blocks: list[int]) -> None:
        start = self._num_blocks_R[row]
        end = start + len(block_ids)
        assert end <= self.width, f"row {row} would hold {end} blocks, its table has {self.width}"
        first = row * self.width
        entries.extend(range(first + start, first + end))
        blocks.extend(block_ids)
        self._num_blocks_R[row] = end

    def _banned_ids(self, rows_N: Ints, positions_N: Ints) -> Ints:
        if not self._banned:
            return np.empty((len(rows_N), 0), np.int64)
        nothing: tuple[tuple[int, ...], int] = ((), 0)
        banned = [
            ids if position < before else ()
            for (ids, before), position in zip(
                (self._banned.get(row, nothing) for row in rows_N.tolist()), positions_N.tolist(), strict=True
            )
        ]
        return padded(banned, PADDING_ID)


def padded(rows: Sequence[Sequence[int]], filler: int) -> Ints:
    """Rows of token ids as a matrix, as wide as the longest."""
    matrix = np.full((len(rows), max(map(len, rows), default=0)), filler, np.int64)
    for n, ids in enumerate(rows):
        matrix[n, : len(ids)] = ids
    return matrix
