"""DecodeCalls: on a CPU, whole steps of rows that decode by captured calls: from their last tokens to the next ones.

    a plan             begin    tokens, positions, slots: of each row its last token, and its drafts --.
    the same rows      go on    last tokens, positions + 1, slots + 1 ---------------------------------'--> one call:
                                                                                  layers, head, sampling of every token

The counterpart of graphs.py: of a small model with one stream, to build a batch, to deal out attention and to sample
take as long as a third of the kernels, and next to nothing of it changes from step to step. Calls are those of as many
tokens, whosever they are: nine rows that decode, or one with eight drafts. Rows that are controlled, masked, scored or
have adapters go the eager way, whose forward pass is repeated (repeats.py); so do models with several groups of layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from aserve.core.columns import SAMPLING, SamplingColumns
from aserve.core.plan import StepPlan, num_agreeing
from aserve.kernels.native.attention import TILE
from aserve.kernels.native.captured_calls import CapturedCalls
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import AttentionBatch, SamplingBatch, TokenMasks
from aserve.models.interface import ForwardBatch
from aserve.runner.batch import BatchBuilder
from aserve.runner.device import Array
from aserve.runner.repeats import CapturedBySize
from aserve.runner.steady import goes_on
from aserve.runner.step import EagerStep, StepOutput

MAX_LOGITS: Final = 2**20
"""Of a step, that are kept. With more, head and sampling take so long that the Python around them does not count."""

_POSITIONS, _SLOTS, _DRAWN = range(3)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the calls of T tokens read that is a step's own.

    counters_3T: positions of tokens, their slots, and positions that are drawn for.
    All of numpy: its operations on a few numbers keep Python's lock, which torch's give to the event loop each time.
    """

    token_ids_T: Array
    counters_3T: Array
    columns_T: SamplingColumns[Array]

    @classmethod
    def of(cls, num_tokens: int) -> "_Inputs":
        """Room for so many tokens."""
        columns = SamplingColumns[Array](*(np.empty(num_tokens, column.dtype) for column in SAMPLING))
        return cls(np.empty(num_tokens, np.int64), np.empty((3, num_tokens), np.int64), columns)


@dataclass(frozen=True, slots=True)
class _Captured:
    """Calls, what they read, and the ids that they write."""

    calls: CapturedCalls
    inputs: _Inputs
    ids_T: Array


@dataclass(slots=True)
class _Run:
    """Rows that decode, and how they are computed.

    next: row and position of each in the plan that goes on. attention: of the last step. num_left: steps for which
    that holds.
    """

    captured: _Captured
    rows_S: Array
    seq_lens_S: Array
    next: Sequence[tuple[int, int]]
    attention: AttentionBatch
    num_left: int = 0


