"""What the runner asks of CUDA and of torch's allocators: streams, events, pinned memory, graphs, page-locking.

A seam. `TorchCuda` is torch's own, and says what each call is there; tests put a model of a GPU in its place
(tests/runner/fake_cuda.py), on which captures, landings and frees can be put in any order.
"""

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

PoolId = Any
"""torch's name for a pool of memory that graphs share."""


class Event(Protocol):
    """A mark in a stream."""

    def record(self, stream: Any) -> None:
        """Put the mark behind all that the stream has been given."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come to it. Raises what the device raised."""
        ...


class Graph(Protocol):
    """What a stream was given between begin and end, as one launch."""

    def capture_begin(self, pool: PoolId, capture_error_mode: str) -> None:
        """From now on the current stream records, and runs nothing."""
        ...

    def capture_end(self) -> None:
        """The current stream runs again. Raises RuntimeError where something forbidden was recorded."""
        ...

    def replay(self) -> None:
        """Give all of it to the current stream."""
        ...


class Cuda(Protocol):
    """One GPU. Streams are torch.cuda.Stream, or have its methods."""

    def stream(self, *, apart: bool = False) -> Any:
        """A stream. There are 32 of a kind in a process, which are handed out in turn, and then again.

        apart: of a kind that nothing else here asks for, so that it is no other engine's stream either.
        """
        ...

    def current_stream(self) -> Any:
        """That of this thread."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside it, this thread's work goes to the stream."""
        ...

    def event(self, *, blocking: bool = False) -> Event:
        """A new event. blocking: whoever waits for it sleeps, and does not spin."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of torch's caching host allocator, for a step's inputs and outputs.

        Sizes are rounded up to powers of two. As a block is freed, an event is recorded on every stream that it was
        copied on; when these have passed it is used again. It is kept until `release_cached`.
        """
        ...

    def graph(self) -> Graph:
        """A new graph."""
        ...

    def graph_pool(self) -> PoolId:
        """A new pool of memory for graphs that never run at the same time."""
        ...

    def pool_bytes(self, pool: PoolId) -> int:
        """Device memory that a pool holds."""
        ...

    def forget_capture(self, pool: PoolId) -> None:
        """Have the device allocator take a capture into this pool for over, which `capture_end` could not do."""
        ...

    def page_lock(self, tensor: Tensor) -> Callable[[], None]:
        """Lock the pages of host memory, so that the device copies to and from them by itself; the result unlocks them.

        Raises RuntimeError where the system refuses.
        """
        ...

    def release_cached(self) -> None:
        """Give back what both caching allocators, of the device and of pinned memory, hold and nobody uses."""
        ...


class TorchCuda:
    """A `Cuda` by torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self, *, apart: bool = False) -> Any:
        """As the Protocol says: torch pools streams by priority (c10/cuda/CUDAStream.cpp)."""
        return torch.cuda.Stream(self._device, priority=-1 if apart else 0)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        """As the Protocol says."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """As the Protocol says."""
        return torch.cuda.stream(stream)

    def event(self, *, blocking: bool = False) -> Event:
        """As the Protocol says."""
        return torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As the Protocol says."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def graph(self) -> Graph:
        """As the Protocol says."""
        return torch.cuda.CUDAGraph()

    def graph_pool(self) -> PoolId:
        """As the Protocol says."""
        return torch.cuda.graph_pool_handle()

    def pool_bytes(self, pool: PoolId) -> int:
        """As the Protocol says."""
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(pool))  # type: ignore[no-untyped-call]

    def forget_capture(self, pool: PoolId) -> None:
        """By what torch.cuda.use_mem_pool ends with; torch has no public call for a capture that has failed."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)

    def page_lock(self, tensor: Tensor) -> Callable[[], None]:
        """cudaHostRegister, which locks whole pages: nothing else may lie in the tensor's first and last."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        start, num_bytes = tensor.data_ptr(), tensor.nbytes
        assert start % mmap.PAGESIZE == 0, "page-locked memory begins with a page"
        _check(cudart, cudart.cudaHostRegister(start, num_bytes, 0))

        def unlock() -> None:
            _check(cudart, cudart.cudaHostUnregister(start))

        return unlock

    def release_cached(self) -> None:
        """As the Protocol says."""
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # which torch.cuda.empty_cache does not do


def _check(cudart: Any, status: Any) -> None:
    """Raises RuntimeError for what is no success of the CUDA runtime."""
    if int(status) != 0:
        raise RuntimeError(f"CUDA error: {cudart.cudaGetErrorString(status)} ({int(status)})")
