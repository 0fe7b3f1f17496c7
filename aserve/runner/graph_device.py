"""What records launches and repeats them: CUDA's graphs, captured on a stream of their own and replayed on the step's.

A capture records what its stream is given, whoever gives it. While the step stream itself was captured, earlier steps
landed, in another thread, and their pinned buffers were freed; torch's host allocator then recorded, on each stream
that a buffer was copied on, the event that says when it may be used again. Such an event belongs to the capture: asked
whether it has passed it raises (cudaErrorCapturedEvent), and the next step that needs a pinned buffer asks. On a stream
that is used for nothing but captures no buffer was ever copied, so no event is recorded on it.

    step stream     |==== step 2, in flight ====|                     |== replay ==|
    capture stream           |-- recorded, not run --|
    waiter                                    step 2 lands, its buffers are freed: an event on the step stream

Sources: torch 2.13, ATen/core/CachingHostAllocator.h (free, process_events), ATen/cuda/CUDAGraph.cpp.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import torch

from aserve.runner.cuda import Cuda, Graph, TorchCuda

_FAILED: Final[list[Graph]] = []
"""Graphs whose capture failed, for as long as the process lives. See `CudaGraphDevice._abandon`."""

_FLOPS_OF_A_LARGE_SM: Final = 4.5e12
"""Of Hopper and Blackwell in data centres: an H200 computes prompts at some 600 TFLOP/s."""
_FLOPS_OF_AN_SM: Final = 1.5e12
"""Of others: an A100 has 312 TFLOP/s in 108 processors, an L4 121 in 58, by their datasheets."""

_log = logging.getLogger(__name__)


class GraphDevice(Protocol):
    """What can record launches and repeat them."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` launches, without running it. The result launches it again, on the same memory.

        Raises RuntimeError where `work` does what a graph cannot, such as waiting for the device, or has no memory:
        the first error, and as if nothing had been recorded.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Device memory that the graphs hold together."""
        ...


class CudaGraphDevice:
    """CUDA's graphs. Only for one thread; others may go on using the device.

    Graphs share their memory, since they run one after the other: the pool grows where a capture needs more than is
    free in it, and never shrinks. So the largest is to be captured first.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._stream = cuda.stream(apart=True)
        self._pools = [cuda.graph_pool()]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """As the Protocol says. Replays go to the stream that is current then.

        Not by torch.cuda.graph, which waits for the device and gives all cached memory back.
        """
        graph = self._cuda.graph()
        with self._cuda.on(self._stream):
            try:
                graph.capture_begin(pool=self._pools[-1], capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph.replay

    def _abandon(self, graph: Graph) -> None:
        """End a capture that failed, in CUDA and in torch's allocators.

        `capture_end` does it where only `work` raised. Where CUDA has refused something, it takes the stream out of the
        capture and raises before it tells the allocators. The device allocator would then free nothing when memory runs
        short, and fail an assertion where it is told to (`empty_cache`): it is told by `forget_capture`. The host
        allocator of torch 2.13 keeps a reference to the graph, which it would follow at each later capture of this
        process: the graph is kept too, a few bytes. A pool without graphs is not to be captured into any more.
        """
        try:
            graph.capture_end()
        except RuntimeError as error:  # the second error; the first one is being raised
            _log.debug("ending a failed capture: %s", error)
            with suppress(RuntimeError):  # the allocators know already, or were never told that it began
                self._cuda.forget_capture(self._pools[-1])
                _FAILED.append(graph)
        self._pools.append(self._cuda.graph_pool())

    @property
    def num_bytes(self) -> int:
        """As the Protocol says."""
        return sum(map(self._cuda.pool_bytes, self._pools))


class Captures:
    """Captures the steps of a runner until one fails; from then on none.

    must_not_fail: other ranks capture the same, and could not know that this one goes on without.
    """

    def __init__(self, graph_device: GraphDevice, *, must_not_fail: bool = False) -> None:
        self._graph_device = graph_device
        self._must_not_fail = must_not_fail
        self._num_graphs = 0
        self.are_on = True

    def capture(self, key: object, work: Callable[[], None]) -> Callable[[], None] | None:
        """Capture what `work` launches; None, and a line in the log, where it fails, and after that.

        It is run once before, which compiles its kernels, so it must leave no trace. key: for the log.
        """
        if not self.are_on:
            return None
        try:
            work()
            replay = self._graph_device.capture(work)
        except RuntimeError as error:  # of CUDA: memory, or a model that waits for the device
            if self._must_not_fail:
                raise
            self.are_on = False
            _log.warning(
                "CUDA graphs are off, but for the %d that there are: steps run kernel by kernel, since capturing %s "
                "failed: %s",
                self._num_graphs,
                key,
                str(error),  # an error holds on to the tensors of the step
            )
            return None
        self._num_graphs += 1
        return replay


def matrix_flops(device: torch.device) -> float:
    """Operations a second in products of 16 bits, about, as they come in a model; 0 for a CPU, which has no graphs."""
    if device.type != "cuda":
        return 0.0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * (_FLOPS_OF_A_LARGE_SM if properties.major in (9, 10) else _FLOPS_OF_AN_SM)


def graph_device(device: torch.device) -> GraphDevice | None:
    """What records the steps of a device; None for a CPU, which has no launches to save."""
    return CudaGraphDevice(TorchCuda(device)) if device.type == "cuda" else None
