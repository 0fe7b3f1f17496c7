"""DecodeCalls: on a CPU, whole decoding steps by captured calls: from the last tokens to the next ones.

    a batch as built   begin    copy tokens, positions, slots, sampling --.
    the same rows      go on    last tokens, positions + 1, slots + 1 ----'--> one call: layers, head, sampling

The counterpart of graphs.py: of a small model with one stream, to build a batch, to deal out attention and to sample
take as long as a third of the kernels, and next to nothing of it changes from step to step. Rows that are controlled,
masked, scored or have drafts or adapters go the eager way, whose forward pass is repeated (repeats.py); so do models
with several groups of layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from aserve.core.columns import SamplingColumns
from aserve.core.plan import StepPlan
from aserve.kernels.native.attention import TILE
from aserve.kernels.native.captured_calls import CapturedCalls
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import AttentionBatch, SamplingBatch, TokenMasks
from aserve.models.interface import ForwardBatch
from aserve.runner.batch import BatchBuilder, StepBatch
from aserve.runner.device import Array
from aserve.runner.repeats import CapturedBySize
from aserve.runner.steady import goes_on
from aserve.runner.step import EagerStep, StepOutput

MAX_LOGITS: Final = 2**20
"""Of a step, that are kept. With more, head and sampling take so long that the Python around them does not count."""

_POSITIONS, _SLOTS, _DRAWN = range(3)


@dataclass(frozen=True, slots=True)
class _Captured:
    """Calls, and what they read that is a step's own, of S rows. ids_S: what they write.

    counters_3S: positions of tokens, their slots, and positions that are drawn for.
    All of numpy: its operations on a few numbers keep Python's lock, which torch's give to the event loop each time.
    """

    calls: CapturedCalls
    ids_S: Array
    token_ids_S: Array
    counters_3S: Array
    seq_lens_S: Array
    columns_S: SamplingColumns[Array]

    def load(self, batch: StepBatch) -> None:
        """A batch as it was built."""
        self.token_ids_S[:] = batch.token_ids_T.numpy()
        self.counters_3S[:] = _counters(batch)
        self.seq_lens_S[:] = batch.attention.seq_lens_S.numpy()
        for own_S, column_S in zip(self.columns_S, batch.sampling.columns_S, strict=True):
            own_S[:] = column_S.numpy()

    def move_on(self) -> None:
        """To the next positions. The tokens are there already."""
        np.add(self.counters_3S, 1, out=self.counters_3S)
        np.add(self.seq_lens_S, 1, out=self.seq_lens_S)


@dataclass(slots=True)
class _Run:
    """Rows that decode, and how they are computed.

    next: row and position of each in the plan that goes on. attention: of the last step. num_left: steps for which
    that holds.
    """

    captured: _Captured
    rows_S: Array
    next: list[tuple[int, int]]
    attention: AttentionBatch
    num_left: int


class DecodeCalls:
    """Used by the runner's thread alone, in launch order.

    step: the eager way, of a model of which steps can be repeated. ops: its operations. builder: of the batches that
    steps begin with. beginning: as of `Repeats`.
    """

    def __init__(
        self, step: EagerStep, ops: NativeOps, builder: BatchBuilder, beginning: Callable[[], object] = lambda: None
    ) -> None:
        model = step.model
        self._model, self._ops, self._kv, self._builder = model, ops, step.kv, builder
        self._block_table_RM, self._last_token_R = step.rows.block_table_RM.numpy(), step.rows.last_token_R.numpy()
        self._beginning = beginning
        self._max_rows = MAX_LOGITS // model.spec.vocab_size
        self._ends = {0, *(window - 1 for window in model.spec.windows if window is not None)}
        """How far behind a token the contexts of layers end: at itself, and where a window begins."""
        self._captured = CapturedBySize[_Captured]()
        self._run: _Run | None = None

    def execute(self, plan: StepPlan, masked: Callable[[], TokenMasks] | None = None) -> StepOutput | None:
        """The step of a plan that goes on where the last one was; None for any other, of which nothing is done."""
        run, self._run = self._run, None  # while it runs there is none: from a step that fails nothing goes on
        if run is None or masked is not None or not goes_on(plan, run.next):
            return None
        run.captured.move_on()
        self._find_places(run, plan)
        run.captured.calls.repeat(run.attention, self._beginning)
        return self._output(run)

    def begin(self, batch: StepBatch) -> StepOutput | None:
        """The step of a batch; None for one that goes the eager way."""
        self._run = None
        num_rows = len(batch.token_ids_T)
        if num_rows > self._max_rows or not _is_plain(batch):
            return None
        if (captured := self._captured.get(num_rows)) is not None:
            captured.load(batch)
            run = self._begun(captured, batch)
            captured.calls.repeat(run.attention, self._beginning)
            return self._output(run)
        captured = self._captured.capture(num_rows, lambda: self._capture(batch))
        return None if captured is None else self._output(self._begun(captured, batch))

    def _capture(self, batch: StepBatch) -> _Captured:
        """Compute the step, and keep how."""
        self._beginning()
        ids_S, seq_lens_S = batch.token_ids_T.clone(), batch.attention.seq_lens_S.clone()
        columns_S = SamplingColumns[Tensor](*(column_S.clone() for column_S in batch.sampling.columns_S))
        counters_3S = torch.from_numpy(_counters(batch))
        attention = replace(batch.attention, slots_T=counters_3S[_SLOTS], seq_lens_S=seq_lens_S)
        seen = ForwardBatch(counters_3S[_POSITIONS], attention)
        sampling = SamplingBatch(columns_S, counters_3S[_DRAWN], None, all_greedy=False, any_filter=True)

        def work() -> Tensor:
            return self._ops.sample(self._model.logits(self._model.forward(ids_S, self._kv, seen)), sampling)

        calls = CapturedCalls(self._ops, attention, work)
        columns = SamplingColumns[Array](*(column_S.numpy() for column_S in columns_S))
        numbers = counters_3S.numpy(), seq_lens_S.numpy(), columns
        return _Captured(calls, calls.result.numpy(), ids_S.numpy(), *numbers)

    def _begun(self, captured: _Captured, batch: StepBatch) -> _Run:
        rows_S, positions_S = batch.sampled_rows_N.numpy(), batch.positions_T.numpy()
        own = torch.from_numpy(captured.counters_3S[_SLOTS]), torch.from_numpy(captured.seq_lens_S)
        attention = replace(batch.attention, slots_T=own[0], seq_lens_S=own[1])
        at = list(zip(rows_S.tolist(), positions_S.tolist(), strict=True))
        run = _Run(captured, rows_S, at, attention, 0)
        self._deal(run)
        return run

    def _output(self, run: _Run) -> StepOutput:
        """When it has been computed. Its tokens are those that the next one reads: see `sample_next`."""
        ids_S, tokens_S = run.captured.ids_S, run.captured.token_ids_S
        self._last_token_R[run.rows_S] = np.maximum(ids_S, 0, out=tokens_S)
        run.next = [(row, position + 1) for row, position in run.next]
        run.num_left -= 1
        self._run = run
        return StepOutput(run.captured.calls.result, (), None)

    def _find_places(self, run: _Run, plan: StepPlan) -> None:
        """Blocks and slots of a plan's tokens, where they are no longer in those of the last step's."""
        has_new_blocks = any(piece.new_blocks for piece in plan.slices)
        if has_new_blocks:
            self._builder.apply_changes(plan)
        if not run.num_left:
            self._deal(run)
        elif has_new_blocks:
            table_SM = run.attention.block_table_SM.numpy()
            self._block_table_RM[:, : table_SM.shape[1]].take(run.rows_S, 0, out=table_SM)
        block_size = self._builder.block_size
        if any(position % block_size == 0 for _, position in run.next):
            positions_S, slots_S, _ = run.captured.counters_3S
            spans_S, offsets_S = np.divmod(positions_S, block_size)
            slots_S[:] = self._block_table_RM[run.rows_S, spans_S] * block_size + offsets_S

    def _deal(self, run: _Run) -> None:
        """Have attention dealt out for this step, and for those behind it that see the same tiles of their contexts."""
        positions = [position for _, position in run.next]
        run.num_left = min(TILE - (position - end) % TILE for position in positions for end in self._ends)
        num_spans = (max(positions) + run.num_left - 1) // self._builder.block_size + 1
        table_SM = self._block_table_RM[:, :num_spans].take(run.rows_S, 0)
        run.attention = replace(run.attention, block_table_SM=torch.from_numpy(table_SM))


def _counters(batch: StepBatch) -> Array:
    return np.stack([batch.positions_T.numpy(), batch.attention.slots_T.numpy(), batch.sampling.positions_S.numpy()])


def _is_plain(batch: StepBatch) -> bool:
    """Whether each row decodes a token, in the plan's order, and nothing but its parameters says which comes next."""
    num_rows = len(batch.token_ids_T)
    return (
        batch.attention.num_decodes == num_rows
        and not batch.attention.groups
        and batch.lora is None
        and batch.controls is None
        and batch.masks is None
        and batch.drafts is None
        and not batch.sampled_targets
        and batch.prompt_targets is None
        and batch.sampling.banned_SC is None
        and batch.sampled_tokens_N.tolist() == list(range(num_rows))
    )


def decode_calls(
    step: EagerStep, builder: BatchBuilder, beginning: Callable[[], object] = lambda: None
) -> DecodeCalls | None:
    """Those of a model of which steps can be repeated; None for others."""
    if step.repeats is None or not isinstance(step.ops, NativeOps):
        return None
    return DecodeCalls(step, step.ops, builder, beginning)
