"""A model of a GPU, of CUDA's streams, events and captures, and of torch's allocators: a `Cuda` that runs on a CPU.

What a thread gives a stream waits in its queue, tensors' functions and copies alike; nobody sees a result before the
device has come to it, which happens where something waits for an event or a stream, or the test says so (`advance`,
`hold`, `go`). What is captured is recorded and not run. So a buffer that is used again too early gives wrong numbers,
and what CUDA forbids raises what CUDA raises:

- an event recorded on a captured stream belongs to the capture. To query it or wait for it raises, and the capture is
  invalid, as it is after anything else that is forbidden;
- a capture that is invalid ends with an error, which hides from torch's allocators that it has ended;
- in a thread that captures (mode thread_local) to wait for anything is forbidden.

After torch 2.13.0 (ATen/cuda/CUDAGraph.cpp; for the allocators see fake_allocators.py) and the CUDA programming guide
on stream capture. Not modelled: priorities, other modes of capture, events between streams of which one is captured,
kernels that are longer than others.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.runner.fake_allocators import FakeDeviceAllocator, FakeHostAllocator

Work = Callable[[], None]
STREAMS_OF_A_KIND = 32
"""c10/cuda/CUDAStream.cpp hands them out in turn; kinds are priorities."""
aten = torch.ops.aten


class FakeCudaError(RuntimeError):
    """What CUDA refused."""


class Capture:
    """What a stream has been given since it began to be captured."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.is_invalid = False


