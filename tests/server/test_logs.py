"""Where the log goes: lines for people and machines, by a thread for which nobody waits."""

import io
import json
import logging
import os
import threading

import pytest

from aserve.server import logs
from aserve.server.logs import JsonFormatter, TextFormatter, Writer, logging_to

_log = logging.getLogger("aserve.test")


class Pipe:
    """A reader that takes no line until it is told to."""

    def __init__(self) -> None:
        self.reads = threading.Event()
        self.is_stuck = threading.Event()
        self.text = ""

    def write(self, text: str) -> None:
        self.is_stuck.set()
        assert self.reads.wait(10)
        self.text += text


def logged(form: str, level: str = "info") -> tuple[io.StringIO, object]:
    stream = io.StringIO()
    return stream, logging_to(stream, level, form)


def test_a_line_for_people():
    stream, logging_there = logged("text")
    with logging_there as say:
        _log.info("that is %s", "so")
        say("aserve: hello")
    first, second = stream.getvalue().splitlines()
    assert first[4] == first[7] == "-"
    assert first[19:] == " info aserve.test: that is so"
    assert second == "aserve: hello"


def test_a_line_for_machines():
    stream, logging_there = logged("json")
    with logging_there as say:
        _log.warning("that is\n%s", "so")
        _log.info("not seen", extra={"fields": {"status": 200, "method": "GET"}})
        say("aserve: hello")
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {"level": "warning", "logger": "aserve.test", "message": "that is\nso"}
    assert second.pop("time")
    assert second == {"level": "info", "logger": "aserve.test", "status": 200, "method": "GET"}
    assert (third["level"], third["message"]) == ("info", "aserve: hello")


@pytest.mark.parametrize(("level", "expected"), [("debug", "DIWE"), ("info", "IWE"), ("warning", "WE"), ("error", "E")])
def test_levels(level, expected):
    stream, logging_there = logged("text", level)
    with logging_there as say:
        _log.debug("D")
        _log.info("I")
        _log.warning("W")
        _log.error("E")
        say("said")
    assert "".join(line[-1] for line in stream.getvalue().splitlines()) == expected + "d"


def test_libraries_are_heard_when_they_warn_and_never_quoted():
    stream, logging_there = logged("text", "debug")
    library = logging.getLogger("somebody.else")
    with logging_there:
        library.info("chatter")
        try:
            raise ValueError("sk-secret")
        except ValueError:
            library.exception("it failed")
    assert "chatter" not in stream.getvalue()
    assert "somebody.else: it failed: builtins.ValueError" in stream.getvalue()
    assert "secret" not in stream.getvalue()


def test_afterwards_logging_is_as_before():
    ours, root = logging.getLogger("aserve"), logging.getLogger()
    before = ours.level, ours.propagate, list(ours.handlers), list(root.handlers)
    threads = set(threading.enumerate())  # those of other tests may end meanwhile
    with logged("text")[1]:
        (writer,) = set(threading.enumerate()) - threads
        assert writer.name == "aserve log"
    assert (ours.level, ours.propagate, ours.handlers, root.handlers) == before
    writer.join(5)
    assert not writer.is_alive()


def test_nobody_waits_for_a_reader_and_what_is_lost_is_counted(monkeypatch):
    monkeypatch.setattr(logs, "MAX_QUEUED_LINES", 10)
    monkeypatch.setattr(logs, "FLUSH_S", 0.01)
    pipe = Pipe()
    writer = Writer(pipe.write, TextFormatter())
    writer.say("first")
    assert pipe.is_stuck.wait(5)
    for number in range(25):
        writer.say(f"line {number}")
    writer.flush()  # gives up
    pipe.reads.set()
    monkeypatch.setattr(logs, "FLUSH_S", 5.0)
    writer.flush()
    assert pipe.text.splitlines() == [
        "first",
        "aserve: 15 log lines were dropped",
        *(f"line {number}" for number in range(10)),
    ]
    writer.close()


def test_a_reader_who_never_reads_does_not_keep_the_end_back(monkeypatch):
    monkeypatch.setattr(logs, "FLUSH_S", 0.01)
    pipe = Pipe()
    writer = Writer(pipe.write, JsonFormatter())
    writer.say("first")
    assert pipe.is_stuck.wait(5)
    writer.close()
    pipe.reads.set()


def test_a_full_pipe_is_waited_for_without_a_lock_of_pythons(monkeypatch):
    monkeypatch.setattr(logs, "FLUSH_S", 0.05)
    read_end, write_end = os.pipe()
    with open(write_end, "w") as stream:
        with logging_to(stream, "info", "text") as say:
            for _ in range(3):
                say("x" * 65_536)
        stream.flush()  # would wait for the thread, if that wrote to the stream
        os.read(read_end, 65_536)
        os.close(read_end)  # and the thread hears that nobody reads any more


def test_a_stream_that_is_closed_or_missing_is_no_error():
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        with logging_to(stream, "info", "text") as say:
            say("to nobody")


def test_a_record_that_cannot_be_formatted_is_dropped():
    stream, logging_there = logged("text")
    with logging_there as say:
        writer = next(handler for handler in logging.getLogger().handlers if isinstance(handler, Writer))
        writer.handle(logging.LogRecord("x", logging.INFO, "", 0, "%d", ("no number",), None))
        say("next")
    assert stream.getvalue().splitlines() == ["aserve: 1 log lines were dropped", "next"]


def test_lines_that_come_while_one_is_written_are_written_together():
    """Catches a thread that is woken for each line of many: writes, and what they held."""
    pipe, writes = Pipe(), []

    def write(text: str) -> None:
        writes.append(text)
        pipe.write(text)

    writer = Writer(write, TextFormatter())
    writer.say("first")
    assert pipe.is_stuck.wait(5)
    for number in range(5):
        writer.say(str(number))
    pipe.reads.set()
    writer.flush()
    assert writes == ["first\n", "0\n1\n2\n3\n4\n"]
    writer.close()


def test_who_waits_for_lines_does_not_wait_for_the_rest_between_two_writes(monkeypatch):
    monkeypatch.setattr(logs, "REST_S", 60.0)
    writes: list[str] = []
    writer = Writer(writes.append, TextFormatter())
    for line in ("first", "second"):
        writer.say(line)
        writer.flush()
    assert writes == ["first\n", "second\n"]
    writer.close()


def test_colours_are_of_levels_that_need_somebody_and_of_terminals():
    def level_of(name: str, formatter: TextFormatter) -> str:
        record = logging.LogRecord("aserve.x", getattr(logging, name), "", 0, "said", (), None)
        return formatter.format(record).split()[2]

    assert level_of("ERROR", TextFormatter()) == "error"
    coloured = TextFormatter(has_colours=True)
    assert [level_of(name, coloured) for name in ("INFO", "WARNING", "ERROR")] == [
        "info",
        "\x1b[33mwarning\x1b[0m",
        "\x1b[31merror\x1b[0m",
    ]


def test_a_record_is_not_asked_for_what_no_line_tells():
    """Catches the names of thread and process that are found out for each of thousands of refusals; or never again."""

    def told() -> set[object]:
        record = _log.makeRecord("aserve.test", logging.INFO, "", 0, "hello", (), None)
        return {record.thread, record.process, record.processName}

    with logging_to(io.StringIO(), "info", "text"):
        assert told() == {None}
    assert None not in told()
