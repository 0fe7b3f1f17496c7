"""PooledStep: a forward pass of a decoder, and vectors of its hidden states in place of sampled tokens.

    last     the hidden state that a slice which samples ends on
    mean     of all positions: sums of each chunk are kept by row until the last one has come
    cls      of the first position, kept by row likewise

Of a row each of whose tokens has a vector (`RowInit.per_token`) all hidden states are kept until the last one has come.

The head that vectors go through is the model's own: models/pooler_head.py. Shape letters: kernels/ops.py and rows.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from aserve.core.ids import Row
from aserve.core.pooling import PoolingMethod
from aserve.kernels.ops import NO_TOKEN
from aserve.models.pooler_head import PoolerHead
from aserve.runner.batch import StepBatch
from aserve.runner.step import EagerStep, StepOutput


class Pools(NamedTuple):
    """How hidden states are pooled."""

    method: PoolingMethod
    head: PoolerHead


class PooledStep:
    """Executes a StepBatch of a model that pools; what of it is a forward pass is the other step's."""

    def __init__(self, step: EagerStep, pools: Pools) -> None:
        self._step = step
        self._method, self._head = pools
        table_RM = step.rows.block_table_RM
        num_kept = 0 if self._method == "last" else table_RM.shape[0]
        self._kept_RE = torch.zeros(num_kept, step.model.spec.hidden_size, device=table_RM.device)
        """Of rows whose prompt is under way: the sum of their hidden states, or the first of them."""
        self._states: dict[Row, list[Tensor]] = {}

    def execute(self, batch: StepBatch) -> StepOutput:
        """The forward pass, and what its hidden states are pooled to."""
        hidden_TE = self._step.forward(batch)
        if self._method == "last":
            pooled_NE = hidden_TE.index_select(0, batch.sampled_tokens_N)
        else:
            self._keep(hidden_TE, batch)
            pooled_NE = self._kept_RE.index_select(0, batch.sampled_rows_N)
            if self._method == "mean":
                num_positions_N = batch.positions_T.index_select(0, batch.sampled_tokens_N) + 1
                pooled_NE = pooled_NE / num_positions_N[:, None]
        vectors_NO = self._head(pooled_NE)
        ids_N = marked(vectors_NO)
        token_vectors = self._of_tokens(hidden_TE, batch)
        for place, vectors_TO in token_vectors.items():
            ids_N[place] = marked(vectors_TO).amin()
        return StepOutput(ids_N, (), None, vectors_NO=vectors_NO, token_vectors=token_vectors)

    def _of_tokens(self, hidden_TE: Tensor, batch: StepBatch) -> dict[int, Tensor]:
        """Of sequences that end here and have a vector for each token: these, [its tokens, O], by their place in N."""
        found = {}
        for row in self._states.keys() - self._step.rows.per_token:
            del self._states[row]  # somebody else's by now
        for run in batch.token_runs:
            states = self._states[run.row] = [] if run.is_first else self._states[run.row]
            states.append(hidden_TE[run.start : run.end].clone())  # the next step's may lie there
            if run.place is not None:
                found[run.place] = self._head(torch.cat(self._states.pop(run.row)))
        return found

    def _keep(self, hidden_TE: Tensor, batch: StepBatch) -> None:
        assert batch.rows_S is not None, "the builder says whose slices these are"
        starts_S1 = batch.attention.query_starts_S1.long()
        rows_T = batch.rows_S.repeat_interleave(starts_S1.diff())
        first_T = batch.positions_T == 0
        if self._method == "mean":
            begun_S = batch.rows_S[first_T[starts_S1[:-1]]]
            self._kept_RE.index_fill_(0, begun_S, 0.0)
            self._kept_RE.index_add_(0, rows_T, hidden_TE.float())
        else:
            self._kept_RE.index_copy_(0, rows_T[first_T], hidden_TE[first_T].float())


def marked(vectors_NO: Tensor) -> Tensor:
    """What stands for tokens: [N], 0, and NO_TOKEN for a vector that is not finite."""
    return torch.where(vectors_NO.isfinite().all(-1), 0, NO_TOKEN)
