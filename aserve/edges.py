"""Edges: where whatever a request made happen becomes the end of that request, and of nothing else.

An edge stands around each place where a request's own data is worked on. It catches what Python does not count as an
Exception, too: libraries raise such things (pyo3's PanicException), and asyncio refuses others (StopIteration).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aserve.core.faults import WISHES, log_fault

T = TypeVar("T")


def is_fault(error: BaseException) -> bool:
    """Whether an exception is to be told to the request at whose edge it arrived, in a task or a callback.

    False for the wish that all should end, and for the cancellation of the task itself. A CancelledError that comes
    from elsewhere, a cancelled future say, is a fault like any other; in a callback of the event loop each is.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or not task.cancelling()
    return not isinstance(error, WISHES)


async def heard(work: Awaitable[T]) -> T:
    """Await something in a task of a group. A CancelledError that comes from elsewhere is a RuntimeError.

    A group takes it for the end of a task that was cancelled, and goes on as if its work had been done.
    """
    try:
        return await work
    except asyncio.CancelledError as error:
        if not is_fault(error):
            raise
        raise RuntimeError("work that nobody cancelled was cancelled") from error


def aside(
    log: logging.Logger, place: str, request_id: str | None, call: Callable[..., object], *arguments: object
) -> None:
    """Call what nobody's answer depends on. What it raises is told to the log alone: see `log_fault`."""
    try:
        call(*arguments)
    except WISHES:
        raise
    except BaseException as error:
        log_fault(log, place, error, request_id)
