"""A plan to the tensors of one step: one upload, then a few gathers on the device.

Sequences are ordered so that those with one token come first, and of these the ones whose token is still on the device:

    tokens  | fed from last_token | one token from the host |  chunk of A  |   chunk of B    |
    T       0                     F                    num_decodes ...                       T

Samples keep the plan's order, so that results need none restored; a slice with drafts has several (verification.py).
Knows nothing of models and of how to sample.
Letters: kernels/ops.py and rows.py; F tokens fed from the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor, add

from aserve.core.columns import SamplingColumns
from aserve.core.ids import Row
from aserve.core.params import DEFAULT_MAX_LOGPROBS
from aserve.core.plan import SeqSlice, StepPlan
from aserve.kernels.ops import AttentionBatch, LogitControls, LoraBatch, SamplingBatch, TokenMasks
from aserve.runner.adapters import AdapterSlots
from aserve.runner.controls import ControlTable
from aserve.runner.device import Array, StepDevice
from aserve.runner.rows import RowChanges, RowSamplings, RowTable, padded
from aserve.runner.scoring import PromptTargets, SampledTargets
from aserve.runner.verification import Drafts, MadeDrafts, fill_in, num_samples_back, upload_drafts

A = TypeVar("A")


class TokenRun(NamedTuple):
    """A slice of a row each of whose tokens has a vector: which of the T tokens it has, and which of the N samples."""

    row: Row
    start: int
    end: int
    is_first: bool
    place: int | None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What a forward pass and the sampling after it read. N may be 0: a step of unfinished chunks."""

    token_ids_T: Tensor
    positions_T: Tensor
    attention: AttentionBatch
    sampled_tokens_N: Tensor
    """Which of the T tokens each sampled row stands on."""
    sampled_rows_N: Tensor
    sampling: SamplingBatch
    controls: LogitControls | None = None
    sampled_targets: tuple[SampledTargets, ...] = ()
    prompt_targets: PromptTargets | None = None
    drafts: Drafts | None = None
    masks: Callable[[], TokenMasks] | None = None
    """Called when the forward pass is launched; waits until they are made."""
    lora: LoraBatch | None = None
    rows_S: Tensor | None = None
    """Whose slices these are, in the batch's order."""
    token_runs: tuple[TokenRun, ...] = ()


class Uploads(NamedTuple, Generic[A]):
    """All that travels to the device in a step, on the host (A = Array) and there (A = Tensor)."""

    token_ids_T: A
    positions_T: A
    spans_T: A
    block_offsets_T: A
    rows_S: A
    seq_lens_S: A
    query_starts_S1: A
    sampled_tokens_N: A
    sampled_rows_N: A
    sampled_positions_N: A
    banned_NC: A
    cleared_I: A
    entries_U: A
    blocks_U: A
    columns_N: SamplingColumns[A]

    def arrays(self) -> list[A]:
        """All of them in a row, the columns last."""
        return [*self[:-1], *self.columns_N]

    @classmethod
    def of(cls, arrays: Sequence[A]) -> "Uploads[A]":
        """What `arrays` made a row of."""
        num_columns = len(SamplingColumns._fields)
        return cls._make((*arrays[:-num_columns], SamplingColumns(*arrays[-num_columns:])))


class Places(NamedTuple):
    """Where the tokens of a step sit. spans_T: rows of the block table seen as [R * spans, layer groups]."""

    rows_S: Tensor
    seq_lens_S: Tensor
    query_starts_S1: Tensor
    spans_T: Tensor
    block_offsets_T: Tensor


class StepShape(NamedTuple):
    """What the host says of a step, in numbers that kernels are launched by.

    num_fed: tokens that come from the device, of those decoding. max_query_len, max_seq_len: upper bounds.
    """

    num_fed: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    all_greedy: bool
    any_filter: bool


