"""EagerStep: a forward pass and the sampling after it, kernel by kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from aserve.kernels.ops import KVLayer, Ops
from aserve.models.interface import CausalLM
from aserve.runner.batch import StepBatch
from aserve.runner.rows import RowTable
from aserve.runner.sampler import sample_next


@dataclass(frozen=True, slots=True)
class EagerStep:
    """Executes a StepBatch. A variant (a captured graph, say) is another class with this `execute`."""

    model: CausalLM
    ops: Ops
    kv: Sequence[KVLayer]
    rows: RowTable

    def execute(self, batch: StepBatch) -> Tensor:
        """Sampled token ids, int64 [N], in the plan's order; see `sample_next`. Writes the KV cache."""
        hidden_TE = self.model.forward(batch.token_ids_T, batch.positions_T, self.kv, batch.attention)
        if not len(batch.sampled_rows_N):
            return batch.sampled_rows_N
        return sample_next(self.model, self.ops, hidden_TE, self.rows.last_token_R, batch)
