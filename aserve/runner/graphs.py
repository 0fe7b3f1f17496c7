"""Decoding steps as graphs: a whole step, from the last tokens to the next ones, launched by a single call.

At small batches a step is hundreds of kernels of microseconds each, and launching them takes longer than running them.
A graph is recorded once for a batch size and launched again from then on, on the same memory. So its inputs lie in
buffers that stay where they are, and the step itself moves them on, by one position a row:

    host      rows, positions, sampling  -- only when they are not what the last replay left behind -->  buffers
    graph     last tokens -> slots, block tables -> forward pass, KV write -> sample -> last tokens, positions + 1

Batch sizes are rounded up to buckets. A padding row is a row of the tables that no sequence ever gets: it has no
context, writes to the null block, and its token is not part of the result. Rows with adapters are sorted by slot in
buffers too, so that one graph serves any mixture; see adapters.py. Start-up captures the largest graphs, which
stand in for all others, and as many more as a second allows; the rest follow while there is nothing to do, or when a
kind of step has come up often. Small steps with prompts have graphs of their own (mixed_graphs.py). All others go the
eager way, which computes the same; so do, after a capture that failed, those that no graph stands in for.

Rows with masks have graphs in two parts, so that masks are made while the first runs. Between the parts they are
written to where the second reads them:

    device    | forward part .......... |    | sampling part |        hidden states stay in a buffer in between
    masks     | tokens -> masks ... | upload |

Letters: kernels/ops.py and rows.py; B rows of a bucket   W words of a mask.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aserve.core.columns import SAMPLING, SamplingColumns
from aserve.core.ids import Row
from aserve.core.plan import RowInit, StepPlan
from aserve.kernels.ops import LoraBatch, SamplingBatch, TokenMasks
from aserve.runner.adapters import AdapterSlots
from aserve.runner.batch import BatchBuilder, Places, StepBatch
from aserve.runner.device import TORCH_DTYPES, StepDevice
from aserve.runner.graph_device import Captures, GraphDevice
from aserve.runner.graph_keys import (
    DRAWN,
    FILTERED,
    GREEDY,
    KINDS,
    MASKED,
    MAX_GRAPHS,
    GraphKey,
    Kind,
    buckets,
    capture_order,
    context_bound,
)
from aserve.runner.masks import num_mask_words
from aserve.runner.mixed_graphs import MixedGraphs
from aserve.runner.rows import RowTable
from aserve.runner.step import Step, StepOutput

CAPTURE_AFTER: Final = 2
"""Eager steps of a kind before its graph is captured: a batch that only grows through a size is not worth one."""
REPLACE_AFTER: Final = 16
"""Steps that another graph stands in for, before: a capture takes as long as some ten of them."""
REPLACE_CLOSE_AFTER: Final = 256
"""The same for a graph of at most twice the size, which costs a step less than a capture costs those who wait."""
START_UP_S: Final = 1.0
"""Of start-up for graphs beyond the largest of each kind; on a large GPU some sixty of them."""
MOST_OF_A_CAPTURE_S: Final = 0.05
"""What of a capture is counted. One that takes longer compiles a kernel, which is done once on a machine: a start that
does, of which some take a second, would else leave graphs to be captured while the first requests wait."""
START_UP_GRAPHS: Final = 60
"""So many, where ranks capture in lockstep."""


class DecodeInputs(NamedTuple):
    """What a graph reads, for a bucket's rows; `positions_B` it also moves on.

    alive_B: 1 for a sequence, 0 for padding. positions_B: of the tokens that are fed in.
    """

    rows_B: Tensor
    positions_B: Tensor
    alive_B: Tensor
    columns_B: SamplingColumns[Tensor]

    def up_to(self, bucket: int) -> "DecodeInputs":
        """Those of the first rows."""
        columns_B = SamplingColumns[Tensor](*(column_B[:bucket] for column_B in self.columns_B))
        return DecodeInputs(self.rows_B[:bucket], self.positions_B[:bucket], self.alive_B[:bucket], columns_B)


class DecodeGraphs:
    """Runs the decoding steps that are captured. Used by the runner's thread alone, in launch order, inside `stepping`.

    rows: its last row is for padding. builder, step: of the eager way, whose code is what is captured. slots: of
    adapters; None where no row has one. in_lockstep: other ranks see the same plans, and have to choose and capture the
    same graphs, since what a graph pads has to be padded on all: nothing may depend on the clock.
    """

    def __init__(
        self,
        graph_device: GraphDevice,
        device: StepDevice,
        rows: RowTable,
        builder: BatchBuilder,
        step: Step,
        max_model_len: int,
        slots: AdapterSlots | None = None,
        *,
        in_lockstep: bool = False,
    ) -> None:
        self._captures = Captures(graph_device, must_not_fail=in_lockstep)
        self._in_lockstep = in_lockstep
        self._mixed = MixedGraphs(self._captures, device, rows, builder, step, max_model_len=max_model_len, slots=slots)
        self.mixed_sizes = self._mixed.sizes
        """Of the steps with prompts that are graphs."""
        self._device = device
        self._rows = rows
        self._builder = builder
        self._step = step
        num_rows, torch_device = len(rows.last_token_R), rows.last_token_R.device
        self._padding_row = num_rows - 1
        self._buckets = buckets(num_rows - 1)
        self._unasked = capture_order(num_rows - 1, max_model_len, adapted=slots is not None)
        self._coarse = [key for key in self._unasked if key.kind == FILTERED and key.bucket.bit_count() == 1]
        self._slots = slots
        self._max_model_len = max_model_len

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_rows, dtype=dtype, device=torch_device)

        self._inputs = DecodeInputs(
            rows_B=zeros(torch.int64),
            positions_B=zeros(torch.int64),
            alive_B=zeros(torch.int64),
            columns_B=SamplingColumns(*(zeros(TORCH_DTYPES[np.dtype(column.dtype)]) for column in SAMPLING)),
        )
        self._ids_B = zeros(torch.int64)
        self._lora = None if slots is None else LoraBatch(zeros(torch.int64), slots.no_starts())
        self._count_B = torch.arange(num_rows + 1, device=torch_device)
        self._query_starts_B1 = self._count_B.int()
        num_words = num_mask_words(step.model.spec.vocab_size)
        self._words_BW = torch.full((num_rows, num_words), -1, dtype=torch.int32, device=torch_device)
        self._hidden_BE: Tensor | None = None
        """Made when the first part of a graph is run before it is captured: the model knows its type."""
        self._graphs: dict[GraphKey, tuple[Callable[[], None], ...]] = {}
        """Their parts, in the order in which they are launched."""
        self._stand_ins: dict[GraphKey, GraphKey | None] = {}
        self._num_without: Counter[GraphKey] = Counter()
        self._eager_before: dict[Row, float] = {}
        self._members: list[Row] | None = None
        """Rows of the last decoding step, if their sampling is still the same."""
        self._kind = GREEDY
        self._has_adapters = False
        self._loaded: tuple[int, list[int], int] | None = None
        """What the inputs hold for them: padding up to a bucket, these positions, and this version of the slots."""

    def execute(self, plan: StepPlan, masks: Callable[[], TokenMasks] | None = None) -> StepOutput | None:
        """Launch the plan's graph; None where it has none, and nothing was done. Must see every plan.

        masks: waits for those of the plan, where it has some.
        """
        self._note(plan.inits)
        if not decodes_alone(plan, self._eager_before):
            goes_eager = masks is not None or is_controlled(plan, self._eager_before)
            return None if goes_eager else self._mixed.execute(plan)
        rows = [piece.row for piece in plan.slices]
        positions = [piece.start for piece in plan.slices]
        if rows != self._members:
            self._members, self._kind, self._loaded = rows, self._how_sampled(rows), None
            self._has_adapters = self._slots is not None and self._slots.any_in(rows)
        bucket = next(bucket for bucket in self._buckets if bucket >= len(rows))
        bound = context_bound(max(positions) + 1, self._max_model_len)
        kind = self._kind if masks is None else MASKED
        key = self._choose(GraphKey(bucket, bound, kind, self._has_adapters))
        if key is None:
            return None
        if (key.bucket, positions, self._version) != self._loaded:
            self._load(rows, positions, key.bucket)
        if any(piece.new_blocks for piece in plan.slices):
            self._builder.apply_changes(plan)
        self._loaded = None  # where the launch fails, nobody knows
        for number, part in enumerate(self._graphs[key]):
            if number:
                self._load_masks(masks, key.bucket)
            part()
        self._loaded = (key.bucket, [position + 1 for position in positions], self._version)
        return StepOutput(self._ids_B[: len(rows)], (), None)

    @property
    def _version(self) -> int:
        return 0 if self._slots is None else self._slots.version

    def _note(self, inits: Sequence[RowInit]) -> None:
        """Remember which rows have to go the eager way, and up to which position of the sampled token."""
        if inits:
            self._members = None
        for init in inits:
            sampling = init.sampling
            self._eager_before.pop(init.row, None)
            if sampling.controls is not None or sampling.num_logprobs is not None:
                self._eager_before[init.row] = float("inf")
            elif sampling.banned_ids:
                self._eager_before[init.row] = sampling.banned_before

    def _how_sampled(self, rows: list[Row]) -> Kind:
        sampling = self._rows.samplings(np.array(rows, np.int64), np.zeros(len(rows), np.int64))
        if sampling.all_greedy:
            return GREEDY
        return FILTERED if sampling.any_filter else DRAWN

    def _load(self, rows: list[Row], positions: list[int], bucket: int) -> None:
        """Write the inputs of these rows, and of padding up to the bucket."""
        rows_N, positions_N = np.array(rows, np.int64), np.array(positions, np.int64)
        sampling = self._rows.samplings(rows_N, positions_N + 1)
        columns = (
            (rows_N, self._padding_row),
            (positions_N, 0),
            (np.ones_like(rows_N), 0),
            *((column_N, column.neutral) for column_N, column in zip(sampling.columns_N, SAMPLING, strict=True)),
        )
        width = 0, bucket - len(rows)
        padded = [np.pad(column, width, constant_values=padding) for column, padding in columns]
        *places, columns_B = self._inputs.up_to(bucket)
        for buffer_B, uploaded_B in zip((*places, *columns_B), self._device.upload(padded), strict=True):
            buffer_B.copy_(uploaded_B)
        if self._slots is not None and self._lora is not None:
            self._slots.load(self._lora, padded[0], np.ones_like(padded[0]))

    def _load_masks(self, masks: Callable[[], TokenMasks] | None, bucket: int) -> None:
        """Write the masks of a bucket's rows, once they are made."""
        made = None if masks is None else masks()
        self._words_BW[:bucket].fill_(-1)
        if made is not None:
            self._words_BW.index_copy_(0, made.rows_Q, made.words_QW)

    def capture_at_start_up(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Capture the largest graph of each kind, and more for `START_UP_S`. clock: in seconds."""
        self.capture_largest()
        if self._in_lockstep:
            for _ in range(START_UP_GRAPHS):
                self.capture_next()
            return
        left_s, there_is_more = START_UP_S, True
        while there_is_more and left_s > 0.0:
            begin_s = clock()
            there_is_more = self.capture_next()
            left_s -= min(clock() - begin_s, MOST_OF_A_CAPTURE_S)

    def capture_largest(self) -> None:
        """Capture the largest graphs of each kind, in which the memory of all others has room."""
        self._mixed.capture_largest()
        for key in self._unasked[: len(KINDS)]:
            self._try_to_capture(key)

    def capture_next(self) -> bool:
        """Capture the next graph that is missing, which takes some 15 ms; whether there may be more.

        Those first that stand in for many: of few batch sizes, that filter, and all of prompts that filter.
        """
        return (
            self._capture_next_of(self._coarse)
            or self._mixed.capture_next(FILTERED)
            or self._capture_next_of(self._unasked)
            or self._mixed.capture_next(GREEDY)
        )

    def _capture_next_of(self, keys: Sequence[GraphKey]) -> bool:
        key = next((key for key in keys if key not in self._graphs), None)
        return key is not None and self._try_to_capture(key)

    def _choose(self, key: GraphKey) -> GraphKey | None:
        """The graph for a kind of step: its own, captured now if it is time to, or the cheapest that stands in."""
        if key in self._graphs:
            return key
        stand_in = self._stand_in(key)
        patience = CAPTURE_AFTER
        if stand_in is not None:
            patience = REPLACE_CLOSE_AFTER if stand_in.bucket <= 2 * key.bucket else REPLACE_AFTER
        self._num_without[key] += 1
        if self._num_without[key] > patience and self._try_to_capture(key):
            return key
        return stand_in

    def _stand_in(self, key: GraphKey) -> GraphKey | None:
        """The cheapest graph that computes this kind of step too."""
        if key not in self._stand_ins:
            larger = (other for other in self._graphs if other.covers(key))
            self._stand_ins[key] = min(larger, key=lambda other: other.cost, default=None)
        return self._stand_ins[key]

    def _try_to_capture(self, key: GraphKey) -> bool:
        """Capture a graph, on padding alone; whether there is one now."""
        if not self._captures.are_on or len(self._graphs) == MAX_GRAPHS:
            return False
        self._load([], [], key.bucket)
        self._loaded = None
        parts = []
        for part in (self._run_forward, self._run_sampling) if key.kind.is_masked else (self._run,):
            replay = self._captures.capture(key, partial(part, key))
            if replay is None:
                return False
            parts.append(replay)
        self._graphs[key] = tuple(parts)
        self._stand_ins.clear()
        return True

    def _run(self, key: GraphKey) -> None:
        """The step that is captured: every tensor that it reads or leaves behind is where it will be at a replay."""
        self._ids_B[: key.bucket].copy_(self._step.execute(self._batch(key)).ids_N)
        self._move_on(key)

    def _run_forward(self, key: GraphKey) -> None:
        """Its first part, where rows have masks."""
        hidden_BE = self._step.forward(self._batch(key))
        if self._hidden_BE is None:
            self._hidden_BE = hidden_BE.new_zeros((len(self._words_BW), *hidden_BE.shape[1:]))
        self._hidden_BE[: key.bucket].copy_(hidden_BE)

    def _run_sampling(self, key: GraphKey) -> None:
        """Its second part."""
        bucket = key.bucket
        assert self._hidden_BE is not None, "the first part ran before"
        masks = TokenMasks(self._count_B[:bucket], self._words_BW[:bucket])
        batch = replace(self._batch(key), masks=lambda: masks)
        self._ids_B[:bucket].copy_(self._step.sample(self._hidden_BE[:bucket], batch).ids_N)
        self._move_on(key)

    def _move_on(self, key: GraphKey) -> None:
        self._inputs.positions_B[: key.bucket].add_(self._inputs.alive_B[: key.bucket])

    def _batch(self, key: GraphKey) -> StepBatch:
        """Of a bucket's inputs."""
        bucket, lora = key.bucket, self._lora
        inputs = self._inputs.up_to(bucket)
        return StepBatch(
            token_ids_T=self._rows.last_token_R.index_select(0, inputs.rows_B),
            positions_T=inputs.positions_B,
            attention=self._builder.attention(
                self._places(inputs), num_decodes=bucket, max_query_len=1, max_seq_len=key.max_seq_len
            ),
            sampled_tokens_N=self._count_B[:bucket],
            sampled_rows_N=inputs.rows_B,
            sampling=SamplingBatch(
                columns_S=inputs.columns_B,
                positions_S=inputs.positions_B + 1,
                banned_SC=None,
                all_greedy=key.kind.all_greedy,
                any_filter=key.kind.any_filter,
            ),
            lora=LoraBatch(lora.tokens_N[:bucket], lora.starts_G1) if key.adapted and lora is not None else None,
        )

    def _places(self, inputs: DecodeInputs) -> Places:
        """Padding has a context of no position."""
        block_size, max_spans = self._builder.block_size, self._builder.max_spans
        spans_B = inputs.positions_B.div(block_size, rounding_mode="floor")
        return Places(
            rows_S=inputs.rows_B,
            seq_lens_S=(inputs.positions_B + inputs.alive_B).int(),
            query_starts_S1=self._query_starts_B1[: len(spans_B) + 1],
            spans_T=torch.add(spans_B, inputs.rows_B, alpha=max_spans),
            block_offsets_T=inputs.positions_B.remainder(block_size),
        )


def decodes_alone(plan: StepPlan, eager_before: dict[Row, float]) -> bool:
    """Whether a plan only adds a token to rows whose last one is on the device, with nothing about it to be controlled.

    eager_before: rows whose tokens before a position need the eager way, and that position.
    """
    return (
        bool(plan.slices)
        and not plan.inits
        and all(not piece.token_ids and piece.num_samples for piece in plan.slices)
        and not is_controlled(plan, eager_before)
    )


def is_controlled(plan: StepPlan, eager_before: dict[Row, float]) -> bool:
    """Whether a plan goes beyond temperatures, filters and masks: by scores, drafts, or rows that go the eager way."""
    return any(
        piece.target_ids or piece.num_samples > 1 or piece.start + piece.num_tokens < eager_before.get(piece.row, 0)
        for piece in plan.slices
    )
