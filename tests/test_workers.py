"""The threads of an engine: what waits, what never begins, what is raised, and how they end."""

import asyncio
import threading

import pytest

from aserve.core.errors import OverloadedError, UnavailableError
from aserve.workers import Workers


class LibraryPanic(BaseException):
    """As pyo3 has: no Exception."""


@pytest.fixture
def workers():
    workers = Workers(num_threads=1, max_open=2)
    yield workers
    workers.close()


async def test_what_it_returns_and_raises(workers):
    def fail(error):
        raise error

    assert await workers.run(divmod, 7, 2) == (3, 1)
    for error, kind in [(LibraryPanic(), LibraryPanic), (StopIteration(), RuntimeError), (ValueError(), ValueError)]:
        with pytest.raises(kind):
            await workers.run(fail, error)


async def test_what_waits_for_a_client_who_has_left_never_begins(workers):
    is_running, may_end, begun = threading.Event(), threading.Event(), []

    def hold():
        is_running.set()
        may_end.wait()

    first = asyncio.create_task(workers.run(hold))
    await asyncio.to_thread(is_running.wait)
    second = asyncio.create_task(workers.run(begun.append, 1))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await workers.run(begun.append, 2)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    third = asyncio.create_task(workers.run(begun.append, 3))
    may_end.set()
    await asyncio.gather(first, third)
    assert begun == [3]


async def test_closing_tells_those_who_wait(workers):
    is_running, may_end = threading.Event(), threading.Event()

    def hold():
        is_running.set()
        may_end.wait()

    running = asyncio.create_task(workers.run(hold))
    await asyncio.to_thread(is_running.wait)
    waiting = asyncio.create_task(workers.run(print))
    await asyncio.sleep(0)
    workers.close()
    with pytest.raises(UnavailableError):
        await waiting
    may_end.set()
    await running
    with pytest.raises(UnavailableError):
        await workers.run(print)
