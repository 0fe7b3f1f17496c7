"""ModelRunner: computes plans, in launch order, in a thread of its own.

All state of a step (rows, KV cache, weights) belongs to that thread, so there is nothing to lock. Knows when a step is
built, executed and landed; how is the business of batch.py, step.py and device.py.
"""

import gc
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol

import torch
from msgspec.structs import replace as replace_fields

from aserve.core.faults import log_fault
from aserve.core.graph_sizes import GraphSizes
from aserve.core.ids import AdapterId, Row
from aserve.core.plan import StepPlan, StepResult
from aserve.core.speculation import StepSeconds
from aserve.kernels.ops import Ops
from aserve.models.interface import CausalLM
from aserve.models.lora import LoraLayers
from aserve.models.sharding import ALONE, Shard
from aserve.runner.adapters import AdapterSlots
from aserve.runner.batch import BatchBuilder
from aserve.runner.controls import ControlTable
from aserve.runner.costs import MemoryCosts, measure_costs, measure_drafting
from aserve.runner.device import StepDevice, step_device
from aserve.runner.failures import SkippedStepError, out_of_memory
from aserve.runner.flight import Landed, LateLanding, StepFlight, result_of
from aserve.runner.following import DraftMaker, FollowingStep
from aserve.runner.graph_device import GraphDevice
from aserve.runner.graphs import DecodeGraphs
from aserve.runner.kv_store import KVStore, Pages
from aserve.runner.masks import MaskMaker
from aserve.runner.plain_steps import PlainSteps, plain_steps
from aserve.runner.pooling import PooledStep, Pools
from aserve.runner.readback import Readback
from aserve.runner.rows import RowTable
from aserve.runner.steady import SteadyBuilder
from aserve.runner.step import EagerStep, Step
from aserve.runner.step_calls import step_calls
from aserve.runner.swapper import BlockMover
from aserve.runner.threads import StepThreads, measure_flops_per_thread, way_giver
from aserve.runner.verification import MadeDrafts
from aserve.runner.warm_up import BLANK, AnyToken, adapted_plan, sign_of_life, warm_up_plans

IDLE_S: Final = 0.05
"""Nothing was launched for so long: time to capture a graph, for which a step that comes now waits some 20 ms."""
TAKEN_BYTES: Final = 128 * 2**20
"""Of a KV cache in host memory: so much is taken from the system before it is needed; see `Pages`."""


_log = logging.getLogger(__name__)


class Followers(Protocol):
    """The ranks besides this one, which do what its thread does, in the same order. They are told before it does it.

    Raises `RankLostError` where one of them is gone.
    """

    def run(self, plan: StepPlan, *, recovers: bool) -> None:
        """Compute a step; recovers: with a group made anew, after one that failed."""
        ...

    def drop(self, adapter: AdapterId) -> None:
        """Forget an adapter."""
        ...

    def capture(self) -> None:
        """Capture the graphs of start-up."""
        ...

    def check(self) -> None:
        """Raise what another rank has failed of since the last recovery: what a step has brought is worth nothing then.

        A call of the group that is given up on a device raises nothing there; it leaves whatever is in memory.
        """
        ...

    def cause_of(self, error: BaseException) -> BaseException:
        """What made a step fail here, if another rank failed first; else this error. May wait a moment."""
        ...