class BatchBuilder:
    """Builds StepBatches, in launch order, and keeps the rows up to date as it goes.

    num_groups: blocks that a span of block_size positions takes, one for each layer group. max_spans: of a row. slots:
    of adapters; None where no row has one.
    """

    def __init__(
        self,
        rows: RowTable,
        controls: ControlTable,
        device: StepDevice,
        block_size: int,
        num_groups: int = 1,
        slots: AdapterSlots | None = None,
    ) -> None:
        self._rows = rows
        self._controls = controls
        self._device = device
        self.block_size = block_size
        self._num_groups = num_groups
        self.max_spans = rows.width // num_groups
        self._slots = slots

    def build(self, plan: StepPlan, made: MadeDrafts | None = None) -> StepBatch | None:
        """Apply the plan's row changes, and lay its slices out as tensors; None where there is no slice.

        made: by the plan's drafting.
        """
        self._controls.set_up(plan.inits)
        if not plan.slices:
            self.apply_changes(plan)
            return None
        changes = self._rows.stage(plan)
        order, num_fed, num_decodes = _order(plan.slices)
        host = self.lay_out(plan.slices, order, num_fed, changes)
        controls = self._controls.batch(host.sampled_rows_N, host.banned_NC)
        on_device = Uploads[Tensor].of(self._device.upload(host.arrays()))
        self._rows.apply(on_device.cleared_I, on_device.entries_U, on_device.blocks_U)
        drafts = upload_drafts(plan.slices, self._device)
        if drafts is not None and made is not None:
            tokens = host.sampled_tokens_N, on_device.token_ids_T
            fill_in(made, drafts, plan.slices, tokens, self._device)
        return replace(
            self.batch_of(on_device, _shape(host, num_fed, num_decodes)),
            controls=controls,
            sampled_targets=self._sampled_targets(plan.slices),
            prompt_targets=self._prompt_targets(plan.slices, order, host.query_starts_S1),
            drafts=drafts,
            token_runs=self._token_runs(plan.slices, order, host.query_starts_S1),
            lora=None if self._slots is None else self._slots.batch(host.rows_S, np.diff(host.query_starts_S1)),
        )

    def batch_of(self, on_device: Uploads[Tensor], shape: StepShape) -> StepBatch:
        """The batch of arrays that were uploaded; the tokens that are fed are written to them."""
        num_fed = shape.num_fed
        if num_fed:
            on_device.token_ids_T[:num_fed] = self._rows.last_token_R.index_select(0, on_device.rows_S[:num_fed])
        return StepBatch(
            token_ids_T=on_device.token_ids_T,
            positions_T=on_device.positions_T,
            attention=self.attention(
                Places(
                    on_device.rows_S,
                    on_device.seq_lens_S,
                    on_device.query_starts_S1,
                    on_device.spans_T,
                    on_device.block_offsets_T,
                ),
                num_decodes=shape.num_decodes,
                max_query_len=shape.max_query_len,
                max_seq_len=shape.max_seq_len,
            ),
            sampled_tokens_N=on_device.sampled_tokens_N,
            sampled_rows_N=on_device.sampled_rows_N,
            sampling=SamplingBatch(
                columns_S=on_device.columns_N,
                positions_S=on_device.sampled_positions_N,
                banned_SC=on_device.banned_NC if on_device.banned_NC.numel() else None,
                all_greedy=shape.all_greedy,
                any_filter=shape.any_filter,
            ),
            rows_S=on_device.rows_S,
        )

    def is_plain(self, plan: StepPlan) -> bool:
        """Whether parameters alone say which tokens come next in these rows, of which none has an adapter."""
        new = {init.row: init for init in plan.inits}
        is_plain, is_controlled = self._rows.is_plain, self._controls.has
        for piece in plan.slices:
            row, first = piece.row, piece.start + piece.num_tokens - max(piece.num_samples, 1) + 1
            if not (new[row].is_plain(first) if row in new else is_plain(row, first) and not is_controlled(row)):
                return False
        return True

    def take_in(self, plan: StepPlan) -> None:
        """What a plan changes of the rows, where its batch is built elsewhere."""
        self._controls.set_up(plan.inits)
        self.apply_changes(plan)

    def apply_changes(self, plan: StepPlan) -> None:
        """Only the plan's row changes."""
        changes = self._rows.stage(plan)
        if self._device.is_host:
            self._rows.write(changes)
        else:
            self._rows.apply(*self._device.upload(changes))

    def _sampled_targets(self, slices: Sequence[SeqSlice]) -> tuple[SampledTargets, ...]:
        if not self._rows.scores_any:
            return ()
        wanted_N = [self._rows.scored(piece.row) for piece in slices for _ in range(piece.num_samples)]
        parts: dict[tuple[bool, bool], list[tuple[int, int, tuple[int, ...]]]] = {}
        for place, wanted in enumerate(wanted_N):
            if wanted is not None:
                num_top, named_ids = wanted
                kind = bool(named_ids), num_top > DEFAULT_MAX_LOGPROBS  # few do not pay for many
                parts.setdefault(kind, []).append((place, num_top, named_ids))
        targets = []
        for part in parts.values():
            places, num_top_G, named = zip(*part, strict=True)
            arrays = np.array(places, np.int64), padded(named, 0)
            targets.append(SampledTargets(places, num_top_G, *self._device.upload(arrays)))
        return tuple(targets)

    def _prompt_targets(
        self, slices: Sequence[SeqSlice], order: list[int], query_starts_S1: Array
    ) -> PromptTargets | None:
        """The i-th token of a slice predicts its i-th target."""
        scored = [i for i, piece in enumerate(slices) if piece.target_ids]
        if not scored:
            return None
        starts = dict(zip(order, query_starts_S1.tolist(), strict=False))
        tokens = [starts[i] + k for i in scored for k in range(len(slices[i].target_ids))]
        targets = [target_id for i in scored for target_id in slices[i].target_ids]
        tokens_G, targets_G = self._device.upload([np.array(tokens, np.int64), np.array(targets, np.int64)])
        return PromptTargets(
            num_top=tuple(self._rows.num_prompt_logprobs(slices[i].row) for i in scored),
            target_ids=tuple(slices[i].target_ids for i in scored),
            tokens_G=tokens_G,
            targets_G=targets_G,
        )

    def _token_runs(self, slices: Sequence[SeqSlice], order: list[int], query_starts_S1: Array) -> tuple[TokenRun, ...]:
        if not self._rows.per_token:
            return ()
        starts = dict(zip(order, query_starts_S1.tolist(), strict=False))
        places = accumulate((piece.num_samples for piece in slices), initial=0)
        return tuple(
            TokenRun(
                row=piece.row,
                start=starts[i],
                end=starts[i] + piece.num_tokens,
                is_first=piece.start == 0,
                place=place if piece.num_samples else None,
            )
            for i, (piece, place) in enumerate(zip(slices, places, strict=False))
            if piece.row in self._rows.per_token
        )

    def lay_out(
        self, slices: Sequence[SeqSlice], order: list[int], num_fed: int, changes: RowChanges
    ) -> Uploads[Array]:
        """Every array of the step, on the host. order: of the slices in the batch, those that are fed first."""
        rows_S = np.array([slices[i].row for i in order], np.int64)
        starts_S = np.array([slices[i].start for i in order], np.int64)
        lens_S = np.array([slices[i].num_tokens for i in order], np.int64)
        query_starts_S1 = np.zeros(len(order) + 1, np.int64)
        np.cumsum(lens_S, out=query_starts_S1[1:])
        token_ids = [0] * num_fed
        for i in order[num_fed:]:
            token_ids.extend(slices[i].token_ids)

        positions_T = np.arange(len(token_ids)) + np.repeat(starts_S - query_starts_S1[:-1], lens_S)
        spans_T, block_offsets_T = np.divmod(positions_T, self.block_size)
        sampled = [i for i, piece in enumerate(slices) if piece.num_samples]
        place_in_batch = np.empty(len(order), np.int64)
        place_in_batch[order] = np.arange(len(order))
        own_N, back_N = num_samples_back(slices, sampled)
        sampled_N = place_in_batch[sampled][own_N]
        sampled_rows_N = rows_S[sampled_N]
        sampled_positions_N = (starts_S + lens_S)[sampled_N] - back_N
        samplings: RowSamplings = self._rows.samplings(sampled_rows_N, sampled_positions_N)
        return Uploads[Array](
            np.array(token_ids, np.int64),
            positions_T,
            np.repeat(rows_S * self.max_spans, lens_S) + spans_T,
            block_offsets_T,
            rows_S,
            (starts_S + lens_S).astype(np.int32),
            query_starts_S1.astype(np.int32),
            query_starts_S1[1:][sampled_N] - 1 - back_N,
            sampled_rows_N,
            sampled_positions_N,
            samplings.banned_NC,
            *changes,
            samplings.columns_N,
        )

    def attention(self, places: Places, *, num_decodes: int, max_query_len: int, max_seq_len: int) -> AttentionBatch:
        """Slots and block tables, gathered from the rows on the device."""
        table_RM, num_groups = self._rows.block_table_RM, self._num_groups
        num_entries = -(-max_seq_len // self.block_size) * num_groups
        table_SM = table_RM[:, :num_entries].index_select(0, places.rows_S)
        blocks_TG = table_RM.view(-1, num_groups).index_select(0, places.spans_T)
        batch = AttentionBatch(
            num_decodes=num_decodes,
            slots_T=add(places.block_offsets_T, blocks_TG[:, 0], alpha=self.block_size),
            block_table_SM=table_SM,
            seq_lens_S=places.seq_lens_S,
            query_starts_S1=places.query_starts_S1,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        return batch if num_groups == 1 else self._per_group(batch, places.block_offsets_T, blocks_TG)

    def _per_group(self, batch: AttentionBatch, block_offsets_T: Tensor, blocks_TG: Tensor) -> AttentionBatch:
        """The batch with the slots and tables of each layer group taken out of those of all."""
        num_groups = self._num_groups
        slots_GT = add(block_offsets_T, blocks_TG.t().contiguous(), alpha=self.block_size)
        table_GSM = batch.block_table_SM.unflatten(1, (-1, num_groups)).movedim(2, 0).contiguous()  # type: ignore[no-untyped-call]  # torch has none
        groups = tuple(
            replace(batch, slots_T=slots_T, block_table_SM=table_SM)
            for slots_T, table_SM in zip(slots_GT, table_GSM, strict=True)
        )
        return replace(groups[0], groups=groups)


def _order(slices: Sequence[SeqSlice]) -> tuple[list[int], int, int]:
    """Indices of the slices in batch order, how many are fed from the device, and how many have one token."""
    fed: list[int] = []
    single: list[int] = []
    longer: list[int] = []
    for i, piece in enumerate(slices):
        if not piece.token_ids:
            assert piece.num_tokens == 1, f"only one token can be on the device: {piece}"
            fed.append(i)
            continue
        assert len(piece.token_ids) == piece.num_tokens, f"a slice brings its tokens: {piece}"
        (single if piece.num_tokens == 1 else longer).append(i)
    return fed + single + longer, len(fed), len(fed) + len(single)


def _shape(host: Uploads[Array], num_fed: int, num_decodes: int) -> StepShape:
    sampling = RowSamplings(host.columns_N, host.banned_NC)
    all_greedy = sampling.all_greedy
    return StepShape(
        num_fed=num_fed,
        num_decodes=num_decodes,
        max_query_len=int(np.diff(host.query_starts_S1).max()),
        max_seq_len=int(host.seq_lens_S.max()),
        all_greedy=all_greedy,
        any_filter=not all_greedy and sampling.any_filter,
    )
