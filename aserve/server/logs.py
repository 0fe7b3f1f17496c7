"""Where a process that serves writes its log: lines to one stream, by a thread, so that nobody waits for their reader.

    loop --- logging, say ---> Writer: a bounded queue ---> thread ---> standard error

A full pipe blocks the thread alone. What does not fit in the queue then is dropped and counted, and the count is a line
as soon as lines are taken again. Only the command line calls this: an engine in somebody's application has plain
loggers beneath "aserve", and leaves them as they are.

A line is for people (text) or for machines (json). What libraries log is told from WARNING on; of exceptions, theirs
too, only what `core.faults.describe` says.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, TextIO

import msgspec

from aserve.core.faults import describe

YELLOW: Final = "\x1b[33m"
RED: Final = "\x1b[31m"
PLAIN: Final = "\x1b[0m"
MAX_QUEUED_LINES: Final = 10_000
REST_S: Final = 0.1
"""Between two writes: lines that come meanwhile are written together. To wake a thread costs more than a line does."""
UNTOLD: Final = "logThreads", "logProcesses", "logMultiprocessing"
"""What logging need not find out for each record, since no line tells it: a quarter of what a record costs."""
FLUSH_S: Final = 1.0
"""How long the end of the process waits for lines to be taken."""


@contextmanager
def logging_to(
    stream: TextIO | None, level: str, form: str, *, has_colours: bool = False
) -> Iterator[Callable[[str], None]]:
    """Log to a stream while the block runs. Gives a function that shows people a line, whatever the level.

    level: logging's, in lower case. form: "text" or "json". has_colours: the stream is a terminal that shows them.
    """
    writer = Writer(_writing(stream), JsonFormatter() if form == "json" else TextFormatter(has_colours=has_colours))
    ours, root = logging.getLogger("aserve"), logging.getLogger()
    before = ours.level, ours.propagate
    ours.setLevel(level.upper())
    ours.propagate = False
    ours.addHandler(writer)
    root.addHandler(writer)  # whose level is WARNING unless somebody changed it
    asked = {name: getattr(logging, name) for name in UNTOLD}
    vars(logging).update(dict.fromkeys(UNTOLD, False))
    try:
        yield writer.say
    finally:
        ours.removeHandler(writer)
        root.removeHandler(writer)
        vars(logging).update(asked)
        ours.setLevel(before[0])
        ours.propagate = before[1]
        writer.close()


class TextFormatter(logging.Formatter):
    """`2026-01-02 03:04:05 warning aserve.access: POST /v1/completions 500 ...`

    has_colours: the level of a warning is yellow, that of an error red.
    """

    def __init__(self, *, has_colours: bool = False) -> None:
        super().__init__()
        self._has_colours = has_colours

    def format(self, record: logging.LogRecord) -> str:
        """The line; several, where an exception is described."""
        return f"{_second(int(record.created))} {self._level(record)} {record.name}: {_message(record)}"

    def _level(self, record: logging.LogRecord) -> str:
        name = record.levelname.lower()
        if not self._has_colours or record.levelno < logging.WARNING:
            return name
        return f"{YELLOW if record.levelno < logging.ERROR else RED}{name}{PLAIN}"

    def said(self, line: str) -> str:
        """What people are told, as it is."""
        return line


class JsonFormatter(logging.Formatter):
    """`{"time": "2026-01-02T03:04:05.678Z", "level": "info", "logger": "aserve.x", "message": ...}`

    A record that has `fields` has them instead of the message, which says the same.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One object on one line."""
        what: dict[str, Any] = getattr(record, "fields", None) or {"message": _message(record)}
        return self._line(record.created, level=record.levelname.lower(), logger=record.name, **what)

    def said(self, line: str) -> str:
        """What people are told, as a message."""
        return self._line(time.time(), level="info", logger="aserve", message=line)

    @staticmethod
    def _line(time_s: float, **fields: Any) -> str:
        when = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return msgspec.json.encode({"time": when, **fields}).decode()


@lru_cache(maxsize=2)
def _second(time_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _message(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return record.getMessage() if error is None else f"{record.getMessage()}: {describe(error)}"


class Writer(logging.Handler):
    """Lines on their way to `write`, which may block, in a thread that ends with the process or with `close`.

    The thread also makes the lines of records that have `fields`, which nobody changes.
    """

    def __init__(self, write: Callable[[str], object], formatter: TextFormatter | JsonFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._formatter = formatter
        self._write = write
        self._lines: queue.SimpleQueue[_Line] = queue.SimpleQueue()
        self._num_dropped = 0
        self._hurries = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="aserve log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record, or count it as dropped."""
        line = record if hasattr(record, "fields") else self._line(record)
        if line is not None:
            self._put(line)

    def say(self, line: str) -> None:
        """Show people a line."""
        self._put(self._formatter.said(line))

    def flush(self) -> None:
        """Wait for the lines so far to be taken, but not for long."""
        are_taken = threading.Event()
        self._lines.put(are_taken)
        self._hurries.set()
        are_taken.wait(FLUSH_S)

    def close(self) -> None:
        """End the thread, unless it is stuck. Idempotent."""
        if self._thread.is_alive():
            self.flush()
            self._lines.put(None)
        super().close()

    def _line(self, record: logging.LogRecord) -> str | None:
        try:
            return self.format(record)
        except Exception:  # somebody's arguments do not fit his message, which must not become an error of his caller
            self._num_dropped += 1
            return None

    def _put(self, line: str | logging.LogRecord) -> None:
        if self._lines.qsize() < MAX_QUEUED_LINES:
            self._lines.put(line)
        else:
            self._num_dropped += 1

    def _write_all(self) -> None:
        num_told = 0
        while True:
            gathered = self._gathered()
            made = [self._line(one) if isinstance(one, logging.LogRecord) else one for one in gathered]
            told = [f"{line}\n" for line in made if isinstance(line, str)]
            if (num_dropped := self._num_dropped) > num_told:
                dropped = self._formatter.said(f"aserve: {num_dropped - num_told} log lines were dropped")
                told.insert(0, f"{dropped}\n")
                num_told = num_dropped
            with suppress(OSError, ValueError):  # of a stream that is closed: there is nobody to tell
                self._write("".join(told))
            for one in gathered:
                if isinstance(one, threading.Event):
                    one.set()
            if None in gathered:
                return
            self._hurries.wait(REST_S)
            self._hurries.clear()

    def _gathered(self) -> "list[_Line]":
        """All lines that there are; waits for the first."""
        lines = [self._lines.get()]
        with suppress(queue.Empty):
            while len(lines) < MAX_QUEUED_LINES:
                lines.append(self._lines.get_nowait())
        return lines


_Line = str | logging.LogRecord | threading.Event | None
"""A line, or what it is made of; who waits for those before it; the end."""


def _writing(stream: TextIO | None) -> Callable[[str], object]:
    """How to write to a stream: past Python's buffer where there is a descriptor.

    A thread that is stuck there then holds no lock that the end of the process would need.
    """
    if stream is None:
        return len
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream.write

    def write(text: str) -> None:
        rest = memoryview(text.encode(errors="backslashreplace"))
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    return write
