"""Faults: what was raised by something that ought not to raise it, and how its request and the operator learn of it.

    code that works on a request's data --raises--> edge --> report() --> the log: fault id, request id, where
                                                                     '--> InternalError: fault id, for the client

An exception's text may quote a prompt, so it goes nowhere: the log has types, files and lines.
"""

import logging
import secrets
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final, TypeVar

from aserve.core.errors import AserveError, InternalError

MAX_DESCRIBED: Final = 16
"""Exceptions that are told of in one line of the log."""

WISHES = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Not faults but somebody's wish that all should end; an edge lets them pass, whatever else it catches."""

T = TypeVar("T")


def report(log: logging.Logger, place: str, error: BaseException, request_id: str | None = None) -> AserveError:
    """The error that a request ends with: `error` itself if it is one of ours, else an `InternalError`, and a log line.

    place: what was being done, such as "tokenizing".
    """
    return error if isinstance(error, AserveError) else InternalError(log_fault(log, place, error, request_id))


def log_fault(log: logging.Logger, place: str, error: BaseException, request_id: str | None = None) -> str:
    """Write the log line of a fault; returns its id."""
    fault_id = secrets.token_hex(6)
    whose = "" if request_id is None else f" of request {request_id}"
    log.error("fault %s in %s%s: %s", fault_id, place, whose, describe(error))
    return fault_id


def for_a_future(work: Callable[[], T]) -> T:
    """Call it in a thread, for a future to bring what comes of it.

    asyncio's futures refuse a StopIteration, and whoever waits for one that has it waits for ever.
    """
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError("work in a thread raised StopIteration") from error


def describe(error: BaseException) -> str:
    """The types of an exception and of those behind it, and where each came from; not a character of what they say.

    Each once, and the first 16: a member of a group may well have the group behind it.
    """
    parts: list[str] = []
    seen: set[int] = set()
    to_tell: list[BaseException | None] = [error]
    while to_tell and len(parts) < MAX_DESCRIBED:
        cause = to_tell.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        frames = "".join(
            f"\n  {frame.filename}:{frame.lineno} in {frame.name}"
            for frame in traceback.extract_tb(cause.__traceback__)
        )
        parts.append(f"{type(cause).__module__}.{type(cause).__qualname__}{frames}")
        to_tell.append(cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__))
        if isinstance(cause, BaseExceptionGroup):
            to_tell.extend(reversed(cause.exceptions))
    return "\nbehind it: ".join(parts)


def all_stacks() -> str:
    """Where every thread of the process is: files, lines and functions, and nothing that they hold."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, top in sys._current_frames().items():  # documented, in spite of its name
        frames = "".join(
            f"\n  {frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_stack(top)
        )
        parts.append(f"thread {names.get(ident, ident)}:{frames}")
    return "\n".join(parts)
