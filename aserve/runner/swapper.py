"""Blocks on the move: within the cache, out to host memory and back. Executes a plan's BlockOps, and decides nothing.

On CUDA a block crosses in one copy of all its planes, by way of two staging buffers, in a stream of its own: the step's
kernels wait for what comes in, never for what goes out.

    compute stream   gather out ----> copies ----> scatter in ----> forward ...
                         |                            ^
    copy stream          +-----> to the host, from the host         (a buffer is used again when its copy is done)

Host memory is touched by the copy stream alone, so a block may go out in one step and come back in the next.
Shape letters: kernels/ops.py, and  H blocks in host memory   G blocks in a staging buffer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from aserve.core.config import GiB
from aserve.core.errors import ConfigError
from aserve.core.plan import BlockOps
from aserve.kernels.ops import Ops
from aserve.runner.cuda import Cuda, Event, TorchCuda
from aserve.runner.device import StepDevice
from aserve.runner.kv_store import KVStore, allocate_swap

STAGING_BYTES: Final = 16 * 2**20
"""Of each of the two buffers; they hold a block at least."""

Pairs = Sequence[tuple[int, int]]
"""(from, to)."""


class HostStore(Protocol):
    """Blocks in host memory. Both methods take (from, to) pairs, and are for the runner's thread, inside `stepping`."""

    def swap_out(self, pairs: Pairs) -> None:
        """Device block to host block."""
        ...

    def swap_in(self, pairs: Pairs) -> None:
        """Host block to device block."""
        ...

    def close(self) -> None:
        """Wait until no block is on its way, and give back what memory there is beyond tensors. Idempotent."""
        ...


class BlockMover:
    """Moves blocks of a cache. num_host_blocks: room in host memory, 0 for none."""

    def __init__(self, ops: Ops, kv: KVStore, device: StepDevice, num_host_blocks: int) -> None:
        self._ops = ops
        self._kv = kv
        self._planes_YBX = kv.planes_YBX
        self._device = device
        self._host: HostStore | None = None
        if num_host_blocks:
            self._host = host_store(ops, kv, device, num_host_blocks)

    def move(self, block_ops: BlockOps) -> None:
        """Start all moves, in order of their kinds; what the step computes afterwards finds them done.

        Nothing is scrubbed on a GPU: Triton's kernels do not read what lies behind the end of a context.
        """
        if block_ops.scrubs and not self._kv.planes_YBX.is_cuda:
            self._kv.scrub(block_ops.scrubs)
        if block_ops.swap_outs:
            assert self._host is not None, "there is no host memory to swap to"
            self._host.swap_out(block_ops.swap_outs)
        if block_ops.copies:
            sources_N, targets_N = _upload(self._device, block_ops.copies)
            self._ops.copy_blocks(self._planes_YBX, sources_N, targets_N)
        if block_ops.swap_ins:
            assert self._host is not None, "there is no host memory to swap from"
            self._host.swap_in(block_ops.swap_ins)

    def close(self) -> None:
        """Wait until no block is on its way, and let go of the host's memory. Idempotent."""
        if self._host is not None:
            self._host.close()


class CpuHostStore:
    """Host memory beside a cache that is in host memory itself: plain copies."""

    def __init__(self, ops: Ops, kv: KVStore, device: StepDevice, num_host_blocks: int) -> None:
        self._ops = ops
        self._planes_YBX = kv.planes_YBX
        self._device = device
        self._blocks_HYX = allocate_swap(kv, num_host_blocks)

    def swap_out(self, pairs: Pairs) -> None:
        """Done on return."""
        blocks_N, hosts_N = _upload(self._device, pairs)
        packed_NYX = self._blocks_HYX.new_empty((len(pairs), *self._blocks_HYX.shape[1:]))
        self._ops.gather_blocks(self._planes_YBX, blocks_N, packed_NYX)
        self._blocks_HYX.index_copy_(0, hosts_N, packed_NYX)

    def swap_in(self, pairs: Pairs) -> None:
        """Done on return."""
        hosts_N, blocks_N = _upload(self._device, pairs)
        self._ops.scatter_blocks(self._blocks_HYX.index_select(0, hosts_N), self._planes_YBX, blocks_N)

    def close(self) -> None:
        """Nothing is on its way, and all that there is are tensors."""


