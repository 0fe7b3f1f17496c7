"""The group of ranks that compute a model together: gloo on a CPU, NCCL on CUDA, met at a file.

torch.distributed's own default group is one for the whole process, and would keep two engines from living in one; so
the backends are made and called as they are. gloo talks over 127.0.0.1, on ports that the system gives it, which are
open to this machine alone and to nobody who does not know the group.

A rank that leaves closes its connections, and what others wait for in the group raises. So a step that fails on one
rank fails on all, and `join` makes the group anew for the next:

    rank 0   step 7 | all_reduce | fails, leaves                              | told to recover | join |
    rank 1   step 7 | all_reduce | all_reduce ... raises: connection closed   | told to recover | join |
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from aserve.models.sharding import Group

JOIN_S: Final = 60.0
"""For all ranks to come to the first meeting."""
REJOIN_S: Final = 5.0
LOOPBACK: Final = "127.0.0.1"


class GroupLeftError(RuntimeError):
    """This rank is in no group: a step has failed, or ranks have not met yet."""


class GroupBrokenError(RuntimeError):
    """Another rank has left the group, or does not come to where this one waits."""


@contextmanager
def _told_apart() -> Iterator[None]:
    """What torch raises here is of the group, and not of the model."""
    try:
        yield
    except GroupLeftError:
        raise
    except RuntimeError as error:
        raise GroupBrokenError("the ranks are apart") from error


class RankGroup:
    """A `Group` over one of torch's backends. path: the file where the ranks meet, the same for all of them.

    timeout_s: for which a rank waits for another within a step.
    """

    def __init__(self, rank: int, size: int, path: str, timeout_s: float) -> None:
        self._rank = rank
        self._size = size
        self._path = path
        self._timeout = timedelta(seconds=timeout_s)
        self._num_joined = 0
        self._backend: Any = None

    def join(self) -> None:
        """As the Protocol says."""
        self.leave()
        store: Store = FileStore(self._path, self._size)
        store.set_timeout(timedelta(seconds=REJOIN_S if self._num_joined else JOIN_S))
        self._num_joined += 1
        store = PrefixStore(f"meeting {self._num_joined}", store)
        with _told_apart():
            self._backend = self._connect(store)

    def _connect(self, store: Store) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch leaves it out of its types
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        return dist.ProcessGroupGloo(store, self._rank, self._size, options)

    def leave(self) -> None:
        """As the Protocol says; connections are closed with the last reference."""
        self._backend = None

    def all_reduce(self, x: Tensor) -> None:
        """As the Protocol says."""
        assert x.is_contiguous(), "a sum is put where its parts are"
        with _told_apart():
            self._joined().allreduce([x]).wait()

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """As the Protocol says."""
        parts = [torch.empty_like(x) for _ in range(self._size)] if self._rank == 0 else None
        options = dist.GatherOptions()
        options.rootRank = 0
        with _told_apart():
            self._joined().gather([] if parts is None else [parts], [x.contiguous()], options).wait()
        return parts

    def broadcast(self, x: Tensor) -> None:
        """As the Protocol says."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with _told_apart():
            self._joined().broadcast([x], options).wait()

    def _joined(self) -> Any:
        backend = self._backend
        if backend is None:
            raise GroupLeftError("the ranks are apart")
        return backend


class NcclGroup(RankGroup):
    """Over NCCL: calls are launched on the current stream's order, and a captured graph may hold them.

    A communicator that was aborted cannot be made anew beneath graphs that hold it: after a step that fails on CUDA the
    engine is lost, and no rank hangs, for an abort ends the kernels that wait for another rank.
    """

    def __init__(self, rank: int, size: int, path: str, timeout_s: float, device: torch.device) -> None:
        super().__init__(rank, size, path, timeout_s)
        self._device = device

    def _connect(self, store: Store) -> Any:
        if self._num_joined > 1:
            raise GroupLeftError("a step failed, and NCCL's communicator went with it")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with torch.cuda.device(self._device):
            backend = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
            backend.eager_connect_single_device(self._device)  # not within a capture, where it would be a wait
        return backend

    def leave(self) -> None:
        """As the Protocol says. Others' kernels are ended by their own abort, when they are told or lose this rank."""
        backend, self._backend = self._backend, None
        if backend is not None:
            with suppress(RuntimeError):
                backend.abort()


def make_group(rank: int, size: int, path: str, timeout_s: float, device: torch.device) -> Group:
    """The group of a device's kind. Not joined yet."""
    if device.type == "cuda":
        return NcclGroup(rank, size, path, timeout_s, device)
    return RankGroup(rank, size, path, timeout_s)


class MeetingFile:
    """The file at which ranks meet. In memory where the system has such files, so that it goes with the last of them.

    path: for this process, and for those that are started with `fds` passed on.
    """

    def __init__(self) -> None:
        self.fds: tuple[int, ...] = ()
        if hasattr(os, "memfd_create"):
            self.fds = (os.memfd_create("aserve-ranks"),)
            self.path = f"/proc/self/fd/{self.fds[0]}"
        else:
            fd, self.path = tempfile.mkstemp(prefix="aserve-ranks-")
            os.close(fd)

    def close(self) -> None:
        """Nobody meets any more. Idempotent."""
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)
        if not hasattr(os, "memfd_create"):
            Path(self.path).unlink(missing_ok=True)
