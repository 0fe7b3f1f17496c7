"""Captures beside steps in flight, on a model of a GPU: what is captured where, what a failure leaves, what stays.

Designs that are wrong are here too (`OnTheStepStream`, the smallest graph first; in test_swapper.py swap space from
torch's pinned allocator), and tests show that the model finds them: one on which nothing can fail would prove nothing.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from aserve.core.plan import StepPlan
from aserve.models.interface import CausalLM
from aserve.runner.cuda import TorchCuda
from aserve.runner.device import CudaDevice
from aserve.runner.graph_device import CudaGraphDevice, GraphDevice
from aserve.runner.graph_keys import FILTERED, GREEDY, KINDS, GraphKey, capture_order
from aserve.runner.graphs import CAPTURE_AFTER
from aserve.runner.runner import ModelRunner
from tests.runner.fake_allocators import FakeDeviceAllocator, MiB
from tests.runner.fake_cuda import FakeCuda, FakeCudaError, FakeStream
from tests.runner.recordable import RecordableLM, recordable_runner
from tests.runner.toy import chunk, fed, init, until

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


class OnTheStepStream:
    """Captures on the stream that steps run on, and ends every capture alike: wrong in both."""

    num_bytes = 0

    def __init__(self, gpu: FakeCuda) -> None:
        self._gpu = gpu
        self._pool = gpu.graph_pool()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = self._gpu.graph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph.replay


Design = Callable[[FakeCuda], GraphDevice]


class World:
    """A runner's thread, its waiter and a model of one number, on the device: what they do in any order.

    A step takes an array, adds it to the state and brings the state back. A graph triples the state and adds one.
    """

    def __init__(self, design: Design) -> None:
        self.gpu = FakeCuda()
        self.device = CudaDevice(CPU, self.gpu)
        self.graphs = design(self.gpu)
        self._state = torch.zeros(3, dtype=torch.int64)
        self._expected = 0
        self._flying: deque[tuple[Callable[[], Any], int]] = deque()
        self._uploads: list[list[Tensor]] = []
        self._replay: Callable[[], None] | None = None

    def act(self, name: str, *meanwhile: str) -> None:
        with torch.inference_mode(), self.device.stepping():
            getattr(self, name)(*meanwhile)

    def launch(self) -> None:
        value = self._expected % 1000 + 7
        uploads = self.device.upload([np.full(3, value), np.full(40, 1.0, np.float32)])
        self._state.add_(uploads[0]).remainder_(10007)
        self._expected = (self._expected + value) % 10007
        self._uploads.append(uploads)
        self._flying.append((self.device.download([self._state + 0, uploads[1].sum()[None]]), self._expected))

    def land(self) -> None:
        """In the waiter thread, which also frees the buffers of the step."""
        if self._flying:
            with self.gpu.as_thread("waiter"):
                wait, expected = self._flying.popleft()
                assert wait() == [[expected] * 3, [40.0]]
                del wait

    def free(self) -> None:
        """The uploads of the oldest step, which may not have run yet."""
        if self._uploads:
            del self._uploads[0]

    def advance(self) -> None:
        self.gpu.advance(self.device._stream)

    def capture(self, *meanwhile: str) -> None:
        todo = list(meanwhile)

        def between() -> None:
            while todo:
                with self.gpu.as_thread("waiter"):
                    getattr(self, todo.pop())()

        self.gpu.on_captured = between
        try:
            self._replay = self.graphs.capture(self._triple)
        finally:
            self.gpu.on_captured = lambda: None

    def _triple(self) -> None:
        self._state.mul_(3).add_(1).remainder_(10007)

    def replay(self) -> None:
        if self._replay is not None:
            self._replay()
            self._expected = (3 * self._expected + 1) % 10007

    def close(self) -> None:
        """All lands, and nothing is left in either allocator."""
        while self._flying:
            self.act("land")
        self._uploads.clear()
        self.device.drain()
        self.graphs = self._replay = None
        self.device.release()
        assert self.gpu.device.captures_underway == []
        assert (self.gpu.device.reserved_bytes, self.gpu.host.reserved_bytes) == (0, 0)


def play(design: Design, actions: Iterable[tuple[str, ...]]) -> None:
    world = World(design)
    for action in actions:
        world.act(*action)
    world.close()


WAITER = st.sampled_from(["land", "advance", "free"])
ACTIONS = st.lists(
    st.one_of(
        st.sampled_from([("launch",), ("launch",), ("land",), ("advance",), ("replay",), ("free",)]),
        st.lists(WAITER, max_size=3).map(lambda meanwhile: ("capture", *meanwhile)),
    ),
    max_size=24,
)
RACE = [("launch",), ("launch",), ("capture", "land"), ("launch",), ("land",), ("replay",), ("launch",)]
"""A step lands, and its buffers are freed, while a graph is captured; the next one needs a buffer."""


def test_a_step_may_land_while_a_graph_is_captured() -> None:
    play(CudaGraphDevice, RACE)
    with pytest.raises(FakeCudaError, match="last recorded in a capturing stream"):
        play(OnTheStepStream, RACE)


def test_no_number_of_engines_has_one_capture_on_the_stream_of_another() -> None:
    """torch hands 32 streams out in turn: the 33rd is the first, on which buffers were copied."""

    def after_31_others(gpu: FakeCuda) -> GraphDevice:
        others = {gpu.stream() for _ in range(31)}
        assert len(others) == 31
        return CudaGraphDevice(gpu)

    play(after_31_others, RACE)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_steps_land_and_graphs_are_captured_in_any_order(actions: list[tuple[str, ...]]) -> None:
    play(CudaGraphDevice, actions)


def test_random_orders_find_captures_on_the_step_stream() -> None:
    def fails(actions: list[tuple[str, ...]]) -> bool:
        try:
            play(OnTheStepStream, actions)
        except FakeCudaError:
            return True
        return False

    rng = random.Random(0)
    names = ["launch", "launch", "land", "advance", "replay", "free"]
    random_actions = [
        [
            ("capture", *rng.choices(["land", "advance", "free"], k=2)) if rng.random() < 0.2 else (rng.choice(names),)
            for _ in range(20)
        ]
        for _ in range(30)
    ]
    assert sum(map(fails, random_actions)) > 5


def prompts(num_rows: int) -> StepPlan:
    """Prompts of three tokens, with blocks for 13 more."""
    blocks = [range(1 + 4 * row, 5 + 4 * row) for row in range(num_rows)]
    chunks = tuple(chunk(row, 0, [row + 1] * 3, *blocks[row]) for row in range(num_rows))
    return StepPlan(0, chunks, tuple(init(row) for row in range(num_rows)))


def decode(num_rows: int, step: int) -> StepPlan:
    return StepPlan(1 + step, tuple(fed(row, 3 + step) for row in range(num_rows)))


def runner_on(design: Design | None, gpu: FakeCuda, model: CausalLM | None = None) -> ModelRunner:
    """Without a design, on the CPU."""
    if design is None:
        return recordable_runner(None, model=model)
    return recordable_runner(design(gpu), device=CudaDevice(CPU, gpu), model=model)


def tokens_of(design: Design | None, gpu: FakeCuda) -> list[tuple[int, ...]]:
    """Two rows' tokens, ten steps. When the first graph is captured, the step before it is in flight, and lands."""
    runner = runner_on(design, gpu)
    plans = [prompts(2), *(decode(2, step) for step in range(10))]

    def land_meanwhile() -> None:
        """In the runner's thread, at the first launch that is captured: the waiter lands the step before."""
        gpu.on_captured = lambda: None
        num_frees = gpu.host.num_frees
        gpu.go()
        until(lambda: gpu.host.num_frees > num_frees)

    try:
        results = [landed(runner.launch(plan)) for plan in plans[:CAPTURE_AFTER]]
        gpu.on_captured = land_meanwhile
        gpu.hold()
        flying = [runner.launch(plan) for plan in plans[CAPTURE_AFTER:]]
        return results + [landed(flight) for flight in flying]
    finally:
        gpu.go()
        runner.close()


