"""Steps with prompts as graphs: a few prompts or chunks of them, of some hundred tokens, beside sequences that decode.

On a large GPU such a step takes less time than its launches, unless they are one. Each count is rounded up to a bucket
by slices of nobody's, in the row that pads, on the null block: decoding ones behind those that decode, and prompts at
the end, the last of which takes what tokens are left. So a padded step is a step like any other, of its key's shape:

    tokens  | decode ... | padding, decoding |  chunk of A  |  chunk of B  | padding, prompts ... |
            0            d                   D                             D + t              D + T

Where rows may have adapters, every graph computes them (adapters.py): beside prompts some launches more do not matter.
All inputs travel at each step, in one copy, to where the graph reads them. A graph of more tokens, or one that filters
where nobody does, stands in for one that is missing. A step that has neither goes the eager way, until its kind has
come up a few times. Plans know the sizes and fill them (core/graph_sizes.py). Letters: kernels/ops.py and rows.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from aserve.core.graph_sizes import GraphSizes
from aserve.core.ids import Row, SeqId
from aserve.core.plan import SeqSlice, StepPlan
from aserve.kernels.ops import LoraBatch
from aserve.models.spec import ModelSpec
from aserve.runner.adapters import AdapterSlots
from aserve.runner.batch import BatchBuilder, StepShape, Uploads
from aserve.runner.device import Array, StepDevice
from aserve.runner.graph_device import Captures, matrix_flops
from aserve.runner.graph_keys import FILTERED, GREEDY, KINDS, Kind, context_bound, context_bounds
from aserve.runner.rows import RowChanges, RowTable
from aserve.runner.step import Step, StepOutput

CAPTURE_AFTER: Final = 4
"""Eager steps of a kind before its graph is captured, which takes as long as some five of them."""
DECODE_BUCKETS: Final = (0, 8, 32, 64, 96, 128, 192)
"""And as many as there are rows."""
NUM_PROMPTS: Final = 16
"""In every step, at least one of them padding. Of those that pad all but the last have one token."""
TOKEN_BUCKETS: Final = (64, 128, 192, 256, 384, 512)
"""Tokens of prompts in a step, padding included; beyond, the device is busy for longer than launches take."""
SMALL_MODEL_BUCKETS: Final = (64, 128, 256, 512, 1024, 2048)
"""The same of a model that computes 1,024 and more while it would be launched: up to where it does. Fewer of few
tokens, since padding costs it little."""
LAYER_LAUNCH_S: Final = 2e-4
"""What launching takes, one by one, the ten kernels of a layer: beside the event loop of a server twice as long, or
more (an H200 with cores of a Xeon: a step of Qwen3-0.6B, of 28 layers, takes 10 to 15 ms so, and 5.8 ms as a graph)."""
FREE_TOKENS: Final = 256
"""So many a large GPU computes in about the time in which it reads the weights: up to there padding costs nothing."""
MAX_MIXED_GRAPHS: Final = 96
"""Each takes memory for its nodes, beside what all share."""

NOBODY: Final = SeqId(-1)
NO_CHANGES: Final = RowChanges(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32))


class MixedKey(NamedTuple):
    """What is fixed in a graph. num_decodes, num_tokens: padding included; tokens are those of prompts."""

    num_decodes: int
    num_tokens: int
    max_seq_len: int
    kind: Kind

    @property
    def size(self) -> int:
        """Tokens that it computes."""
        return self.num_decodes + self.num_tokens

    def covers(self, other: "MixedKey", cheap_tokens: int) -> bool:
        """Whether its graph computes the steps of the other one too, where so many tokens may be computed for fewer."""
        return (
            self.num_decodes >= other.num_decodes
            and self.num_tokens >= other.num_tokens
            and self.max_seq_len >= other.max_seq_len
            and KINDS.index(self.kind) <= KINDS.index(other.kind)
            and self.size <= max(cheap_tokens, other.size)
        )


class _Captured(NamedTuple):
    """inputs, lora: where the graph reads. ids_N: where it leaves the tokens of all slices, in their order."""

    inputs: Uploads[Tensor]
    lora: LoraBatch | None
    ids_N: Tensor
    replay: Callable[[], None]


class MixedGraphs:
    """Runs the steps with prompts that are captured. Used as `DecodeGraphs` is, which asks it for what is not its own.

    rows: the last one is for padding. builder, step: of the eager way, whose code is what is captured. slots: of
    adapters; None where no row has one.
    """

    def __init__(
        self,
        captures: Captures,
        device: StepDevice,
        rows: RowTable,
        builder: BatchBuilder,
        step: Step,
        *,
        max_model_len: int,
        slots: AdapterSlots | None = None,
    ) -> None:
        self._captures = captures
        self._slots = slots
        self._device = device
        self._rows = rows
        self._builder = builder
        self._step = step
        self._padding_row = Row(len(rows.last_token_R) - 1)
        self._max_model_len = max_model_len
        launch_tokens = tokens_while_launching(step.model.spec, matrix_flops(rows.last_token_R.device))
        self.sizes = padded_sizes(self._padding_row, max_model_len, launch_tokens)
        """Of all graphs, there or not."""
        self._by_need = by_need(self.sizes)
        self._graphs: dict[MixedKey, _Captured] = {}
        self._stand_ins: dict[MixedKey, MixedKey | None] = {}
        self._num_without: Counter[MixedKey] = Counter()

    def execute(self, plan: StepPlan) -> StepOutput | None:
        """Launch the plan's graph; None where it has none, and nothing was done. plan: nothing of it is controlled."""
        key = self._choose(self._key(plan))
        if key is None:
            return None
        self._builder.take_in(plan)
        captured = self._graphs[key]
        self._load(captured, self._pad(key, plan.slices))
        captured.replay()
        ids_N = captured.ids_N[: len(plan.slices)]
        sampled = [n for n, piece in enumerate(plan.slices) if piece.num_samples]
        if len(sampled) < len(plan.slices):
            [sampled_N] = self._device.upload([np.array(sampled, np.int64)])
            ids_N = ids_N.index_select(0, sampled_N)
        return StepOutput(ids_N, (), None)

    def capture_largest(self) -> None:
        """Capture the graph that takes the most memory."""
        for size in self.sizes.all()[:1]:
            self._capture(MixedKey(*size, self._max_model_len, FILTERED))

    def capture_next(self, kind: Kind) -> bool:
        """Capture the next of this kind that is missing, for short contexts; whether there may be more.

        First those for which none stands in, in the order of `by_need`.
        """
        bound = context_bounds(self._max_model_len)[0]
        missing = [key for size in self._by_need if (key := MixedKey(*size, bound, kind)) not in self._graphs]
        needed = next((key for key in missing if self._stand_in(key) is None), None)
        return bool(missing) and self._capture(needed or missing[0])

    def _key(self, plan: StepPlan) -> MixedKey | None:
        """The kind of a step; None for one that is too large, would be padded too much, or has no prompt."""
        lens = [len(piece.token_ids) for piece in plan.slices if piece.token_ids]
        size = self.sizes.choose(len(plan.slices) - len(lens), len(lens), sum(lens))
        if size is None:
            return None
        seq_len = max(piece.start + piece.num_tokens for piece in plan.slices)
        # The padding prompts are contexts too.
        return MixedKey(*size, context_bound(max(seq_len, size[1]), self._max_model_len), self._kind(plan))

    def _kind(self, plan: StepPlan) -> Kind:
        """One of two: what filters takes the likeliest token too, where a row wants it."""
        new = {init.row: init.sampling.columns.temperature for init in plan.inits}
        known = np.array([piece.row for piece in plan.slices if piece.row not in new], np.int64)
        all_greedy = self._rows.samplings(known, np.zeros_like(known)).all_greedy
        return GREEDY if all_greedy and not any(new.values()) else FILTERED

    def _choose(self, key: MixedKey | None) -> MixedKey | None:
        """The graph for a kind of step: its own, the smallest that stands in, or its own captured now if it is time."""
        if key is None or key in self._graphs:
            return key
        stand_in = self._stand_in(key)
        if stand_in is not None:
            return stand_in
        self._num_without[key] += 1
        return key if self._num_without[key] > CAPTURE_AFTER and self._capture(key) else None

    def _stand_in(self, key: MixedKey) -> MixedKey | None:
        """The smallest graph that computes this kind of step too."""
        if key not in self._stand_ins:
            larger = (other for other in self._graphs if other.covers(key, self.sizes.cheap_tokens))
            self._stand_ins[key] = min(larger, key=lambda other: (other.size, other.max_seq_len), default=None)
        return self._stand_ins[key]

    def _pad(self, key: MixedKey, slices: Sequence[SeqSlice]) -> list[SeqSlice]:
        """The slices, and behind them padding up to the key."""
        lens = [len(piece.token_ids) for piece in slices if piece.token_ids]
        decode = SeqSlice(NOBODY, self._padding_row, 0, 1)
        num_padding = NUM_PROMPTS - len(lens)
        rest = key.num_tokens - sum(lens) - (num_padding - 1)
        return [
            *slices,
            *[decode] * (key.num_decodes - (len(slices) - len(lens))),
            *(SeqSlice(NOBODY, self._padding_row, 0, size, (0,) * size) for size in [1] * (num_padding - 1) + [rest]),
        ]

    def _arrays(self, slices: Sequence[SeqSlice]) -> Uploads[Array]:
        """Of padded slices. All of them sample: what a chunk samples before it is whole, its sequence never reads."""
        fed = [i for i, piece in enumerate(slices) if not piece.token_ids]
        prompts = [i for i, piece in enumerate(slices) if piece.token_ids]
        sampling = [msgspec.structs.replace(piece, num_samples=1) for piece in slices]
        return self._builder.lay_out(sampling, fed + prompts, len(fed), NO_CHANGES)

    def _load(self, captured: _Captured, slices: Sequence[SeqSlice]) -> None:
        host = self._arrays(slices)
        for kept, uploaded in zip(captured.inputs.arrays(), self._device.upload(host.arrays()), strict=True):
            kept.copy_(uploaded)
        if self._slots is not None and captured.lora is not None:
            self._slots.load(captured.lora, host.rows_S, np.diff(host.query_starts_S1))

    def _capture(self, key: MixedKey) -> bool:
        """Capture a graph, if it can be; whether there is one."""
        if key in self._graphs or len(self._graphs) == MAX_MIXED_GRAPHS:
            return key in self._graphs
        padding = self._pad(key, ())
        uploads = self._device.upload(self._arrays(padding).arrays())
        inputs = Uploads[Tensor].of([uploaded.clone() for uploaded in uploads])
        ids_N = inputs.sampled_rows_N.clone()
        lora = None
        if self._slots is not None:
            lora = LoraBatch(inputs.token_ids_T.clone(), self._slots.no_starts())
        replay = self._captures.capture(key, partial(self._run, key, inputs, lora, ids_N))
        if replay is not None:
            self._graphs[key] = _Captured(inputs, lora, ids_N, replay)
            self._stand_ins.clear()
        return replay is not None

    def _run(self, key: MixedKey, inputs: Uploads[Tensor], lora: LoraBatch | None, ids_N: Tensor) -> None:
        """The step that is captured."""
        shape = StepShape(
            num_fed=key.num_decodes,
            num_decodes=key.num_decodes,
            max_query_len=key.num_tokens,
            max_seq_len=key.max_seq_len,
            all_greedy=key.kind.all_greedy,
            any_filter=key.kind.any_filter,
        )
        batch = replace(self._builder.batch_of(inputs, shape), lora=lora)
        ids_N.copy_(self._step.execute(batch).ids_N)