class FakeStream:
    """A queue of work."""

    def __init__(self, gpu: "FakeCuda") -> None:
        self._gpu = gpu
        self.queue: deque[Work | FakeEvent] = deque()
        self.capture: Capture | None = None

    def give(self, work: "Work | FakeEvent") -> None:
        if self.capture is None:
            self.queue.append(work)
            return
        if self.capture.is_invalid:
            raise FakeCudaError("CUDA error: operation failed due to a previous error during capture")
        assert not isinstance(work, FakeEvent), "not modelled: a captured stream that waits for another"
        self.capture.works.append(work)

    def wait_event(self, event: "FakeEvent") -> None:
        if event.mark is not None:
            self.give(event.at_mark())

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> "FakeEvent":
        event = FakeEvent(self._gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._gpu.forbid("cudaStreamSynchronize")
        self.record_event().synchronize()


class FakeEvent:
    """mark: a list of one boolean, whether the stream has come to where the event was last recorded."""

    def __init__(self, gpu: "FakeCuda") -> None:
        self._gpu = gpu
        self.mark: list[bool] | None = None
        self.stream: FakeStream | None = None
        self._capture: Capture | None = None

    def at_mark(self) -> "FakeEvent":
        """Itself, as it is now, whatever is recorded later."""
        same = FakeEvent(self._gpu)
        same.mark, same.stream, same._capture = self.mark, self.stream, self._capture
        return same

    def record(self, stream: FakeStream) -> None:
        with self._gpu.lock:
            self.stream, self._capture = stream, stream.capture
            if stream.capture is None:
                mark = self.mark = [False]
                stream.give(lambda: mark.__setitem__(0, True))

    def query(self) -> bool:
        with self._gpu.lock:
            self._gpu.forbid("cudaEventQuery")
            self._refuse_captured()
            return self.mark is None or self.mark[0]

    def synchronize(self) -> None:
        self._gpu.forbid("cudaEventSynchronize")
        self._refuse_captured()
        if self.mark is not None and self.stream is not None:
            self._gpu.run(self.stream, self.mark)

    def _refuse_captured(self) -> None:
        if self._capture is not None:
            self._capture.is_invalid = True
            raise FakeCudaError("CUDA error: operation not permitted on an event last recorded in a capturing stream")


class FakeGraph:
    """As at::cuda::CUDAGraph: the allocators are told after CUDA has ended a capture, if it has."""

    def __init__(self, gpu: "FakeCuda") -> None:
        self._gpu = gpu
        self._works: list[Work] | None = None
        self._pool: Any = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        gpu, stream = self._gpu, self._gpu.current_stream()
        assert capture_error_mode == "thread_local", "not modelled"
        if stream is gpu.default_stream:
            raise FakeCudaError("CUDA graphs must be captured on a non-default stream")
        capture = Capture()
        gpu.device.begin_allocate_to_pool(pool, lambda: gpu.current_stream().capture is capture)
        stream.capture, self._pool = capture, pool
        gpu.state.captures.append(capture)

    def capture_end(self) -> None:
        stream = self._gpu.current_stream()
        capture, stream.capture = stream.capture, None
        if capture is None:
            raise FakeCudaError("CUDA error: operation not permitted: the stream is not captured")
        self._gpu.state.captures.remove(capture)
        if capture.is_invalid:
            raise FakeCudaError("CUDA error: operation failed due to a previous error during capture")
        self._gpu.device.end_allocate_to_pool(self._pool)
        self._works = capture.works
        weakref.finalize(self, self._gpu.device.release_pool, self._pool).atexit = False

    def replay(self) -> None:
        assert self._works is not None, "replayed without a capture"
        with self._gpu.lock:
            self._gpu.num_replays += 1
            for work in self._works:
                self._gpu.current_stream().give(work)


class _ThreadState:
    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.captures: list[Capture] = []


class FakeCuda:
    """The device. `device` and `host` are its allocators; `on_captured` is called with each work that is recorded."""

    def __init__(self, *, device_bytes: int = 2**40, pinned_bytes: int = 2**40, lockable_bytes: int = 2**40) -> None:
        self.lock = threading.RLock()
        self._runs = threading.Event()
        self._runs.set()
        self._states: dict[Any, _ThreadState] = {}
        self._local = threading.local()
        self._memories: dict[int, np.ndarray] = {}
        self._pinned: dict[int, Any] = {}
        self._lockable_bytes = lockable_bytes
        self.locked: dict[int, int] = {}
        self.num_replays = 0
        self.on_captured: Callable[[], None] = lambda: None
        self.default_stream = FakeStream(self)
        self._streams = [deque(FakeStream(self) for _ in range(STREAMS_OF_A_KIND)) for _ in range(2)]
        self.device = FakeDeviceAllocator(device_bytes)
        self.host = FakeHostAllocator(
            lambda: FakeEvent(self), lambda: self.current_stream().capture is not None, pinned_bytes
        )

    # The seam.

    def stream(self, *, apart: bool = False) -> FakeStream:
        streams = self._streams[apart]
        streams.rotate(-1)
        return streams[0]

    def current_stream(self) -> FakeStream:
        return self.state.streams[-1] if self.state.streams else self.default_stream

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.state.streams.append(stream)
        try:
            if len(self.state.streams) == 1:
                with _Launches(self):
                    yield
            else:
                yield
        finally:
            self.state.streams.pop()

    def event(self, *, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        with self.lock:
            block = self.host.allocate(num_bytes)
            tensor = self._tensor(block.memory, num_bytes, lambda: self.host.free(block))
            self._pinned[tensor.data_ptr()] = block
        return tensor.view(dtype).view(shape)

    def graph(self) -> FakeGraph:
        return FakeGraph(self)

    def graph_pool(self) -> Any:
        return object()

    def pool_bytes(self, pool: Any) -> int:
        return self.device.pool_bytes(pool)

    def forget_capture(self, pool: Any) -> None:
        self.device.end_allocate_to_pool(pool)
        self.device.release_pool(pool)

    def page_lock(self, tensor: Tensor) -> Callable[[], None]:
        if sum(self.locked.values()) + tensor.nbytes > self._lockable_bytes:
            raise FakeCudaError("CUDA error: out of memory (2)")
        start = tensor.data_ptr()
        self.locked[start] = tensor.nbytes
        return lambda: self.locked.__delitem__(start)

    def release_cached(self) -> None:
        with self.lock:
            self.device.empty_cache()
            self.host.empty_cache()

    # The device's time.

    def hold(self) -> None:
        """The device is busy with something long, until `go`."""
        self._runs.clear()

    def go(self) -> None:
        self._runs.set()

    def advance(self, stream: FakeStream) -> bool:
        """One work of the stream; whether there was one."""
        with self.lock, torch.inference_mode(), _disable_current_modes():
            if not stream.queue:
                return False
            work = stream.queue.popleft()
            if isinstance(work, FakeEvent):
                assert work.stream is not None
                assert work.mark is not None
                self._run(work.stream, work.mark)
            else:
                work()
            return True

    def run(self, stream: FakeStream, mark: list[bool]) -> None:
        """Wait until the stream has come to a mark."""
        assert self._runs.wait(60), "the device was held, and nobody let it go"
        self._run(stream, mark)

    def _run(self, stream: FakeStream, mark: list[bool]) -> None:
        while not mark[0]:
            assert self.advance(stream), "waiting for what was never recorded"

    # Threads.

    @property
    def state(self) -> _ThreadState:
        key = getattr(self._local, "name", threading.get_ident())
        return self._states.setdefault(key, _ThreadState())

    @contextmanager
    def as_thread(self, name: str) -> Iterator[None]:
        """What this thread does meanwhile, a thread of this name does."""
        before = getattr(self._local, "name", threading.get_ident())
        self._local.name = name
        try:
            with _disable_current_modes():
                yield
        finally:
            self._local.name = before

    def forbid(self, call: str) -> None:
        """Waiting is forbidden to a thread that captures."""
        if self.state.captures:
            self.state.captures[-1].is_invalid = True
            raise FakeCudaError(f"CUDA error: operation not permitted when stream is capturing: {call}")

    # Tensors.

    def launch(self, func: Any, args: Any, kwargs: Any, outs: Any, *, in_place: bool) -> None:
        """Give the current stream a function of tensors. Queues hold memory, and not tensors: they may be freed."""
        with self.lock:
            stream = self.current_stream()
            raw_args, raw_kwargs = (tree_map(lambda x: self._raw(x, stream), each) for each in (args, kwargs))
            raw_outs = [] if in_place else [self._raw(out, stream) for out in tree_leaves(outs)]

            def work() -> None:
                results = tree_leaves(func(*raw_args, **raw_kwargs))
                for raw_out, result in zip(raw_outs, results, strict=not in_place):
                    raw_out.copy_(result)

            stream.give(work)
        if stream.capture is not None:
            self.on_captured()

    def empty_like(self, meta: Any) -> Any:
        """Device memory for a result that is to come."""
        if not isinstance(meta, Tensor):
            return meta
        num_bytes = meta.untyped_storage().nbytes()
        if num_bytes == 0:
            return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype)
        with self.lock:
            block = self.device.malloc(num_bytes, self.current_stream())
            tensor = self._tensor(np.zeros(num_bytes, np.uint8), num_bytes, lambda: self.device.free(block))
        return tensor.view(meta.dtype).as_strided(meta.size(), meta.stride())

    def _tensor(self, memory: np.ndarray, num_bytes: int, when_freed: Callable[[], None]) -> Tensor:
        """Bytes that are tracked: the thread that drops the last tensor of them calls `when_freed`."""
        handle = memory[:num_bytes]
        tensor = torch.from_numpy(handle)
        start = tensor.data_ptr()
        self._memories[start] = memory

        def freed() -> None:
            with self.lock:
                del self._memories[start]
                self._pinned.pop(start, None)
                when_freed()

        weakref.finalize(handle, freed).atexit = False
        return tensor

    def _raw(self, x: Any, stream: FakeStream) -> Any:
        """The same memory, of which nobody knows that it is used; a pinned block remembers the stream."""
        if not isinstance(x, Tensor):
            return x
        start = x.untyped_storage().data_ptr()
        memory = self._memories.get(start)
        if memory is None:
            return x
        if start in self._pinned:
            self._pinned[start].streams.add(stream)
        usable = len(memory) // x.dtype.itemsize * x.dtype.itemsize
        return torch.from_numpy(memory[:usable]).view(x.dtype).as_strided(x.size(), x.stride(), x.storage_offset())


class _Launches(TorchDispatchMode):
    """Gives functions of tensors to the current stream; views, and constants of no tensor, are made at once."""

    def __init__(self, gpu: FakeCuda) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self._gpu.current_stream().synchronize()
            return func(*args, **kwargs)
        aliases = [returned.alias_info for returned in func._schema.returns]
        if any(alias is not None and alias.is_write for alias in aliases):
            outs = kwargs.get("out", args[0])
            self._gpu.launch(func, args, kwargs, outs, in_place=True)
            return outs
        if any(alias is not None for alias in aliases):
            return func(*args, **kwargs)
        meta_args, meta_kwargs = tree_map(_meta, (args, kwargs))
        if "device" in meta_kwargs:
            meta_kwargs["device"] = torch.device("meta")
        outs = tree_map(self._gpu.empty_like, func(*meta_args, **meta_kwargs))
        self._gpu.launch(func, args, kwargs, outs, in_place=False)
        return outs


def _meta(x: Any) -> Any:
    if isinstance(x, Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    return x
