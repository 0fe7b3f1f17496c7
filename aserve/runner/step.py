"""EagerStep: a forward pass and the sampling after it, kernel by kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from aserve.kernels.ops import KVLayer, Ops, Scores
from aserve.models.interface import CausalLM, ForwardBatch
from aserve.models.sharding import Group
from aserve.runner.batch import StepBatch
from aserve.runner.rows import RowTable
from aserve.runner.sampler import Sampled, sample_next
from aserve.runner.scoring import score_prompt
from aserve.runner.step_calls import StepCalls


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Sampled token ids, int64 [N], in the plan's order (see `sample_next`), and scores where they were asked for.

    num_accepted_S: of each slice that samples, how many of its drafts; None in a step without drafts.
    vectors_NO: what a model that pools made of each sequence, float32; None of one that generates.
    token_vectors: of each token of some of these sequences, [its tokens, O], by their place in N.
    """

    ids_N: Tensor
    scores: tuple[Scores, ...]
    prompt_scores: Scores | None
    num_accepted_S: Tensor | None = None
    vectors_NO: Tensor | None = None
    token_vectors: Mapping[int, Tensor] = field(default_factory=dict)


class Step(Protocol):
    """What executes StepBatches, whole or in two parts."""

    @property
    def model(self) -> CausalLM:
        """Which is computed."""
        ...

    def execute(self, batch: StepBatch) -> StepOutput:
        """The forward pass, and what is sampled and scored after it."""
        ...

    def forward(self, batch: StepBatch, wanted_N: Tensor | None = None) -> Tensor:
        """Hidden states of the tokens that are wanted, [N, E], or of all, [T, E], until the next step.

        Writes the KV cache.
        """
        ...

    def sample(self, hidden_NE: Tensor, batch: StepBatch) -> Sampled:
        """What comes next, by the hidden states of the tokens that are sampled from."""
        ...


@dataclass(frozen=True, slots=True)
class EagerStep:
    """A `Step`, kernel by kernel.

    group: whose other ranks learn what is sampled, where there are any. calls: by which forward passes are made,
    where that can be without the Python between kernels.
    """

    model: CausalLM
    ops: Ops
    kv: Sequence[KVLayer]
    rows: RowTable
    group: Group | None = None
    calls: StepCalls | None = None

    def execute(self, batch: StepBatch) -> StepOutput:
        """The forward pass, and what is sampled and scored after it."""
        wanted_N = wanted(batch)
        hidden_TE = self.forward(batch, wanted_N)
        prompt_scores = None
        if batch.prompt_targets is not None:
            prompt_scores = score_prompt(self.model, self.ops, hidden_TE, batch.prompt_targets)
        if not len(batch.sampled_rows_N):
            return StepOutput(batch.sampled_rows_N, (), prompt_scores)
        sampled = self.sample(sampled_from(hidden_TE, wanted_N, batch), batch)
        return StepOutput(sampled.ids_N, sampled.scores, prompt_scores, sampled.num_accepted_S)

    def forward(self, batch: StepBatch, wanted_N: Tensor | None = None) -> Tensor:
        """As of `Step`."""
        seen = ForwardBatch(batch.positions_T, batch.attention, batch.lora, wanted_N)
        hidden_NE = None if self.calls is None else self.calls.forward(batch.token_ids_T, seen)
        return self.model.forward(batch.token_ids_T, self.kv, seen) if hidden_NE is None else hidden_NE

    def sample(self, hidden_NE: Tensor, batch: StepBatch) -> Sampled:
        """As `sample_next`."""
        sampled = sample_next(self.model, self.ops, hidden_NE, self.rows.last_token_R, batch)
        if self.group is not None:
            self.group.broadcast(sampled.ids_N)
        return sampled


def wanted(batch: StepBatch) -> Tensor | None:
    """The tokens whose hidden states a step reads once it has run, int64 [N]; None where these may be all.

    All are read where prompts are scored. Adapters say for every token which of them it takes, and so need all too.
    """
    is_all = len(batch.sampled_tokens_N) == len(batch.token_ids_T)
    if is_all or batch.prompt_targets is not None or batch.lora is not None:
        return None
    return batch.sampled_tokens_N


def sampled_from(hidden: Tensor, wanted_N: Tensor | None, batch: StepBatch) -> Tensor:
    """The hidden states that something is sampled from, [N, E]: those that were wanted, or of all the step's tokens."""
    return hidden.index_select(0, batch.sampled_tokens_N) if wanted_N is None else hidden
