"""How many of torch's threads a step on a CPU takes: the smallest are no faster for having several.

At each kernel the threads wait for each other, and while they compute, the event loop and a client on the same machine
wait for a processor. So what a second thread computes has to be worth it, and how much arithmetic that is, is measured.
On 2 cores of a Zen 4 EPYC a token of 5 million parameters takes 0.9 ms on one thread and 0.6 on two, 8 tokens 1.8 and
1.1; over HTTP, with the client there too, one stream is as fast on either, and 8 have 0.8 of the time between tokens.
"""

import ctypes
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

import torch

from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import Ops
from aserve.models.spec import ModelSpec

WORTH_S: Final = 4e-5
"""Arithmetic that keeps a thread busy for so long is worth having it. Few tokens wait for memory much longer."""
_PRODUCT_SIZE: Final = 256
_NUM_PRODUCTS: Final = 15
"""The first few of a process find the clock still low, and would say three quarters of what it is worth."""


class StepThreads:
    """A context in which the calling thread uses as many threads as a step of `num_tokens` is worth.

    Never more than torch was told to use when this was made, and after the step as many again: torch hands the number
    that was set last to threads that are new to it. flops_per_thread: what makes one worth having. num_sharing: ranks
    that share the threads of this process's machine among them. give_way: see `way_giver`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        flops_per_thread: int,
        num_sharing: int = 1,
        give_way: Callable[[int], object] | None = None,
    ) -> None:
        self._give_way = give_way
        self._flops_per_token = spec.flops_per_token
        self._flops_per_thread = flops_per_thread
        self._all_threads = torch.get_num_threads()
        self._max_threads = max(1, self._all_threads // num_sharing)
        self._num_threads = self._max_threads

    def of(self, num_tokens: int) -> "StepThreads":
        """Itself, for a step of so many tokens."""
        self._num_threads = min(self._max_threads, max(1, num_tokens * self._flops_per_token // self._flops_per_thread))
        return self

    def give_way(self) -> None:
        """A step has ended, somebody waits for it, and nothing follows: have its threads let that one run first."""
        if self._give_way is not None and self._num_threads > 1:
            self._give_way(self._num_threads)

    def __enter__(self) -> None:
        if self._num_threads != self._all_threads:
            torch.set_num_threads(self._num_threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._num_threads != self._all_threads:
            torch.set_num_threads(self._all_threads)


def way_giver(ops: Ops) -> Callable[[int], object] | None:
    """What has so many threads of our own kernels let others run; None where kernels are not our own.

    When a kernel has ended OpenMP's threads look for some 5 ms whether there is another, and hold their processors. An
    event loop that is woken meanwhile, to send what a step has brought, waits for one: for up to 4 ms, of a prompt of
    128 tokens that takes 5.
    """
    return ops.library.function("give_way", [ctypes.c_int64]) if isinstance(ops, NativeOps) else None


def measure_flops_per_thread() -> int:
    """What one thread computes in `WORTH_S`, by the fastest of some float32 products: a few milliseconds in all."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)
        fastest_s = min(_product_s(x) for _ in range(_NUM_PRODUCTS))
    finally:
        torch.set_num_threads(num_threads)
    return int(2 * _PRODUCT_SIZE**3 * WORTH_S / fastest_s)


def _product_s(x: torch.Tensor) -> float:
    start_s = time.perf_counter()
    x @ x
    return time.perf_counter() - start_s
