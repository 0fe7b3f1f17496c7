"""LoopThread: an event loop in a thread of its own, for who has none to spare, or one that is running already.

    caller    run(work) --. waits .......................> result
    thread                '-> task of work ... its end --'       the loop's other tasks go on all the time

Knows nothing of engines.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, Generic, TypeVar

from aserve.core.errors import UnavailableError

T = TypeVar("T")


class LoopThread:
    """Runs from when it is made until `close`. The thread is a daemon: a process that ends does not wait for it.

    Every method may be called from any thread but its own. A process that is forked later has no such thread: there
    `run` raises `UnavailableError`, and `close` has nothing to do. Raises OSError where the system has nothing left for
    a loop.
    """

    def __init__(self, name: str) -> None:
        started = Future[asyncio.AbstractEventLoop]()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=_run_loop, args=(started,), name=name, daemon=True)
        self._thread.start()
        self._loop = started.result()

    @property
    def is_current(self) -> bool:
        """Whether it is the thread that asks."""
        return threading.current_thread() is self._thread

    @property
    def is_inherited(self) -> bool:
        """Whether the process that asks was forked from the one whose thread it is."""
        return os.getpid() != self._pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, which is run as a task of the loop. Raises what it raises.

        An exception that reaches the caller meanwhile, KeyboardInterrupt above all, cancels the task, and is raised
        when that has ended; another one while it ends is raised at once.
        """
        if self.is_inherited:
            work.close()
            raise UnavailableError("no thread outlives a fork: a forked process has to make its own LLM")
        call = _Call(work)
        try:  # an interrupt may come before `call_soon_threadsafe` returns, and the task may run by then
            self._loop.call_soon_threadsafe(call.start)
            return call.outcome.result()
        except BaseException:
            if not call.outcome.done():
                self._loop.call_soon_threadsafe(call.cancel)
                call.outcome.exception()
            raise

    def close(self) -> None:
        """Cancel what runs, and wait until the thread has ended. Idempotent."""
        if not self.is_inherited and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class _Call(Generic[T]):
    """A coroutine that one thread waits for and another runs."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.outcome = Future[T]()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        """In the loop's thread."""
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """In the loop's thread, after `start`, if that was called at all."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._work.close()
            self.outcome.set_exception(CancelledError())

    def _ended(self, task: asyncio.Task[T]) -> None:
        error = CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


def _run_loop(started: Future[asyncio.AbstractEventLoop]) -> None:
    """As asyncio.Runner does, but for its executor: that ends in a thread, and from 3.12 on none starts at exit."""
    try:
        loop = asyncio.new_event_loop()
    except OSError as error:  # no descriptor is left
        started.set_exception(error)
        return
    with ThreadPoolExecutor(thread_name_prefix="asyncio") as executor, closing(loop):
        loop.set_default_executor(executor)
        started.set_result(loop)
        loop.run_forever()
        loop.run_until_complete(_cancel_all())


async def _cancel_all() -> None:
    """End the other tasks and the asynchronous generators of this loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
