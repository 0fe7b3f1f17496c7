"""Workers: the few threads of one engine in which requests' texts are worked on, off the event loop.

    request's task --> run --> waits, if all threads are busy --> a thread --> the result, or what was raised
                         '--> too many wait: OverloadedError      '--> the client has left: what waits never begins

Not asyncio's default executor, which an application shares with whatever else it does, and in which any number waits.
Knows nothing of texts.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from aserve.core.errors import OverloadedError, UnavailableError
from aserve.core.faults import for_a_future

NUM_THREADS: Final = 4
MAX_OPEN: Final = 4096
"""Pieces of work that wait or are being done."""

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Threads start when they are first needed, and end with `close`."""

    def __init__(self, num_threads: int = NUM_THREADS, max_open: int = MAX_OPEN) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="aserve-worker")
        self._max_open = max_open
        self._num_open = 0
        self._is_closed = False

    async def run(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call it in a thread. When the caller is cancelled, it never begins, or ends with nobody to hear of it.

        Raises what it raises, `OverloadedError` and, when the engine closes, `UnavailableError`.
        """
        if self._is_closed:
            raise UnavailableError("the engine is closed")
        if self._num_open >= self._max_open:
            raise OverloadedError(f"{self._num_open} pieces of work on texts are waiting")
        work = self._executor.submit(for_a_future, partial(function, *arguments, **options))
        self._num_open += 1
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise UnavailableError("the engine is closed") from None
            raise
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """End the threads when they have done what they are at; what waits never begins. Idempotent."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
