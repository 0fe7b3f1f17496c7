"""The batch of sequences that only go on decoding: the last one, moved on by a position.

Most steps are of this kind, and to lay them out from nothing takes a small model a tenth of its step. Knows what of a
batch changes when every row gains a token; `BatchBuilder` is the slow twin, and makes every other batch.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from aserve.core.plan import StepPlan
from aserve.kernels.ops import AttentionBatch
from aserve.runner.batch import BatchBuilder, Places, StepBatch
from aserve.runner.rows import RowTable
from aserve.runner.verification import MadeDrafts


class SteadyBuilder:
    """Builds StepBatches as `builder` does, which it asks where more has changed. rows: those of the builder."""

    def __init__(self, builder: BatchBuilder, rows: RowTable) -> None:
        self._builder = builder
        self._rows = rows
        self._last: StepBatch | None = None
        """The last batch, if every row of it decoded one token, in the plan's order, and how rows are sampled depends
        on their parameters alone: not on penalties, bans or scores, which change with each token."""
        self._next: list[tuple[int, int]] = []
        """Row and position of each slice of the plan to which that batch can be moved on: its rows, each one position
        further."""

    def build(self, plan: StepPlan, made: MadeDrafts | None = None) -> StepBatch | None:
        """As `BatchBuilder.build`."""
        batch = self._moved_on(plan)
        if batch is None:
            batch = self._builder.build(plan, made)
        if batch is not None and _is_steady(plan, batch):
            self._last, self._next = batch, [(piece.row, piece.start + 1) for piece in plan.slices]
        else:
            self._last = None
        return batch

    def forget(self) -> None:
        """A step was run that this has not built: the last batch is not to be moved on."""
        self._last = None

    def _moved_on(self, plan: StepPlan) -> StepBatch | None:
        last = self._last
        if last is None or not goes_on(plan, self._next):
            return None
        rows_S, positions_T = last.sampled_rows_N, last.positions_T + 1
        return replace(
            last,
            token_ids_T=self._rows.last_token_R.index_select(0, rows_S),
            positions_T=positions_T,
            attention=self._attention(plan, last.attention, rows_S, positions_T),
            sampling=replace(last.sampling, positions_S=last.sampling.positions_S + 1),
        )

    def _attention(self, plan: StepPlan, last: AttentionBatch, rows_S: Tensor, positions_T: Tensor) -> AttentionBatch:
        """Where the tokens of a plan sit, which come behind those of the last batch."""
        block_size, max_spans = self._builder.block_size, self._builder.max_spans
        has_new_blocks = any(piece.new_blocks for piece in plan.slices)
        if not has_new_blocks and all(piece.start % block_size for piece in plan.slices):
            return _in_same_blocks(last)
        if has_new_blocks:
            self._builder.apply_changes(plan)
        spans_S = positions_T.div(block_size, rounding_mode="floor")
        places = Places(
            rows_S=rows_S,
            seq_lens_S=last.seq_lens_S + 1,
            query_starts_S1=last.query_starts_S1,
            spans_T=spans_S.add(rows_S, alpha=max_spans),
            block_offsets_T=positions_T.sub(spans_S, alpha=block_size),
        )
        shape = {"num_decodes": len(plan.slices), "max_query_len": 1, "max_seq_len": last.max_seq_len + 1}
        return self._builder.attention(places, **shape)


def _in_same_blocks(last: AttentionBatch) -> AttentionBatch:
    """A slot further: none of its tokens was the last of a block."""
    return replace(
        last,
        slots_T=last.slots_T + 1,
        seq_lens_S=last.seq_lens_S + 1,
        max_seq_len=last.max_seq_len + 1,
        groups=tuple(map(_in_same_blocks, last.groups)),
    )


def goes_on(plan: StepPlan, expected: Sequence[tuple[int, int]]) -> bool:
    """Whether these rows decode one token each, at these positions, and nothing else is to be done."""
    return (
        not plan.inits
        and [(piece.row, piece.start) for piece in plan.slices] == expected
        and not any(piece.token_ids or piece.target_ids or not piece.num_samples for piece in plan.slices)
    )


def _is_steady(plan: StepPlan, batch: StepBatch) -> bool:
    """Whether each slice is one token that samples, in the batch's order, and no state but parameters governs it."""
    fed = [not piece.token_ids for piece in plan.slices]
    return (
        batch.attention.num_decodes == len(plan.slices) == len(batch.sampled_rows_N)
        and fed == sorted(fed, reverse=True)
        and batch.controls is None
        and not batch.sampled_targets
        and batch.prompt_targets is None
        and batch.sampling.banned_SC is None
    )
