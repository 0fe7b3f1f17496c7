"""ModelRunner: computes plans, in launch order, in a thread of its own.

All state of a step (rows, KV cache, weights) belongs to that thread, so there is nothing to lock. Knows when a step is
built, executed and landed; how is the business of batch.py, step.py and device.py.
"""

import gc
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from aserve.core.plan import StepPlan, StepResult
from aserve.kernels.ops import Ops
from aserve.models.interface import CausalLM
from aserve.runner.batch import BatchBuilder
from aserve.runner.controls import ControlTable
from aserve.runner.device import step_device
from aserve.runner.flight import StepFlight
from aserve.runner.kv_store import KVStore
from aserve.runner.landing import Landing
from aserve.runner.rows import RowTable
from aserve.runner.step import EagerStep
from aserve.runner.swapper import BlockMover
from aserve.runner.warm_up import warm_up_plans


class ModelRunner:
    """A `Runner` for one device.

    kv: its tensors say the block size and the device.
    max_num_seqs, max_model_len: how many rows there are, and how long each may grow.
    num_host_blocks: room for blocks that are swapped out.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        kv: KVStore,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_host_blocks: int = 0,
    ) -> None:
        device = kv.planes_YBX.device
        self._block_size = kv.block_size
        self._max_model_len = max_model_len
        self._num_host_blocks = num_host_blocks
        rows = RowTable(max_num_seqs, -(-max_model_len // self._block_size), device)
        self._device = step_device(device)
        controls = ControlTable(max_num_seqs, model.spec.vocab_size, device, self._device)
        self._stages: tuple[BlockMover, BatchBuilder, EagerStep] | None = (
            BlockMover(ops, kv, self._device, num_host_blocks),
            BatchBuilder(rows, controls, self._device, self._block_size),
            EagerStep(model, ops, kv.layers, rows),
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="aserve-runner")

    def launch(self, plan: StepPlan) -> StepFlight:
        """Start a step and return at once. What it raises comes out of `land`; later steps are not affected."""
        return StepFlight(self._submit(plan))

    def run(self, plan: StepPlan) -> StepResult:
        """`launch` and wait, blocking: for start-up, before there is an event loop to keep free."""
        return self._submit(plan).result()

    def warm_up(self) -> None:
        """Run the first calls of everything, so that no request pays for them. Blocking, before the first `launch`."""
        compiles = self._device.compiles
        for plan in warm_up_plans(
            self._max_model_len, self._block_size, compiles=compiles, can_swap=self._num_host_blocks > 0
        ):
            self.run(plan)

    def close(self) -> None:
        """Wait for launched steps, then give back threads, weights and KV memory. Idempotent."""
        self._worker.shutdown(wait=True)
        self._device.drain()  # before tensors go: torch hands their memory to whoever asks next, steps or no steps
        if self._stages is not None:
            self._stages[0].drain()
        self._stages = None
        gc.collect()  # modules point at each other; their memory should not wait for the collector's turn
        self._device.release()

    def _submit(self, plan: StepPlan) -> Future[StepResult]:
        landed: Future[StepResult] = Future()
        self._worker.submit(self._run, plan, landed)
        return landed

    def _run(self, plan: StepPlan, landed: Future[StepResult]) -> None:
        """One step, in the worker thread. Every way out resolves `landed`, or its reader would wait for ever."""
        try:
            assert self._stages is not None, "the runner is closed"
            mover, builder, step = self._stages
            with torch.inference_mode(), self._device.stepping():
                if plan.block_ops is not None:
                    mover.move(plan.block_ops)
                batch = builder.build(plan)
                landing = None if batch is None else Landing(plan, batch, step.execute(batch), self._device)
        except BaseException as error:  # the edge of a thread
            landed.set_exception(error)
            return

        def land() -> None:
            try:
                landed.set_result(StepResult(plan.step_id, ()) if landing is None else landing.result())
            except BaseException as error:  # the edge of a thread
                landed.set_exception(error)

        self._device.when_landed(land)
