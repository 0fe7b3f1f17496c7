"""The server in a process of its own: signals, exit codes, and what a client sees of them."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator

import pytest

from tests.cli.terminal_program import python_on_terminal

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

IGNORING = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"


class Process:
    """A scripted server, its address, and what it printed."""

    def __init__(self, what: str, drain_timeout_s: float, *more: str) -> None:
        command = [sys.executable, "-m", "tests.server.scripted_server", what, str(drain_timeout_s), *more]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.port = int(self.line().rpartition(":")[2])

    def line(self) -> str:
        assert self.popen.stderr is not None
        return self.popen.stderr.readline().rstrip()

    def get(self, path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers=headers)
        with contextlib.closing(connection):
            return connection.getresponse().status

    def stream(self) -> contextlib.AbstractContextManager[http.client.HTTPResponse]:
        return stream(self.port)

    def refuses(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) != 0

    def exit_code(self) -> int:
        """Of a process that ends well before it would by a drain of 30 s."""
        return self.popen.wait(25)


@contextlib.contextmanager
def process(what: str, drain_timeout_s: float = 30.0, *more: str) -> Generator[Process]:
    started = Process(what, drain_timeout_s, *more)
    try:
        yield started
    finally:
        started.popen.kill()
        started.popen.wait()
        assert started.popen.stderr is not None
        started.popen.stderr.close()


@contextlib.contextmanager
def stream(port: int, **headers: str) -> Generator[http.client.HTTPResponse]:
    """A stream that has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"prompt": "go on", "max_tokens": 5_000_000, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **headers})
    with contextlib.closing(connection), connection.getresponse() as response:
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
        yield response


def events(response: http.client.HTTPResponse) -> list[bytes]:
    """The rest of a stream, which must have its proper end."""
    return [line.removeprefix(b"data: ") for line in response.read().split(b"\n\n") if line]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_under_way_is_finished(signum: signal.Signals):
    with process("ends") as server:
        assert server.line() == "ready"
        with server.stream() as response:
            server.popen.send_signal(signum)
            assert "finishing 1 request;" in server.line()
            *_, last, done = events(response)
        assert json.loads(last)["choices"][0]["finish_reason"] == "stop"
        assert done == b"[DONE]"
        assert server.exit_code() == 0


def test_at_the_deadline_a_stream_gets_an_error_and_its_proper_end():
    with process("talks", drain_timeout_s=0.2) as server:
        assert server.line() == "ready"
        with server.stream() as response:
            server.popen.send_signal(signal.SIGTERM)
            *_, error, done = events(response)
        assert json.loads(error)["error"]["code"] == "engine_unavailable"
        assert done == b"[DONE]"
        assert server.exit_code() == 0


def test_a_second_signal_stops_at_once():
    with process("talks") as server:
        assert server.line() == "ready"
        with server.stream():
            server.popen.send_signal(signal.SIGTERM)
            assert "finishing 1 request" in server.line()
            assert server.refuses()
            server.popen.send_signal(signal.SIGTERM)
            assert server.exit_code() == 128 + signal.SIGTERM


def test_at_a_hangup_the_keys_are_read_again_and_a_bad_file_changes_nothing(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: before}")
    with process("ends", 30.0, str(keys)) as server:
        assert server.line() == "ready"
        keys.write_text("- {name: a, key: [before}")
        server.popen.send_signal(signal.SIGHUP)
        assert "the API keys stay as they are" in server.line()
        assert server.get("/v1/models", authorization="Bearer before") == 200
        keys.write_text("- {name: a, key: after}")
        server.popen.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 5.0
        while server.get("/v1/models", authorization="Bearer after") != 200:
            assert time.monotonic() < deadline
        assert server.get("/v1/models", authorization="Bearer before") == 401


def test_a_hangup_without_a_file_of_keys_is_one_line():
    with process("ends") as server:
        assert server.line() == "ready"
        server.popen.send_signal(signal.SIGHUP)
        assert server.line() == "aserve: SIGHUP: there is nothing to read again, as API keys are in no file"
        assert server.get("/v1/models") == 200
        server.popen.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0


@pytest.mark.parametrize("has_keys", [False, True], ids=["open", "keys"])
def test_when_its_terminal_is_closed_a_stream_is_finished_and_it_ends(tmp_path, has_keys):
    """Standard error is gone with it, and a second SIGHUP, as a shell sends it beside the kernel's, urges nobody."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: mine}")
    with python_on_terminal(
        "-m", "tests.server.scripted_server", "ends", "30", *([str(keys)] if has_keys else [])
    ) as server:
        port = int(re.search(r":(\d+)", server.wait_for("ready"))[1])
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("read again")  # the terminal is there: this is not the end
        with stream(port, Authorization="Bearer mine") as response:
            server.hang_up()
            server.process.send_signal(signal.SIGHUP)
            *_, last, done = events(response)
        assert json.loads(last)["choices"][0]["finish_reason"] == "stop"
        assert done == b"[DONE]"
        assert server.process.wait(25) == 0


def test_who_has_hangups_ignored_outlives_the_terminal():
    with python_on_terminal(
        "-c", IGNORING, sys.executable, "-m", "tests.server.scripted_server", "ends", "30"
    ) as server:
        port = int(re.search(r":(\d+)", server.wait_for("ready"))[1])
        server.hang_up()
        with stream(port) as response:
            assert events(response)[-1] == b"[DONE]"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(25) == 0


def test_a_log_that_nobody_reads_holds_nothing_up():
    """More lines than a pipe takes; then requests, a stream and the end are as ever."""
    with process("ends") as server:
        assert server.line() == "ready"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        with contextlib.closing(connection):
            for _ in range(400):
                connection.request("GET", "/v1/models")
                assert connection.getresponse().read()
        with server.stream() as response:
            server.popen.send_signal(signal.SIGTERM)
            *_, done = events(response)
        assert done == b"[DONE]"
        assert server.exit_code() == 0


def test_a_signal_while_the_model_loads_stops_at_once():
    with process("loads") as server:
        assert server.get("/health") == 200
        assert server.get("/ready") == 503
        server.popen.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_a_model_that_cannot_be_loaded_is_one_line():
    with process("lacks") as server:
        assert server.line() == "aserve: no-such-model: there is no such folder"
        assert server.exit_code() == 1
        assert server.line() == ""


@pytest.mark.timing
def test_health_answers_soon_after_the_process_starts():
    start_s = time.monotonic()
    with process("loads") as server:
        assert server.get("/health") == 200
        assert time.monotonic() - start_s < 2.0  # about 0.4 s on an idle machine


def test_serving_loads_no_torch():
    program = (
        "import sys, aserve.server, aserve.http; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