class ModelRunner:
    """A `Runner` for one device.

    kv: its tensors say the block size and the device.
    max_num_seqs, max_model_len: how many rows there are, and how long each may grow.
    num_host_blocks: room for blocks that are swapped out.
    graph_device: captures decoding steps; None runs every step kernel by kernel.
    device: how steps reach it; None for that of the cache's tensors.
    lora: where the model's adapters lie; None where rows have none.
    pools: how hidden states are pooled; None where tokens are sampled.
    shard: which rank this is, where several compute the model. followers: on rank 0 the others.
    """

    def __init__(  # noqa: PLR0913  (each a part that is chosen elsewhere, half of them with a default)
        self,
        model: CausalLM,
        ops: Ops,
        kv: KVStore,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        graph_device: GraphDevice | None = None,
        device: StepDevice | None = None,
        lora: LoraLayers | None = None,
        pools: Pools | None = None,
        shard: Shard = ALONE,
        followers: Followers | None = None,
    ) -> None:
        torch_device = kv.planes_YBX.device
        self._block_size = kv.block_size
        self._kv: KVStore | None = kv
        self._max_model_len, self._max_num_seqs, self._num_host_blocks = max_model_len, max_num_seqs, num_host_blocks
        max_spans = -(-max_model_len // self._block_size) * kv.num_groups
        # The row after those of sequences pads captured batches, and is that of a sign of life.
        self._rows = rows = RowTable(max_num_seqs + 1, max_spans, torch_device)
        self._device = device or step_device(torch_device)
        self._shard, self._followers = shard, followers
        num_sharing = shard.size if self._device.is_host else 1
        self._threads = StepThreads(model.spec, measure_flops_per_thread(), num_sharing, way_giver(ops))
        controls = ControlTable(max_num_seqs, model.spec.vocab_size, torch_device, self._device)
        self._slots = slots = None if lora is None else AdapterSlots(lora, rows, self._device)
        builder = BatchBuilder(rows, controls, self._device, self._block_size, kv.num_groups, slots)
        self._late = late = LateLanding()
        own = EagerStep(model, ops, kv.layers, rows, shard.group, step_calls(model, ops, kv.layers, shard, late.tell))
        is_follower = shard.group is not None and shard.rank > 0
        step: Step = own if shard.group is None or not is_follower else FollowingStep(own, shard.group)
        quick: DecodeGraphs | PlainSteps | None = None if pools else plain_steps(own, builder)
        if graph_device is not None:
            with self._device.stepping():  # its buffers are filled on the stream that reads them
                parts = graph_device, self._device, rows, builder, step
                quick = DecodeGraphs(*parts, max_model_len, slots, in_lockstep=shard.group is not None)
        self._stages: tuple[BlockMover, SteadyBuilder, Step | PooledStep, DecodeGraphs | PlainSteps | None] | None = (
            BlockMover(ops, kv, self._device, num_host_blocks),
            SteadyBuilder(builder, rows),
            step if pools is None or is_follower else PooledStep(own, pools),
            quick,
        )
        self._reads_back = not is_follower
        self._tells_late = own.calls is not None and graph_device is None
        self._draft_model: DraftMaker | None = None
        self._vocab_size = model.spec.vocab_size
        self._masks = MaskMaker(self._vocab_size, self._device)
        self._sign_of_life = sign_of_life(Row(max_num_seqs), kv.num_groups)
        self._halted = False
        """Set by a step that fails, for those behind it: they stand on rows that it may not have set up."""
        self._num_submitted = 0
        """Steps so far; written by whoever launches."""
        self._submitted = threading.Event()
        self._fills_in = False
        """Whether graphs or pages may be missing, that are to be captured or taken while nothing is to do."""
        self._pages: Pages | None = Pages(kv.planes_YBX, TAKEN_BYTES)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="aserve-runner")

    @property
    def graph_sizes(self) -> GraphSizes | None:
        """Of the steps with prompts that are graphs; None without graphs."""
        graphs = None if self._stages is None else self._stages[3]
        return graphs.mixed_sizes if isinstance(graphs, DecodeGraphs) else None

    def launch(self, plan: StepPlan) -> StepFlight:
        """Start a step and return at once. What it raises comes out of `land`, and of those behind it."""
        return StepFlight(self._submit(plan))

    def recover(self) -> StepFlight:
        """As the Protocol says."""
        return StepFlight(self._submit(self._sign_of_life, recovers=True))

    def follow(self, plan: StepPlan, masked: Collection[Row] = (), *, recovers: bool) -> Landed:
        """`launch` and `recover` of a rank that follows, of which nobody awaits a token.

        masked: rows that rank 0 masks; here they need to be known only where graphs are chosen by it.
        """
        if masked and self._stages is not None and self._stages[3] is not None:
            mask = AnyToken(self._vocab_size)
            inits = (replace_fields(init, mask=mask) if init.row in masked else init for init in plan.inits)
            plan = replace_fields(plan, inits=tuple(inits))
        return self._submit(plan, recovers=recovers)

    def draft_with(self, make: Callable[[StepDevice], DraftMaker]) -> None:
        """Have plans' drafts made by what `make` makes for the device that steps run on. Before the first `launch`."""
        with self._device.stepping():
            self._draft_model = make(self._device)

    def load(self, adapter: AdapterId, folder: str) -> None:
        """Read an adapter, as `AdapterStore` says. Raises `AdapterError`."""
        assert self._slots is not None, "the runner takes no adapters"
        self._slots.read(adapter, folder)

    def drop(self, adapter: AdapterId) -> None:
        """Forget an adapter, behind the steps that were launched, as `AdapterStore` says."""
        slots = self._slots
        if slots is not None:  # else all has been given back
            with suppress(RuntimeError):  # the runner is being closed: its thread takes no more
                self._worker.submit(self._drop, slots, adapter)

    def _drop(self, slots: AdapterSlots, adapter: AdapterId) -> None:
        """In the runner's thread: other ranks are told of it between the same steps."""
        if self._followers is not None:
            self._followers.drop(adapter)
        slots.drop(adapter)

    def run(self, plan: StepPlan) -> StepResult:
        """`launch` and wait, blocking: for start-up, before there is an event loop to keep free."""
        return result_of(self._submit(plan).result())

    def warm_up(self) -> None:
        """Run the first calls of everything, so that no request pays for them. Blocking, before the first `launch`."""
        compiles = self._device.compiles
        for plan in warm_up_plans(
            self._max_model_len,
            self._block_size,
            self._vocab_size,
            max_num_seqs=self._max_num_seqs,
            compiles=compiles,
            can_swap=self._num_host_blocks > 0,
        ):
            self.run(plan)
        if self._slots is not None:
            self.take_blank()
            self.run(adapted_plan(self._block_size))
            self.drop(BLANK)
        self.capture()
        self._fills_in = True
        self._fill_in_while_idle(self._num_submitted)

    def take_blank(self) -> None:
        """Have the adapter that changes nothing, for the warm-up."""
        if self._slots is not None:
            self._slots.add_blank()

    def capture(self) -> None:
        """Capture what start-up captures. Blocking."""
        if self._stages is not None and self._stages[3] is not None:
            if self._followers is not None:
                self._followers.capture()
            self._worker.submit(self._with_graphs, DecodeGraphs.capture_at_start_up).result()

    def capture_largest(self) -> None:
        """Capture the largest graphs only, whose memory all others share. Blocking."""
        self._worker.submit(self._with_graphs, DecodeGraphs.capture_largest).result()

    def measure_costs(self) -> MemoryCosts:
        """What moving blocks and computing tokens anew cost. Blocking, after `warm_up`; needs room to swap to."""
        return measure_costs(
            self.run,
            max_model_len=self._max_model_len,
            block_size=self._block_size,
            num_host_blocks=self._num_host_blocks,
        )

    def measure_drafting(self, num_drafts: int) -> StepSeconds:
        """What steps of the draft model take, of which a plan has so many at most. Blocking, after `warm_up`."""
        return measure_drafting(self.run, num_rows=self._max_num_seqs, num_drafts=num_drafts)

    def close(self) -> None:
        """Wait for launched steps, then give back threads, weights and KV memory. Idempotent."""
        self._num_submitted += 1  # nobody is idle any more
        self._submitted.set()
        self._worker.shutdown(wait=True)
        self._late.tell()
        self._masks.close()
        self._device.drain()  # before tensors go: torch hands their memory to whoever asks next, steps or no steps
        if self._stages is not None:
            self._stages[0].close()
        self._stages = self._kv = self._slots = self._pages = self._draft_model = None
        gc.collect()  # modules point at each other; their memory should not wait for the collector's turn
        self._device.release()

    def _submit(self, plan: StepPlan, *, recovers: bool = False) -> Landed:
        landed: Landed = Future()
        self._num_submitted += 1
        self._worker.submit(self._run, plan, landed, self._num_submitted, recovers=recovers)
        self._submitted.set()
        return landed

    def _run(self, plan: StepPlan, landed: Landed, number: int, *, recovers: bool) -> None:
        """One step, in the worker thread. Every way out resolves `landed`, or its reader would wait for ever."""
        if not _begins_at_once(plan):
            self._late.tell()
        try:
            self._begin(plan, recovers=recovers)
            readback = self._compute(plan, landed)
        except BaseException as error:  # the edge of a thread
            self._late.tell()
            self._failed(landed, error)
            return
        self._late.tell()

        def land() -> None:
            try:
                result = StepResult(plan.step_id, ()) if readback is None else readback.result()
                if self._followers is not None:
                    self._followers.check()
            except BaseException as error:  # the edge of a thread
                self._failed(landed, error)
                return
            if self._tells_late and number != self._num_submitted:
                self._late.keep(landed, result)
            else:
                landed.set_result(result)
                self._threads.give_way()
                self._fill_in_while_idle(number)

        self._device.when_landed(land)

    def _begin(self, plan: StepPlan, *, recovers: bool) -> None:
        """See that a step may be computed, on all ranks."""
        assert self._stages is not None, "the runner is closed"
        if recovers:
            self._device.release()
            self._halted = False
        if self._halted:
            raise SkippedStepError("the step before it failed")
        if self._followers is not None:
            self._followers.run(plan, recovers=recovers)
        if recovers and self._shard.group is not None:
            self._shard.group.join()

    def _compute(self, plan: StepPlan, landed: Landed) -> Readback | None:
        """Launch a step on the device. None where nothing is to be read back of it."""
        assert self._stages is not None, "the runner is closed"
        mover, builder, step, quick = self._stages
        with torch.inference_mode(), self._device.stepping(), self._threads.of(plan.num_tokens):
            masks = self._masks.start(plan, landed)
            if plan.block_ops is not None:
                mover.move(plan.block_ops)
            made = self._make_drafts(plan)
            masked = None if masks is None else masks.made
            output = None if quick is None else quick.execute(plan, masked)
            batch = None
            if output is None:
                batch = builder.build(plan, made)
            else:
                builder.forget()
            if batch is not None:
                output = step.execute(batch if masked is None else replace(batch, masks=masked))
            return Readback(plan, batch, output, self._device) if output is not None and self._reads_back else None

    def _make_drafts(self, plan: StepPlan) -> MadeDrafts | None:
        if not plan.drafting:
            return None
        assert self._draft_model is not None, "a model makes drafts"
        return self._draft_model.make(plan.drafting)

    def _fill_in_while_idle(self, number: int) -> None:
        """Have what is missing filled in, piece by piece, until a step follows that of this number."""
        if self._fills_in and number == self._num_submitted:
            with suppress(RuntimeError):  # the runner is being closed: its thread takes no more
                self._worker.submit(self._fill_in, number)

    def _fill_in(self, number: int) -> None:
        """A graph, or pages; in the worker thread, which a step that comes wakes up at once."""
        self._submitted.clear()
        if number != self._num_submitted or self._submitted.wait(IDLE_S):
            return
        try:
            while self._pages is not None and self._pages.take_next():
                if number != self._num_submitted:
                    return
            is_alone = self._shard.group is None  # else all ranks would have to capture now
            self._fills_in = is_alone and bool(self._with_graphs(DecodeGraphs.capture_next))
            self._fill_in_while_idle(number)
        except BaseException as error:  # the edge of a thread
            self._fills_in = False
            log_fault(_log, "filling in while idle", error)

    def _with_graphs(self, act: Callable[[DecodeGraphs], object]) -> object:
        """What the graphs do besides steps, in the runner's thread and where steps run; None without graphs."""
        graphs = None if self._stages is None else self._stages[3]
        if not isinstance(graphs, DecodeGraphs):
            return None
        with torch.inference_mode(), self._device.stepping():
            return act(graphs)

    def _failed(self, landed: Landed, error: BaseException) -> None:
        self._halted = True
        if self._shard.group is not None and not isinstance(error, SkippedStepError):
            self._shard.group.leave()  # or the others would wait in it for this one
            if self._followers is not None:
                error = self._followers.cause_of(error)
        landed.set_result(out_of_memory(error) or error)


def _begins_at_once(plan: StepPlan) -> bool:
    """Whether a step's kernels follow in a fraction of a millisecond: rows go on decoding, and nothing else is done."""
    only_decodes = all(piece.num_samples == piece.num_tokens for piece in plan.slices)
    return only_decodes and not plan.inits and plan.block_ops is None and not plan.drafting
