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
    are computed with which adapter; None where none is. wanted_N: int64, the tokens whose hidden states will be read: a
    model need not compute those of the others. None for all.
    """

    positions_T: Tensor
    attention: AttentionBatch
    lora: LoraBatch | None = None
    wanted_N: Tensor | None = None


class CausalLM(Protocol):
    """A decoder over the paged cache. Holds weights and nothing of a step; every argument of a step is passed."""

    spec: ModelSpec

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        """Hidden states of the step's tokens, [T, E], after the final norm. Writes the step's keys and values to kv.

        Of tokens that are not wanted they may be anything.
        """
        ...

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Next-token scores of chosen hidden states, [S, V], in the type that the model computes in."""
        ...