class CudaHostStore:
    """Page-locked host memory beside a cache on a GPU. Nothing here waits on the host but `close`.

    The memory is ordinary, and its pages are locked (cudaHostRegister). torch's allocator of pinned memory would round
    40 GiB up to 64, and keep them when the engine is closed. Raises `ConfigError` where the system locks no so much.
    """

    def __init__(self, ops: Ops, kv: KVStore, device: StepDevice, num_host_blocks: int, cuda: Cuda) -> None:
        self._ops = ops
        self._planes_YBX = kv.planes_YBX
        self._device = device
        self._cuda = cuda
        self._blocks_HYX = allocate_swap(kv, num_host_blocks)
        self._stream = cuda.stream()
        block_shape = self._blocks_HYX.shape[1:]
        group = max(1, STAGING_BYTES // self._blocks_HYX[0].nbytes)
        self._buffers = [_Staging(kv.planes_YBX.new_empty((group, *block_shape)), cuda.event()) for _ in range(2)]
        self._group = group
        try:
            self._unlock: Callable[[], None] | None = cuda.page_lock(self._blocks_HYX)
        except RuntimeError as error:
            raise ConfigError(
                f"swap_space: {self._blocks_HYX.nbytes / GiB:.2f} GiB of host memory cannot be page-locked ({error}); "
                "lower it, or raise the limit on locked memory (ulimit -l) or that of the container"
            ) from error

    def swap_out(self, pairs: Pairs) -> None:
        """The step goes on as soon as the blocks are gathered."""
        compute = self._cuda.current_stream()
        for staging, group in self._groups(pairs):
            blocks_N, _ = _upload(self._device, group)
            compute.wait_event(staging.is_free)
            self._ops.gather_blocks(self._planes_YBX, blocks_N, staging.packed_GYX[: len(group)])
            self._stream.wait_event(compute.record_event())
            with self._cuda.on(self._stream):
                for packed_YX, (_, host) in zip(staging.packed_GYX, group, strict=False):
                    self._blocks_HYX[host].copy_(packed_YX, non_blocking=True)
                staging.is_free.record(self._stream)

    def swap_in(self, pairs: Pairs) -> None:
        """The copies may run beside the step before; this one waits for them."""
        compute = self._cuda.current_stream()
        for staging, group in self._groups(pairs):
            _, blocks_N = _upload(self._device, group)
            with self._cuda.on(self._stream):
                self._stream.wait_event(staging.is_free)
                for packed_YX, (host, _) in zip(staging.packed_GYX, group, strict=False):
                    packed_YX.copy_(self._blocks_HYX[host], non_blocking=True)
            compute.wait_event(self._stream.record_event())
            self._ops.scatter_blocks(staging.packed_GYX[: len(group)], self._planes_YBX, blocks_N)
            staging.is_free.record(compute)

    def close(self) -> None:
        """Waits for the copy stream; the device waits for its own."""
        self._stream.synchronize()
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def _groups(self, pairs: Pairs) -> Iterator[tuple["_Staging", Pairs]]:
        """As many pairs as a buffer holds, and the buffer that was used longest ago."""
        for start in range(0, len(pairs), self._group):
            self._buffers.reverse()
            yield self._buffers[0], pairs[start : start + self._group]


class _Staging(NamedTuple):
    """A buffer on the device, and the event after which nobody uses it."""

    packed_GYX: Tensor
    is_free: Event


def host_store(ops: Ops, kv: KVStore, device: StepDevice, num_host_blocks: int) -> HostStore:
    """Room for so many blocks beside a cache, on its own kind of device."""
    if kv.planes_YBX.is_cuda:
        return CudaHostStore(ops, kv, device, num_host_blocks, TorchCuda(kv.planes_YBX.device))
    return CpuHostStore(ops, kv, device, num_host_blocks)


def _upload(device: StepDevice, pairs: Pairs) -> list[Tensor]:
    """Both columns, int64."""
    return device.upload([np.array(column, np.int64) for column in zip(*pairs, strict=True)])
