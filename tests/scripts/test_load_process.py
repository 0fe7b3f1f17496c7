"""Servers are started in a group of their own, waited for, weighed, and ended with all their children."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from load.process import Server, ServerError, free_port, run_program

SERVER = Path(__file__).with_name("completions_server.py")
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, *sys.argv[1:]]); time.sleep(60)"

STOPPED = """
import asyncio, sys
from pathlib import Path
import uvloop
from load.process import Server, exit_on_sigterm
exit_on_sigterm()
with Server([sys.executable, "-S", "-c", "import time; time.sleep(60)"], 0, Path(sys.argv[1])) as server:
    print(*server.processes(), flush=True)
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(asyncio.sleep(60))
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended(pids):
    """Killed processes end soon, not at once."""
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, pids


@pytest.mark.slow
def test_a_server_with_a_child_is_waited_for_weighed_and_ended(tmp_path):
    port = free_port()
    command = [sys.executable, "-c", PARENT, str(SERVER), str(port)]
    with Server(command, port, tmp_path / "log") as server:
        assert 0 < server.wait_for("/health", 30) < 30
        body = b'{"prompt": [1], "max_tokens": 1}'
        assert server.wait_for("/v1/completions", 30, body) > 0
        footprint = server.footprint()
        pids = server.processes()
    assert footprint.num_processes == len(pids) == 2
    assert 5 < footprint.pss_mib <= footprint.rss_mib < 500
    assert_ended(pids)


def test_a_server_that_ends_is_an_error_with_the_end_of_its_log(tmp_path):
    command = [sys.executable, "-S", "-c", "raise SystemExit('no such model')"]
    with (
        Server(command, free_port(), tmp_path / "log") as server,
        pytest.raises(ServerError, match="it ended with 1: no such model"),
    ):
        server.wait_for("/health", 30)


def test_a_server_that_does_not_listen_is_given_up(tmp_path):
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with (
        Server(command, free_port(), tmp_path / "log") as server,
        pytest.raises(ServerError, match=r"no answer to /health within 0\.05 s"),
    ):
        server.wait_for("/health", 0.05)
    server.stop()


@pytest.mark.slow
def test_who_is_told_to_end_stops_the_server_first(tmp_path):
    scripts = Path(__file__).parents[2] / "scripts"
    command = [sys.executable, "-c", STOPPED, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=scripts, stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        (pid,) = map(int, popen.stdout.readline().split())
        assert alive(pid)
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(30) == 128 + signal.SIGTERM
    assert_ended([pid])


def test_a_programs_output_and_its_failures(tmp_path):
    def run(source, timeout_s=30.0):
        return run_program([sys.executable, "-S", "-c", source], tmp_path / "log", {"WORD": "x"}, timeout_s)

    assert run("import os; print(os.environ['WORD'])") == "x\n"
    with pytest.raises(ServerError, match="it ended with 1: too bad"):
        run("raise SystemExit('too bad')")
    with pytest.raises(ServerError, match=r"it took more than 0\.05 s"):
        run("import time; time.sleep(60)", 0.05)
