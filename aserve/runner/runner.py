"""ModelRunner: computes plans, in launch order, in a thread of its own.

All state of a step (rows, KV cache, weights) belongs to that thread, so there is nothing to lock. Knows when a step is
built, executed and landed; how is the business of batch.py, step.py and device.py.
"""

import gc
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from aserve.core.ids import BlockId, Row, SeqId
from aserve.core.plan import RowInit, RowSampling, SeqSlice, StepPlan, StepResult
from aserve.kernels.ops import KVLayer, Ops
from aserve.models.interface import CausalLM
from aserve.runner.batch import BatchBuilder
from aserve.runner.device import step_device
from aserve.runner.flight import StepFlight
from aserve.runner.rows import RowTable
from aserve.runner.sampler import check_sampled
from aserve.runner.step import EagerStep


class ModelRunner:
    """A `Runner` for one device.

    kv: as made by `allocate_kv`; its tensors say the block size and the device.
    max_num_seqs, max_model_len: how many rows there are, and how long each may grow.
    """

    def __init__(
        self, model: CausalLM, ops: Ops, kv: Sequence[KVLayer], *, max_num_seqs: int, max_model_len: int
    ) -> None:
        cache = kv[0].k_BPKD
        block_size = cache.shape[1]
        rows = RowTable(max_num_seqs, -(-max_model_len // block_size), cache.device)
        self._device = step_device(cache.device)
        self._stages: tuple[BatchBuilder, EagerStep] | None = (
            BatchBuilder(rows, self._device, block_size),
            EagerStep(model, ops, kv, rows),
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="aserve-runner")

    def launch(self, plan: StepPlan) -> StepFlight:
        """Start a step and return at once. What it raises comes out of `land`; later steps are not affected."""
        return StepFlight(self._submit(plan))

    def run(self, plan: StepPlan) -> StepResult:
        """`launch` and wait, blocking: for start-up, before there is an event loop to keep free."""
        return self._submit(plan).result()

    def warm_up(self) -> None:
        """Run a two-token and a one-token step, so that the first request pays for no first call.

        They use row 0 and the null block, and leave nothing behind that a sequence could see.
        """
        row, seq_id, blocks = Row(0), SeqId(0), (BlockId(0),)
        filtered = RowSampling(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1, seed=0)
        prefill = SeqSlice(seq_id=seq_id, row=row, start=0, num_tokens=2, token_ids=(0, 0), samples=True)
        self.run(StepPlan(0, (prefill,), (RowInit(row, seq_id, filtered, blocks),)))
        greedy = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
        decode = SeqSlice(seq_id=seq_id, row=row, start=2, num_tokens=1, samples=True)
        self.run(StepPlan(1, (decode,), (RowInit(row, seq_id, greedy, blocks),)))

    def close(self) -> None:
        """Wait for launched steps, then give back threads, weights and KV memory. Idempotent."""
        self._worker.shutdown(wait=True)
        self._stages = None
        gc.collect()  # modules point at each other; their memory should not wait for the collector's turn
        self._device.close()

    def _submit(self, plan: StepPlan) -> Future[StepResult]:
        landed: Future[StepResult] = Future()
        self._worker.submit(self._run, plan, landed)
        return landed

    def _run(self, plan: StepPlan, landed: Future[StepResult]) -> None:
        """One step, in the worker thread. Every way out resolves `landed`, or its reader would wait for ever."""
        try:
            assert self._stages is not None, "the runner is closed"
            builder, step = self._stages
            with torch.inference_mode(), self._device.stepping():
                ids_N = step.execute(builder.build(plan))
                wait = self._device.download(ids_N)
        except BaseException as error:  # the edge of a thread
            landed.set_exception(error)
            return

        def land() -> None:
            try:
                landed.set_result(StepResult(plan.step_id, check_sampled(plan, wait())))
            except BaseException as error:  # the edge of a thread
                landed.set_exception(error)

        self._device.when_landed(land)
