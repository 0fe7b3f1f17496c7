"""How a step's inputs reach the device and its tokens come back: at once on a CPU, by a stream of its own on CUDA.

Knows streams, pinned memory and events, and nothing of plans, rows or models.

    CUDA        worker thread | build t | copy in, kernels, copy out: enqueued | build t+1 | ...
                stream                  |===== copy in t, forward t, copy out t =====|== t+1 ==|
                waiter thread                                              event of t ^ -> the flight lands
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.runner.cuda import Cuda, TorchCuda

Array = NDArray[Any]
TORCH_DTYPES: Final = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}
ALIGNMENT_BYTES: Final = 16


class StepDevice(Protocol):
    """What differs between a CPU and a GPU in running a step. All but the last two are for the runner's thread."""

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled when they are first run, which takes seconds."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether steps run in the thread that launches them, on the cores that all other threads share."""
        ...

    def stepping(self) -> AbstractContextManager[Any]:
        """Inside it, work goes to the device's own stream."""
        ...

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Host arrays (int64, int32, float32; any shape) as device tensors; valid for this step only."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Any]]]:
        """Start copying tensors to the host; calling the result waits for them. Raises what the device raised."""
        ...

    def when_landed(self, task: Callable[[], None]) -> None:
        """Run a task that may wait for a download, in order, without holding up the next step."""
        ...

    def drain(self) -> None:
        """Wait for all that was started, and end threads: from then on no tensor is read or written. Idempotent."""
        ...

    def release(self) -> None:
        """Return memory that is cached. Idempotent."""
        ...


class CpuDevice:
    """The host itself: arrays are shared, not copied, and a step is over when its function returns."""

    compiles: Final = False
    is_host: Final = True

    def stepping(self) -> AbstractContextManager[Any]:
        """Nothing to enter."""
        return nullcontext()

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The same memory, seen as tensors."""
        return [torch.from_numpy(array) for array in arrays]

    def download(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Any]]]:
        """They are here already."""
        return lambda: [tensor.tolist() for tensor in tensors]

    def when_landed(self, task: Callable[[], None]) -> None:
        """Nothing to wait for: now."""
        task()

    def drain(self) -> None:
        """Nothing is under way."""

    def release(self) -> None:
        """Nothing is held."""


class CudaDevice:
    """One GPU, by a stream of its own. During a step nothing waits for the device, except the waiter thread."""

    compiles: Final = True
    is_host: Final = False

    def __init__(self, device: torch.device, cuda: Cuda | None = None) -> None:
        self._device = device
        self._cuda = cuda or TorchCuda(device)
        self._stream = self._cuda.stream()
        self._stream.wait_stream(self._cuda.current_stream())  # weights and caches were made there
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="aserve-waiter")

    def stepping(self) -> AbstractContextManager[Any]:
        """Kernels of this thread go to the own stream."""
        return self._cuda.on(self._stream)

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """One copy of one pinned buffer. torch's host allocator does not reuse it before that copy is done."""
        packed = self._cuda.pinned((packed_bytes(arrays),), torch.uint8)
        pack(arrays, packed)
        on_device = torch.empty(packed.shape, dtype=packed.dtype, device=self._device)
        return unpack(on_device.copy_(packed, non_blocking=True), arrays)

    def download(self, tensors: Sequence[Tensor]) -> Callable[[], list[list[Any]]]:
        """Copy into pinned memory behind the step's kernels, and an event behind the copies."""
        on_host = [self._cuda.pinned(tensor.shape, tensor.dtype) for tensor in tensors]
        for copy, tensor in zip(on_host, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        copied = self._cuda.event(blocking=True)
        copied.record(self._stream)

        def wait() -> list[list[Any]]:
            copied.synchronize()
            return [copy.tolist() for copy in on_host]

        return wait

    def when_landed(self, task: Callable[[], None]) -> None:
        """In the waiter thread, in order."""
        self._waiter.submit(task)

    def drain(self) -> None:
        """Waits for the stream too: a step that raised half-way has no download, and may be running all the same."""
        self._waiter.shutdown(wait=True)
        self._stream.synchronize()

    def release(self) -> None:
        """Memory that torch caches goes back to the GPU, and pinned memory to the system."""
        self._cuda.release_cached()


def packed_bytes(arrays: Sequence[Array]) -> int:
    """Bytes that `pack` needs."""
    return _offsets(arrays)[-1]


def pack(arrays: Sequence[Array], packed: Tensor) -> None:
    """Write the arrays' bytes into a uint8 tensor, one after the other, aligned."""
    *starts, _ = _offsets(arrays)
    memory = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def unpack(packed: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """Views of a packed tensor, with the types and shapes of the arrays that were packed."""
    *starts, _ = _offsets(arrays)
    return [
        packed[start : start + array.nbytes].view(TORCH_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def _offsets(arrays: Sequence[Array]) -> list[int]:
    """Where each array begins, and where the last one ends, in bytes."""
    return list(accumulate((-(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for array in arrays), initial=0))


def step_device(device: torch.device) -> StepDevice:
    """The StepDevice of a torch device."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()
