"""torch's two caching allocators as a model: what is reused when, what is kept, and what a capture changes.

After torch 2.13.0: ATen/core/CachingHostAllocator.h (allocate, free, process_events, empty_cache),
ATen/cuda/CachingHostAllocator.cpp (query_event), c10/cuda/CUDACachingAllocator.cpp (malloc and its retries, best fit,
splits, captures_underway, emptyCache) and c10/core/AllocatorConfig.h (sizes). Not modelled: private pools of pinned
memory, which only an allocation within a capture takes; options, expandable segments, several devices, statistics.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

KiB, MiB = 2**10, 2**20
Filter = Callable[[], bool]
"""Whether what the current stream is given goes into a capture's pool."""


class HostEvent(Protocol):
    """What the host allocator needs of an event."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...


class HostBlock:
    """Pinned memory. streams: on which it was copied since it was handed out."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = np.zeros(num_bytes, np.uint8)
        self.streams: set[Any] = set()
        self.num_events = 0
        self.is_used = True


class FakeHostAllocator:
    """new_event: makes an event. is_capturing: whether this thread's current stream is captured.

    limit_bytes: what the system locks at most; beyond it comes cudaHostAlloc's error, which has no class of its own.
    """

    def __init__(self, new_event: Callable[[], HostEvent], is_capturing: Filter, limit_bytes: int) -> None:
        self._new_event = new_event
        self._is_capturing = is_capturing
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[HostBlock]] = {}
        self._pending: list[tuple[HostEvent, HostBlock]] = []
        """Oldest first."""
        self.reserved_bytes = 0
        self.num_frees = 0

    def allocate(self, num_bytes: int) -> HostBlock:
        self._process_events()
        size = 1 << max(0, num_bytes - 1).bit_length()
        if free := self._free.get(size):
            block = free.pop()
            block.is_used = True
            return block
        if self.reserved_bytes + size > self._limit_bytes:
            raise RuntimeError("CUDA error: out of memory")
        self.reserved_bytes += size
        return HostBlock(size)

    def free(self, block: HostBlock) -> None:
        """An event on every stream that the block was copied on, be it captured or not."""
        self.num_frees += 1
        block.is_used = False
        streams, block.streams = block.streams, set()
        block.num_events += len(streams)
        for stream in streams:
            event = self._new_event()
            event.record(stream)
            self._pending.append((event, block))
        if not streams:
            self._keep(block)

    def empty_cache(self) -> None:
        self._process_events()
        self.reserved_bytes -= sum(len(block.memory) for blocks in self._free.values() for block in blocks)
        self._free.clear()

    def _keep(self, block: HostBlock) -> None:
        self._free.setdefault(len(block.memory), []).append(block)

    def _process_events(self) -> None:
        """From the oldest on, until one has not passed. One whose query raises is lost, and its block with it."""
        while self._pending:
            event, block = self._pending.pop(0)
            if self._is_capturing() or not event.query():
                self._pending.insert(0, (event, block))
                return
            assert not block.is_used
            block.num_events -= 1
            if block.num_events == 0:
                self._keep(block)


class DeviceBlock:
    """A piece of a segment, between its neighbours. stream: on which it may be used again."""

    def __init__(self, pool: "_Pool", num_bytes: int, stream: Any, is_small: bool) -> None:
        self.pool, self.num_bytes, self.stream, self.is_small = pool, num_bytes, stream, is_small
        self.is_free = True
        self.before: DeviceBlock | None = None
        self.behind: DeviceBlock | None = None


class _Pool:
    def __init__(self) -> None:
        self.num_users = 0
        self.free: list[DeviceBlock] = []
        self.reserved_bytes = 0

    def best_fit(self, num_bytes: int, stream: Any, is_small: bool) -> DeviceBlock | None:
        fitting = [
            block
            for block in self.free
            if block.stream is stream and block.is_small == is_small and block.num_bytes >= num_bytes
        ]
        return min(fitting, key=lambda block: block.num_bytes, default=None)

    def trim(self) -> None:
        """Give whole free segments back."""
        for block in [block for block in self.free if block.before is None and block.behind is None]:
            self.free.remove(block)
            self.reserved_bytes -= block.num_bytes


class FakeDeviceAllocator:
    """Sizes only; there is no memory behind it. limit_bytes: of the device."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._own = _Pool()
        self._pools: dict[Any, _Pool] = {}
        self.captures_underway: list[tuple[Any, Filter]] = []

    def malloc(self, num_bytes: int, stream: Any) -> DeviceBlock:
        size = -(-max(1, num_bytes) // 512) * 512
        is_small = size <= MiB
        pool = next((self._pools[pool] for pool, filter_ in self.captures_underway if filter_()), self._own)
        block = pool.best_fit(size, stream, is_small) or self._segment(pool, size, stream, is_small)
        if block in pool.free:
            pool.free.remove(block)
        rest = block.num_bytes - size
        if rest >= 512 if is_small else rest > MiB:
            behind = DeviceBlock(pool, rest, stream, is_small)
            behind.before, behind.behind, block.num_bytes = block, block.behind, size
            if block.behind is not None:
                block.behind.before = behind
            block.behind = behind
            pool.free.append(behind)
        block.is_free = False
        return block

    def free(self, block: DeviceBlock) -> None:
        assert not block.is_free, "freed twice"
        block.is_free = True
        for other in (block.before, block.behind):
            if other is not None and other.is_free:
                first, second = (other, block) if other is block.before else (block, other)
                first.num_bytes += second.num_bytes
                first.behind = second.behind
                if second.behind is not None:
                    second.behind.before = first
                if other in block.pool.free:
                    block.pool.free.remove(other)
                block = first
        block.pool.free.append(block)

    def begin_allocate_to_pool(self, pool: Any, filter_: Filter) -> None:
        assert all(pool != other for other, _ in self.captures_underway), "already recording to mempool_id"
        if pool in self._pools and self._pools[pool].num_users == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")  # its graphs are gone, and it is to be freed
        self._pools.setdefault(pool, _Pool()).num_users += 1
        self.captures_underway.append((pool, filter_))

    def end_allocate_to_pool(self, pool: Any) -> None:
        underway = [entry for entry in self.captures_underway if entry[0] == pool]
        if not underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.captures_underway.remove(underway[0])

    def release_pool(self, pool: Any) -> None:
        self._pools[pool].num_users -= 1

    def empty_cache(self) -> None:
        if self.captures_underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self._own.trim()
        for pool in self._pools.values():
            if pool.num_users == 0:
                pool.trim()

    def pool_bytes(self, pool: Any) -> int:
        return self._pools[pool].reserved_bytes if pool in self._pools else 0

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes for pool in self._every_pool())

    def _every_pool(self) -> Iterator[_Pool]:
        yield self._own
        yield from self._pools.values()

    def _segment(self, pool: _Pool, size: int, stream: Any, is_small: bool) -> DeviceBlock:
        """A new one; where the device has no room, cached ones are given back first, unless a capture is underway."""
        num_bytes = 2 * MiB if is_small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
        if self.reserved_bytes + num_bytes > self._limit_bytes and not self.captures_underway:
            self.empty_cache()
        if self.reserved_bytes + num_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
        pool.reserved_bytes += num_bytes
        return DeviceBlock(pool, num_bytes, stream, is_small)
