"""Replicas on a cluster of Ray: `make test-ray`. What each part shows, and counts, is in scripts/ray_live.py."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
START_S = 300.0
FLAGS = [
    *("--model", "demo", "--min-replicas", "2", "--max-replicas", "3", "--replica-cpus", "0.5"),
    *("--scale-down-after", "15", "--max-num-seqs", "8", "--max-num-queued-reqs", "30"),
]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def aserve(*words: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aserve", "ray", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)


def test_replicas_that_have_no_room_are_one_line():
    """Before those below are there, whose cluster would be the one that is found."""
    done = aserve("--port", str(free_port()), "--replicas", "1000")
    assert done.returncode == 1
    assert "1000 replicas reserve 1000 CPU" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Two replicas, which may become three."""
    port = free_port()
    log = tmp_path_factory.mktemp("ray") / "log"
    environ = {**os.environ, "RAY_worker_niceness": "0"}
    command = [sys.executable, "-m", "aserve", "ray", "run", "--port", str(port), *FLAGS]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environ)
    url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while process.poll() is None and time.monotonic() < end_s and not is_ready(url):
            time.sleep(0.5)
        assert is_ready(url), log.read_text()[-2000:]
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.parametrize("part", ["streams", "whole", "retry", "leave", "route", "busy", "kill", "drain", "scale"])
def test_every_answer_is_accounted_for(url: str, part: str):
    command = [
        sys.executable,
        "scripts/ray_live.py",
        "--url",
        url,
        "--part",
        part,
        "--streams",
        "64",
        "--tokens",
        "400",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        done = aserve("--port", str(sock.getsockname()[1]))
    assert done.returncode == 1
    assert "cannot listen on 127.0.0.1" in done.stderr.splitlines()[-1]


def test_a_cluster_that_is_not_there_is_one_line():
    done = aserve("--address", "127.0.0.1:1", "--port", str(free_port()))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("aserve: connecting: ")