def landed(flight: Any) -> tuple[int, ...]:
    outcome = flight._landed.result(timeout=60)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome.token_ids


def test_a_runner_captures_while_its_waiter_lands_a_step() -> None:
    gpu = FakeCuda()
    assert tokens_of(CudaGraphDevice, gpu) == tokens_of(None, FakeCuda())
    assert gpu.num_replays == 8
    assert (gpu.device.reserved_bytes, gpu.host.reserved_bytes) == (0, 0)
    with pytest.raises(FakeCudaError, match="last recorded in a capturing stream"):
        tokens_of(OnTheStepStream, FakeCuda())


class ReadingLM(RecordableLM):
    """Reads a number back in the midst of a step, which only a capture forbids."""

    def forward(self, token_ids_T: Tensor, *others: Any) -> Tensor:
        assert token_ids_T.sum().item() >= 0
        return super().forward(token_ids_T, *others)


def tokens_read(design: Design | None, gpu: FakeCuda) -> list[tuple[int, ...]]:
    """The same by `ReadingLM`, one step at a time."""
    runner = runner_on(design, gpu, ReadingLM())
    try:
        return [runner.run(plan).token_ids for plan in (prompts(2), *(decode(2, step) for step in range(10)))]
    finally:
        runner.close()


def test_a_failed_capture_tells_its_first_error_and_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeCuda()
    assert tokens_read(CudaGraphDevice, gpu) == tokens_read(None, FakeCuda())
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "CUDA graphs are off" in record.message
    assert "cudaStreamSynchronize" in record.message
    assert gpu.num_replays == 0
    assert gpu.device.captures_underway == []
    assert (gpu.device.reserved_bytes, gpu.host.reserved_bytes) == (0, 0)


