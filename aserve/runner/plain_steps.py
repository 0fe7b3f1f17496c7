"""PlainSteps: on a CPU, whole steps by one call, of rows of which parameters alone say what comes next.

    a plan           load     of each row its tokens, or its last one; positions, slots --.
    the same rows    go on    last tokens, positions + 1, slots + 1 ----------------------'--> one call: layers, head,
                                                                                           sampling of every row

The counterpart of graphs.py: of a small model with one stream, to build a batch, to deal out attention and to sample
take as long as a third of the kernels, and next to nothing of it changes from step to step. Rows that are controlled,
masked, scored or have adapters go by a batch (batch.py); so do models with several groups of layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from aserve.core.plan import StepPlan, num_agreeing
from aserve.kernels.native.attention import TILE
from aserve.kernels.native.captured_calls import Sizes
from aserve.kernels.ops import AttentionBatch, TokenMasks
from aserve.runner.batch import BatchBuilder
from aserve.runner.device import Array
from aserve.runner.steady import goes_on
from aserve.runner.step import EagerStep, StepOutput
from aserve.runner.step_calls import StepCalls

MAX_LOGITS: Final = 2**20
"""Of a step, that are kept. With more, head and sampling take so long that the Python around them does not count."""


@dataclass(slots=True)
class _Run:
    """Rows that decode a token each.

    next: row and position of each in the plan that goes on. attention: of the last step. num_left: steps for which
    that holds.
    """

    sizes: Sizes
    rows_S: Array
    seq_lens_S: Array
    next: Sequence[tuple[int, int]]
    attention: AttentionBatch
    num_left: int = 0


class PlainSteps:
    """Used by the runner's thread alone, in launch order.

    step: of whose model and rows. calls: its calls. builder: of the rows that steps are of.
    """

    def __init__(self, step: EagerStep, calls: StepCalls, builder: BatchBuilder) -> None:
        spec = step.model.spec
        self._calls, self._inputs, self._builder, self._rows = calls, calls.inputs, builder, step.rows
        self._block_table_RM, self._last_token_R = step.rows.block_table_RM.numpy(), step.rows.last_token_R.numpy()
        self._max_samples = MAX_LOGITS // spec.vocab_size
        self._ends = {0, *(window - 1 for window in spec.windows if window is not None)}
        """How far behind a token the contexts of layers end: at itself, and where a window begins."""
        self._run: _Run | None = None

    def execute(self, plan: StepPlan, masked: Callable[[], TokenMasks] | None = None) -> StepOutput | None:
        """The step of a plan, when it has been computed; None for one that goes by a batch, of which nothing is done.

        masked: makes the masks of rows that have some.
        """
        run, self._run = self._run, None  # while it runs there is none: from a step that fails nothing goes on
        if masked is not None:
            return None
        if run is not None and goes_on(plan, run.next):
            self._move_on(run, plan)
            return self._decoded(run, self._calls.repeat(run.sizes, run.attention))
        num_samples = sum(piece.num_samples for piece in plan.slices)
        sizes = Sizes(plan.num_tokens, num_samples, num_samples)
        if not self._takes(plan, num_samples) or not self._calls.take(sizes):
            return None
        self._builder.take_in(plan)
        attention = self._load(plan)
        ids_N = self._calls.repeat(sizes, attention)
        if not num_samples:
            return StepOutput(torch.empty(0, dtype=torch.int64), (), None)
        if num_samples > sum(piece.num_samples > 0 for piece in plan.slices):
            return self._verified(plan, ids_N)
        rows_N = np.array([piece.row for piece in plan.slices if piece.num_samples])
        if num_samples < plan.num_tokens:
            self._last_token_R[rows_N] = np.maximum(ids_N.numpy(), 0)
            return StepOutput(ids_N, (), None)
        at = [(piece.row, piece.start) for piece in plan.slices]
        return self._decoded(_Run(sizes, rows_N, attention.seq_lens_S.numpy(), at, attention), ids_N)

    def _takes(self, plan: StepPlan, num_samples: int) -> bool:
        """Whether nothing but parameters says which tokens come next, and nothing else is asked for."""
        return (
            bool(plan.slices)
            and num_samples <= self._max_samples
            and not plan.drafting
            and not any(piece.target_ids for piece in plan.slices)
            and self._builder.is_plain(plan)
        )

    def _load(self, plan: StepPlan) -> AttentionBatch:
        """Write what the calls read, and say where the tokens sit: in the order of the plan, which our kernel takes."""
        inputs, num_tokens = self._inputs, plan.num_tokens
        shapes = [(piece.row, piece.start, piece.num_tokens, piece.num_samples) for piece in plan.slices]
        rows_S, starts_S, lens_S, samples_S = np.array(shapes, np.int64).T
        ends_S, ends_of_samples_S = lens_S.cumsum(), samples_S.cumsum()
        token_ids: list[int] = []
        for piece in plan.slices:
            token_ids += piece.token_ids or (self._last_token_R[piece.row],)
        inputs.token_ids_T[:num_tokens] = token_ids
        rows_T, positions_T = rows_S.repeat(lens_S), inputs.positions_T[:num_tokens]
        np.add(np.arange(num_tokens), (starts_S + lens_S - ends_S).repeat(lens_S), out=positions_T)
        self._find_slots(rows_T)
        num_samples = int(ends_of_samples_S[-1])
        wanted_N = inputs.wanted_N[:num_samples]
        np.add(np.arange(num_samples), (ends_S - ends_of_samples_S).repeat(samples_S), out=wanted_N)
        np.add(positions_T.take(wanted_N), 1, out=inputs.drawn_N[:num_samples])
        for own_N, column_N in zip(inputs.columns_N, self._rows.columns(rows_T.take(wanted_N)), strict=True):
            own_N[:num_samples] = column_N
        return self._attention(rows_S, lens_S, (starts_S + lens_S).astype(np.int32))

    def _attention(self, rows_S: Array, lens_S: Array, seq_lens_S: Array) -> AttentionBatch:
        starts_S1 = np.zeros(len(rows_S) + 1, np.int32)
        lens_S.cumsum(out=starts_S1[1:])
        max_len = int(seq_lens_S.max())
        return AttentionBatch(
            num_decodes=0,
            slots_T=torch.from_numpy(self._inputs.slots[0]),
            block_table_SM=torch.from_numpy(self._table(rows_S, max_len)),
            seq_lens_S=torch.from_numpy(seq_lens_S),
            query_starts_S1=torch.from_numpy(starts_S1),
            max_query_len=int(lens_S.max()),
            max_seq_len=max_len,
        )

    def _verified(self, plan: StepPlan, ids_N: Tensor) -> StepOutput:
        """What is sampled behind accepted drafts comes next: see verification.py, which does this on a device."""
        ids, first, accepted = ids_N.tolist(), 0, []
        for piece in plan.slices:
            if piece.num_samples:
                accepted.append(num_agreeing(piece.draft_ids, ids[first : first + piece.num_samples]))
                self._last_token_R[piece.row] = max(ids[first + accepted[-1]], 0)
                first += piece.num_samples
        return StepOutput(ids_N, (), None, torch.tensor(accepted))

    def _decoded(self, run: _Run, ids_N: Tensor) -> StepOutput:
        """Its tokens are those that the next step reads: see `sample_next`."""
        token_ids_N = self._inputs.token_ids_T[: len(run.rows_S)]
        self._last_token_R[run.rows_S] = np.maximum(ids_N.numpy(), 0, out=token_ids_N)
        run.next = [(row, position + 1) for row, position in run.next]
        run.num_left -= 1
        self._run = run
        return StepOutput(ids_N, (), None)

    def _move_on(self, run: _Run, plan: StepPlan) -> None:
        """To the next positions, and to blocks that a plan brings for them. The tokens are there already."""
        moving = self._inputs.moving_3T[:, : len(run.rows_S)]
        np.add(moving, 1, out=moving)
        np.add(run.seq_lens_S, 1, out=run.seq_lens_S)
        has_new_blocks = any(piece.new_blocks for piece in plan.slices)
        if has_new_blocks:
            self._builder.apply_changes(plan)
        if run.num_left <= 0:
            self._deal(run)
        elif has_new_blocks:
            table_SM = run.attention.block_table_SM.numpy()
            self._block_table_RM[:, : table_SM.shape[1]].take(run.rows_S, 0, out=table_SM)
        if any(position % self._builder.block_size == 0 for _, position in run.next):
            self._find_slots(run.rows_S)

    def _deal(self, run: _Run) -> None:
        """Have attention dealt out for this step, and for those behind it that see the same tiles of their contexts."""
        positions = [position for _, position in run.next]
        run.num_left = min(TILE - (position - end) % TILE for position in positions for end in self._ends)
        table_SM = self._table(run.rows_S, max(positions) + run.num_left)
        run.attention = replace(run.attention, block_table_SM=torch.from_numpy(table_SM))

    def _table(self, rows_S: Array, max_len: int) -> Array:
        """The blocks of contexts of so many positions at most."""
        return self._block_table_RM[:, : -(-max_len // self._builder.block_size)].take(rows_S, 0)

    def _find_slots(self, rows_T: Array) -> None:
        """By the blocks that these rows have."""
        spans_T, offsets_T = np.divmod(self._inputs.positions_T[: len(rows_T)], self._builder.block_size)
        slots_T = self._block_table_RM[rows_T, spans_T] * self._builder.block_size + offsets_T
        self._inputs.slots[0][: len(rows_T)] = slots_T


def plain_steps(step: EagerStep, builder: BatchBuilder) -> PlainSteps | None:
    """Those of a model whose steps are made by calls, with one group of layers; None for others."""
    calls = step.calls
    return None if calls is None or calls.num_groups > 1 else PlainSteps(step, calls, builder)