def tokens_while_launching(spec: ModelSpec, flops_per_s: float) -> int:
    """How many tokens a device computes in the time in which a step's kernels are launched one by one.

    0 where transformers computes the model, of which the spec does not say what a token costs; and where ranks share
    it, whose devices may be of several kinds, while what one pads all have to.
    """
    if not spec.intermediate_size or spec.num_ranks > 1:
        return 0
    return int(spec.num_layers * LAYER_LAUNCH_S * flops_per_s / spec.flops_per_token)


def padded_sizes(max_num_seqs: int, max_model_len: int, launch_tokens: int = 0) -> GraphSizes:
    """Of all graphs of a model that computes so many tokens while it would be launched."""
    tokens: tuple[int, ...] = TOKEN_BUCKETS
    if launch_tokens >= SMALL_MODEL_BUCKETS[-2]:
        tokens = tuple(size for size in SMALL_MODEL_BUCKETS if size <= launch_tokens)
    return GraphSizes(
        decodes=(*(size for size in DECODE_BUCKETS if size < max_num_seqs), max_num_seqs),
        tokens=tuple(size for size in tokens if size <= max_model_len),  # of one padding prompt, nearly
        num_prompts=NUM_PROMPTS,
        cheap_tokens=max(FREE_TOKENS, launch_tokens),
    )


def by_need(sizes: GraphSizes) -> list[tuple[int, int]]:
    """Sequences that decode and tokens of all graphs, in the order in which they are captured.

    Prompts that come alone are first: without its graph, such a prompt's first token waits for some 300 launches. Then
    the largest of those that stand in for smaller ones; then those of few sequences, with which a server begins.
    """

    def need(size: tuple[int, int]) -> tuple[bool, bool, int]:
        is_dear = sum(size) > sizes.cheap_tokens
        return size[0] > 0, is_dear, size[0] if is_dear else 0

    return sorted(sizes.all(), key=need)