def test_a_capture_that_is_ended_as_if_it_had_not_failed_hides_its_error_and_breaks_the_allocator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu = FakeCuda()
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT FAILED"):  # as the runner is closed
        tokens_read(OnTheStepStream, gpu)
    assert "previous error during capture" in caplog.text
    assert "cudaStreamSynchronize" not in caplog.text
    assert gpu.device.captures_underway != []


@pytest.mark.parametrize("in_cuda", [True, False])
def test_after_a_failed_capture_the_next_one_works_and_memory_is_found_when_it_runs_short(in_cuda: bool) -> None:
    gpu = FakeCuda(device_bytes=60 * MiB)
    graphs, stream = CudaGraphDevice(gpu), gpu.stream()
    x = torch.zeros(3)

    def fail() -> None:
        if in_cuda:
            x.add_(1).sum().item()
        raise RuntimeError("of our own")

    with torch.inference_mode(), gpu.on(stream):
        with pytest.raises(RuntimeError, match="cudaStreamSynchronize" if in_cuda else "of our own"):
            graphs.capture(fail)
        gpu.device.free(gpu.device.malloc(40 * MiB, stream))
        gpu.device.free(gpu.device.malloc(50 * MiB, stream))  # which those 40 make room for
        replay = graphs.capture(partial(x.add_, 1))
        replay()
        replay()
    stream.synchronize()
    assert x.tolist() == [2, 2, 2]


def test_a_capture_without_memory_is_given_up() -> None:
    gpu = FakeCuda(device_bytes=MiB)
    graphs, stream = CudaGraphDevice(gpu), gpu.stream()
    with torch.inference_mode(), gpu.on(stream), pytest.raises(torch.OutOfMemoryError):
        graphs.capture(lambda: torch.zeros(3) + 1)
    assert gpu.device.captures_underway == []


def pool_bytes(keys: Iterable[GraphKey]) -> list[int]:
    """What the pool holds after each capture: of Qwen3's logits, in 16 bits, and of what sampling makes of them."""
    allocator, stream, pool = FakeDeviceAllocator(2**45), FakeStream(FakeCuda()), "the graphs' pool"
    sizes = []
    for key in keys:
        bucket, kind = key.bucket, key.kind
        logits = bucket * 151_936
        copies = (2, 4) if kind.all_greedy else (2, 4, 4) if not kind.any_filter else (2, 4, 4, 4)
        allocator.begin_allocate_to_pool(pool, lambda: True)
        blocks = [allocator.malloc(width * logits, stream) for width in copies]
        blocks += [allocator.malloc(bucket * 4096 * 2, stream) for _ in range(4)]
        for block in blocks:
            allocator.free(block)
        allocator.end_allocate_to_pool(pool)
        sizes.append(allocator.pool_bytes(pool))
    return sizes


def test_the_pool_of_all_graphs_is_as_large_as_that_of_the_first() -> None:
    """A graph that is larger than those before it gets memory of its own, and theirs is of no use to it."""
    order = [*capture_order(256, 40_000), GraphKey(256, 8192, FILTERED), GraphKey(100, 32_768, FILTERED)]
    sizes = pool_bytes(order)
    assert sizes[-1] <= 1.02 * sizes[0]
    smallest_first = sorted(order, key=lambda key: (key.bucket, key.max_seq_len, -KINDS.index(key.kind)))
    assert pool_bytes(smallest_first)[-1] > 4 * sizes[-1]


def test_the_first_graphs_stand_in_for_all_others() -> None:
    order = list(capture_order(36, 40_000))
    assert len(order) == len(set(order)) == len(KINDS) + 8 * len(KINDS[1:])
    masking, first, second, third = order[: len(KINDS)]
    assert all(masking.covers(key) for key in order)
    assert all(first.covers(key) for key in order[1:])
    assert first.covers(GraphKey(30, 8192, GREEDY))
    assert [key for key in order if second.covers(key)] == [key for key in order if not key.kind.any_filter]
    assert [key for key in order if third.covers(key)] == [key for key in order if key.kind.all_greedy]
    assert not any(key.covers(masking) for key in order[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_step_lands_while_a_graph_is_captured() -> None:
    """The same on a device: a step that takes a twentieth of a second lands, and its buffers go, within the capture."""
    torch_device = torch.device("cuda", torch.cuda.current_device())
    device, graphs = CudaDevice(torch_device), CudaGraphDevice(TorchCuda(torch_device))
    state, results = torch.zeros(3, device=torch_device), []
    with torch.inference_mode(), device.stepping():

        def launch() -> None:
            [ids] = device.upload([np.full(3, 7)])
            waits = [device.download([ids + state.long()])]
            device.when_landed(lambda: results.append(waits.pop()()))

        def work() -> None:
            state.add_(1)
            until(lambda: len(results) == 1)

        torch.cuda._sleep(100_000_000)
        launch()
        replay = graphs.capture(work)
        for _ in range(3):
            replay()
            launch()
    device.drain()
    device.release()
    assert results == [[[7 + k] * 3] for k in range(4)]
