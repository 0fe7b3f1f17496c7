"""What the runner asks of a model, whichever way it is implemented. Shape letters: kernels/ops.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aserve.kernels.ops import AttentionBatch, KVLayer, LoraBatch
from aserve.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step's T tokens as every layer sees them. It is passed on whole: what a capability needs more is a field here.

    positions_T: int64, of each token in its sequence. attention: where their keys and values lie. lora: which of them
    are computed with which adapter; None where none is. wanted_N: int64, those whose hidden states are asked for; None
    for all.
    """

    positions_T: Tensor
    attention: AttentionBatch
    lora: LoraBatch | None = None
    wanted_N: Tensor | None = None

    def wanted(self, hidden_TE: Tensor) -> Tensor:
        """Of the hidden states of all tokens those that are asked for."""
        return hidden_TE if self.wanted_N is None else hidden_TE.index_select(0, self.wanted_N)


class CausalLM(Protocol):
    """A decoder over the paged cache. Holds weights and nothing of a step; every argument of a step is passed."""

    spec: ModelSpec

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        """Hidden states of the tokens that are wanted, [N, E], after the final norm. Writes the step's keys and values
        to kv.
        """
        ...

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Next-token scores of chosen hidden states, [S, V], in the type that the model computes in."""
        ...
