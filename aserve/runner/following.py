"""What ranks but the first make of a step: all of the forward pass, their part of the logits, and no token.

Rank 0 samples, for it alone has the rows' masks and all logits, and broadcasts what it has sampled within the step. So
a follower's rows know their last tokens as rank 0's do, and the next step may be launched before this one has landed.
It needs neither penalties nor scores: `followed` takes out of a plan what only sampling reads.

Letters: kernels/ops.py and rows.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import torch
from torch import Tensor

from aserve.core.ids import Row
from aserve.core.plan import RowControls, RowInit, SeqSlice, StepPlan
from aserve.models.interface import CausalLM
from aserve.models.sharding import Group
from aserve.runner.batch import StepBatch
from aserve.runner.sampler import Sampled, record
from aserve.runner.scoring import join_score_prompt
from aserve.runner.step import EagerStep, StepOutput, sampled_from, wanted
from aserve.runner.verification import MadeDrafts, count_accepted

CONTROLLED: Final = RowControls()
"""In the place of controls: a graph takes no row that has some, on any rank."""


@dataclass(frozen=True, slots=True)
class FollowingStep:
    """A `Step` beside rank 0's `EagerStep`, from which it learns what was sampled."""

    own: EagerStep
    group: Group

    @property
    def model(self) -> CausalLM:
        """This rank's share of it."""
        return self.own.model

    def execute(self, batch: StepBatch) -> StepOutput:
        """The forward pass, and this rank's part in the sampling after it."""
        if not self.own.model.spec.has_head:  # rank 0 pools, and may need every hidden state
            self.forward(batch)
            return StepOutput(batch.sampled_rows_N, (), None)
        wanted_N = wanted(batch)
        hidden_TE = self.forward(batch, wanted_N)
        if batch.prompt_targets is not None:
            join_score_prompt(self.own.model, hidden_TE, batch.prompt_targets)
        if not len(batch.sampled_rows_N):
            return StepOutput(batch.sampled_rows_N, (), None)
        sampled = self.sample(sampled_from(hidden_TE, wanted_N, batch), batch)
        return StepOutput(sampled.ids_N, (), None, sampled.num_accepted_S)

    def forward(self, batch: StepBatch, wanted_N: Tensor | None = None) -> Tensor:
        """As `EagerStep.forward`."""
        return self.own.forward(batch, wanted_N)

    def sample(self, hidden_NE: Tensor, batch: StepBatch) -> Sampled:
        """Its part of the logits to rank 0, and the token ids back."""
        self.own.model.logits(hidden_NE)
        ids_N = torch.empty_like(batch.sampled_rows_N)
        self.group.broadcast(ids_N)
        last_token_N = ids_N.clamp(min=0)
        num_accepted_S = None if batch.drafts is None else count_accepted(ids_N, batch.drafts)
        record(last_token_N, num_accepted_S, self.own.rows.last_token_R, batch)
        return Sampled(ids_N, (), num_accepted_S)


class DraftMaker(Protocol):
    """Makes a plan's drafts, in the runner's thread."""

    def make(self, steps: Sequence[StepPlan]) -> MadeDrafts:
        """Of a plan's `drafting`."""
        ...


class SharedDrafts:
    """Drafts for all ranks: rank 0's draft model makes them, alone, for two ranks might round differently.

    own: that model; None on the other ranks. num_rows, most: of the draft model's.
    """

    def __init__(self, group: Group, own: DraftMaker | None, num_rows: int, most: int, device: torch.device) -> None:
        self._group = group
        self._own = own
        self._ids_RJ = torch.zeros((num_rows, most), dtype=torch.int64, device=device)

    def make(self, steps: Sequence[StepPlan]) -> MadeDrafts:
        """As `DraftModel.make`, on all ranks."""
        if self._own is not None:
            made = self._own.make(steps)
        else:
            made = MadeDrafts(self._ids_RJ, {piece.seq_id: piece.row for piece in steps[0].slices})
        self._group.broadcast(made.ids_RJ)
        return made


def followed(plan: StepPlan) -> StepPlan:
    """A plan without what rank 0 alone needs: masks, controls, what makes drafts."""
    if not plan.inits and not plan.drafting:
        return plan
    inits = tuple(map(_followed_row, plan.inits))
    drafting = tuple(
        StepPlan(step.step_id, tuple(SeqSlice(piece.seq_id, piece.row, 0, 0) for piece in step.slices))
        for step in plan.drafting[:1]
    )
    return msgspec.structs.replace(plan, inits=inits, drafting=drafting)


def _followed_row(init: RowInit) -> RowInit:
    sampling = init.sampling
    is_scored = sampling.controls is not None or sampling.num_logprobs is not None
    if init.mask is None and not is_scored:
        return init
    sampling = msgspec.structs.replace(
        sampling, controls=CONTROLLED if is_scored else None, num_logprobs=None, named_ids=()
    )
    return msgspec.structs.replace(init, mask=None, sampling=sampling)


def masked_rows(plan: StepPlan) -> tuple[Row, ...]:
    """The rows that are set up with a mask."""
    return tuple(init.row for init in plan.inits if init.mask is not None)