class DecodeCalls:
    """Used by the runner's thread alone, in launch order.

    step: the eager way, of a model of which steps can be repeated. ops: its operations. builder: of the rows that steps
    are of. beginning: as of `Repeats`.
    """

    def __init__(
        self, step: EagerStep, ops: NativeOps, builder: BatchBuilder, beginning: Callable[[], object] = lambda: None
    ) -> None:
        model = step.model
        self._model, self._ops, self._kv, self._builder, self._rows = model, ops, step.kv, builder, step.rows
        self._block_table_RM, self._last_token_R = step.rows.block_table_RM.numpy(), step.rows.last_token_R.numpy()
        self._beginning = beginning
        self._max_tokens = MAX_LOGITS // model.spec.vocab_size
        self._ends = {0, *(window - 1 for window in model.spec.windows if window is not None)}
        """How far behind a token the contexts of layers end: at itself, and where a window begins."""
        self._captured = CapturedBySize[_Captured]()
        self._run: _Run | None = None

    def execute(self, plan: StepPlan, masked: Callable[[], TokenMasks] | None = None) -> StepOutput | None:
        """The step of a plan that goes on where the last one was, or as calls that were captured; None for any other,
        of which nothing is done.
        """
        run, self._run = self._run, None  # while it runs there is none: from a step that fails nothing goes on
        if masked is not None:
            return None
        if run is not None and goes_on(plan, run.next):
            self._move_on(run, plan)
            run.captured.calls.repeat(run.attention, self._beginning)
            return self._decoded(run)
        if plan.inits or not self._takes(plan) or (captured := self._captured.get(plan.num_tokens)) is None:
            return None
        if any(piece.new_blocks for piece in plan.slices):
            self._builder.apply_changes(plan)
        return self._repeat(plan, captured)

    def begin(self, plan: StepPlan) -> StepOutput | None:
        """The step of a plan whose rows are set up, and have their blocks; None for one that goes the eager way."""
        if not self._takes(plan):
            return None
        if (captured := self._captured.get(plan.num_tokens)) is not None:
            return self._repeat(plan, captured)
        captured = self._captured.capture(plan.num_tokens, lambda: self._capture(plan))
        return None if captured is None else self._output(plan, captured, self._load(plan, captured.inputs))

    def _takes(self, plan: StepPlan) -> bool:
        """Whether each token of it samples, and nothing but its row's parameters says which comes next."""
        return (
            plan.num_tokens <= self._max_tokens
            and not plan.drafting
            and all(piece.num_samples == piece.num_tokens and not piece.target_ids for piece in plan.slices)
            and self._builder.is_plain(plan.slices)
        )

    def _repeat(self, plan: StepPlan, captured: _Captured) -> StepOutput:
        attention = self._load(plan, captured.inputs)
        captured.calls.repeat(attention, self._beginning)
        return self._output(plan, captured, attention)

    def _capture(self, plan: StepPlan) -> _Captured:
        """Compute the step, and keep how."""
        inputs = _Inputs.of(plan.num_tokens)
        attention = self._load(plan, inputs)
        token_ids_T, counters_3T = torch.from_numpy(inputs.token_ids_T), torch.from_numpy(inputs.counters_3T)
        columns_T = SamplingColumns[Tensor](*map(torch.from_numpy, inputs.columns_T))
        seen = ForwardBatch(counters_3T[_POSITIONS], attention)
        sampling = SamplingBatch(columns_T, counters_3T[_DRAWN], None, all_greedy=False, any_filter=True)

        def work() -> Tensor:
            return self._ops.sample(self._model.logits(self._model.forward(token_ids_T, self._kv, seen)), sampling)

        self._beginning()
        calls = CapturedCalls(self._ops, attention, work)
        return _Captured(calls, inputs, calls.result.numpy())

    def _load(self, plan: StepPlan, inputs: _Inputs) -> AttentionBatch:
        """Write what the calls read, and say where the tokens sit: in the order of the plan, which our kernel takes."""
        rows_S, lens_S = np.array([(piece.row, piece.num_tokens) for piece in plan.slices]).T
        ends_S = np.array([piece.start + piece.num_tokens for piece in plan.slices], np.int32)
        rows_T, starts_S1 = rows_S.repeat(lens_S), np.zeros(len(rows_S) + 1, np.int32)
        lens_S.cumsum(out=starts_S1[1:])
        token_ids: list[int] = []
        positions: list[int] = []
        for piece in plan.slices:
            token_ids += piece.token_ids or (self._last_token_R[piece.row],)
            positions += range(piece.start, piece.start + piece.num_tokens)
        inputs.token_ids_T[:] = token_ids
        inputs.counters_3T[_POSITIONS] = positions
        np.add(inputs.counters_3T[_POSITIONS], 1, out=inputs.counters_3T[_DRAWN])
        self._find_slots(rows_T, inputs)
        for own_T, column_T in zip(inputs.columns_T, self._rows.columns(rows_T), strict=True):
            own_T[:] = column_T
        max_len = int(ends_S.max())
        return AttentionBatch(
            num_decodes=0,
            slots_T=torch.from_numpy(inputs.counters_3T[_SLOTS]),
            block_table_SM=torch.from_numpy(self._table(rows_S, max_len)),
            seq_lens_S=torch.from_numpy(ends_S),
            query_starts_S1=torch.from_numpy(starts_S1),
            max_query_len=int(lens_S.max()),
            max_seq_len=max_len,
        )

    def _output(self, plan: StepPlan, captured: _Captured, attention: AttentionBatch) -> StepOutput:
        """When it has been computed."""
        if plan.num_tokens > len(plan.slices):
            return self._verified(plan, captured)
        rows_S = np.array([piece.row for piece in plan.slices])
        at = [(piece.row, piece.start) for piece in plan.slices]
        return self._decoded(_Run(captured, rows_S, attention.seq_lens_S.numpy(), at, attention))

    def _verified(self, plan: StepPlan, captured: _Captured) -> StepOutput:
        """What is sampled behind accepted drafts comes next: see verification.py, which does this on a device."""
        ids, first, accepted = captured.ids_T.tolist(), 0, []
        for piece in plan.slices:
            accepted.append(num_agreeing(piece.draft_ids, ids[first : first + piece.num_samples]))
            self._last_token_R[piece.row] = max(ids[first + accepted[-1]], 0)
            first += piece.num_samples
        return StepOutput(captured.calls.result, (), None, torch.tensor(accepted))

    def _decoded(self, run: _Run) -> StepOutput:
        """Its tokens are those that the next one reads: see `sample_next`."""
        captured = run.captured
        self._last_token_R[run.rows_S] = np.maximum(captured.ids_T, 0, out=captured.inputs.token_ids_T)
        run.next = [(row, position + 1) for row, position in run.next]
        run.num_left -= 1
        self._run = run
        return StepOutput(captured.calls.result, (), None)

    def _move_on(self, run: _Run, plan: StepPlan) -> None:
        """To the next positions, and to blocks that a plan brings for them. The tokens are there already."""
        inputs = run.captured.inputs
        np.add(inputs.counters_3T, 1, out=inputs.counters_3T)
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
            self._find_slots(run.rows_S, inputs)

    def _deal(self, run: _Run) -> None:
        """Have attention dealt out for this step, and for those behind it that see the same tiles of their contexts."""
        positions = [position for _, position in run.next]
        run.num_left = min(TILE - (position - end) % TILE for position in positions for end in self._ends)
        table_SM = self._table(run.rows_S, max(positions) + run.num_left)
        run.attention = replace(run.attention, block_table_SM=torch.from_numpy(table_SM))

    def _table(self, rows_S: Array, max_len: int) -> Array:
        """The blocks of contexts of so many positions at most."""
        return self._block_table_RM[:, : -(-max_len // self._builder.block_size)].take(rows_S, 0)

    def _find_slots(self, rows_T: Array, inputs: _Inputs) -> None:
        """By the blocks that these rows have."""
        positions_T, slots_T, _ = inputs.counters_3T
        spans_T, offsets_T = np.divmod(positions_T, self._builder.block_size)
        slots_T[:] = self._block_table_RM[rows_T, spans_T] * self._builder.block_size + offsets_T


def decode_calls(
    step: EagerStep, builder: BatchBuilder, beginning: Callable[[], object] = lambda: None
) -> DecodeCalls | None:
    """Those of a model of which steps can be repeated, with one group of layers; None for others."""
    if step.repeats is None or not isinstance(step.ops, NativeOps) or any(layer.group for layer in step.kv):
        return None
    return DecodeCalls(step, step.ops, builder, beginning)
