"""DraftModel: a small model that makes a step's drafts, in the runner's thread and on its stream, before the step.

Its rows, blocks and steps are the small model's own (drafting/draft_model.py); what it samples never leaves the device:

    draft_ids_RJ   [rows of the draft model, drafts at most]     the i-th step of a plan's drafting writes column i

Letters: rows.py and verification.py; D drafts that a step reads from there.
"""

from collections.abc import Sequence

import torch

from aserve.core.ids import Row, SeqId
from aserve.core.plan import StepPlan
from aserve.kernels.ops import Ops
from aserve.models.interface import CausalLM
from aserve.runner.batch import BatchBuilder
from aserve.runner.controls import ControlTable
from aserve.runner.device import StepDevice
from aserve.runner.kv_store import KVStore
from aserve.runner.rows import RowTable
from aserve.runner.steady import SteadyBuilder
from aserve.runner.step import EagerStep
from aserve.runner.step_calls import step_calls
from aserve.runner.threads import StepThreads, measure_flops_per_thread
from aserve.runner.verification import MadeDrafts


class DraftModel:
    """The small model, its memory and its rows. Used by the runner's thread alone, in launch order.

    num_rows, max_model_len: how many sequences it knows, and how long each may get. most: drafts of each in a step.
    device: that of the runner, whose stream it shares.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        kv: KVStore,
        device: StepDevice,
        *,
        num_rows: int,
        max_model_len: int,
        most: int,
    ) -> None:
        torch_device = kv.planes_YBX.device
        rows = RowTable(num_rows, -(-max_model_len // kv.block_size), torch_device)
        controls = ControlTable(num_rows, model.spec.vocab_size, torch_device, device)
        self._builder = SteadyBuilder(BatchBuilder(rows, controls, device, kv.block_size), rows)
        self._step = EagerStep(model, ops, kv.layers, rows, calls=step_calls(model, ops, kv.layers))
        self._threads = StepThreads(model.spec, measure_flops_per_thread())
        self._draft_ids_RJ = torch.zeros((num_rows, most), dtype=torch.int64, device=torch_device)

    def make(self, steps: Sequence[StepPlan]) -> MadeDrafts:
        """Compute a plan's `drafting`. Where logits are not finite the draft is token 0, as good as any."""
        rows: dict[SeqId, Row] = {}
        for place, step in enumerate(steps):
            with self._threads.of(step.num_tokens):
                batch = self._builder.build(step)
                assert batch is not None, "a step of drafting has slices"
                output = self._step.execute(batch)
                self._draft_ids_RJ[:, place].index_copy_(0, batch.sampled_rows_N, output.ids_N.clamp(min=0))
            rows.update((piece.seq_id, piece.row) for piece in step.slices if not place)
        return MadeDrafts(self._draft_ids_RJ, rows)
