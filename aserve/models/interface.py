"""What the runner asks of a model, whichever way it is implemented. Shape letters: kernels/ops.py."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from aserve.kernels.ops import AttentionBatch, KVLayer
from aserve.models.spec import ModelSpec


class CausalLM(Protocol):
    """A decoder over the paged cache. Holds weights and nothing of a step; every argument of a step is passed."""

    spec: ModelSpec

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv: Sequence[KVLayer], batch: AttentionBatch) -> Tensor:
        """Hidden states of the step's tokens, [T, E], after the final norm. Writes the step's keys and values to kv."""
        ...

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Next-token scores of chosen hidden states, [S, V], in the type that the model computes in."""
        ...
