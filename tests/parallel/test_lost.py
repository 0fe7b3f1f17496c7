"""What becomes of a server, and of what it has started, when one of its processes is killed or stands still.

python -m pytest -m thorough tests/parallel/test_lost.py        20 of each kind
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from aserve.core.config import Options
from aserve.parallel.task import RankTask
from tests.e2e.server_process import ServerProcess, question, serving

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.e2e]

GONE_S = 5.0
NOTICED_S = 2.0
ENDS_S = 10.0
"""Of a server that has noticed: it says so to its clients, and ends."""
LONG = question("Tell me a story.", max_tokens=1500, ignore_eos=True, temperature=1.0)


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def wait_until_gone(pids: list[int]) -> None:
    end_s = time.monotonic() + GONE_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end_s, f"left behind: {alive}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """A process that has ended, and that nobody has asked about yet, is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def left_in_memory() -> set[str]:
    """Files that ranks might leave, by name."""
    return {path.name for place in ("/dev/shm", "/tmp") for path in Path(place).glob("aserve-*")}


class Clients:
    """A stream and a plain request on a server, under way until it ends; what they are told."""

    def __init__(self, server: ServerProcess) -> None:
        self.events: list[str] = []
        self.answer: httpx.Response | None = None
        self._begun = threading.Event()
        self._threads = [
            threading.Thread(target=work, args=(server.url,), daemon=True) for work in (self._stream, self._ask)
        ]
        for thread in self._threads:
            thread.start()
        assert self._begun.wait(30.0)

    def _stream(self, url: str) -> None:
        path = f"{url}/v1/chat/completions"
        with httpx.stream("POST", path, json={**LONG, "stream": True}, timeout=60.0) as response:
            for line in response.iter_lines():
                self.events.append(line)
                if len(self.events) > 20:
                    self._begun.set()

    def _ask(self, url: str) -> None:
        self.answer = httpx.post(f"{url}/v1/chat/completions", json=LONG, timeout=60.0)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30.0)


def loses_a_rank(signum: int) -> None:
    before = left_in_memory()
    with serving("--tensor-parallel-size", "2") as server:
        server.wait_until_ready()
        [rank] = children(server.popen.pid)
        clients = Clients(server)
        os.kill(rank, signum)
        begun_s = time.monotonic()
        server.line_with("rank 1 ")
        assert time.monotonic() - begun_s < NOTICED_S
        clients.join()
        assert server.popen.wait(ENDS_S) == 70
        assert clients.answer is not None
        assert clients.answer.status_code == 503
        assert "retry-after" in clients.answer.headers
        assert any('"code":"engine_unavailable"' in line for line in clients.events)
        wait_until_gone([rank])
    assert left_in_memory() <= before


def loses_the_parent(signum: int) -> None:
    before = left_in_memory()
    with serving("--tensor-parallel-size", "2") as server:
        server.wait_until_ready()
        [rank] = children(server.popen.pid)
        if signum == signal.SIGSTOP:
            os.kill(rank, signum)  # it cannot see its pipe end
        server.popen.kill()
        server.popen.wait()
        wait_until_gone([rank])
    assert left_in_memory() <= before


def test_a_rank_is_killed() -> None:
    loses_a_rank(signal.SIGKILL)


TASK = RankTask(Options(tensor_parallel_size=2, device="cpu"), 1, "/nowhere", 1)
PARENT = """
import sys, time
from aserve.runner.groups import MeetingFile, RankGroup
from aserve.runner.ranks import Ranks, python_command
meeting = MeetingFile()
command = python_command("aserve.parallel.child", sys.argv[1])
print(*Ranks([command], RankGroup(0, 2, meeting.path, 1.0), meeting).pids, flush=True)
time.sleep(60)
"""


def test_a_rank_that_loads_ends_when_its_parent_is_killed() -> None:
    """The rest of its life is seen in the thorough tests below."""
    task = msgspec.json.encode(TASK).decode()
    with subprocess.Popen([sys.executable, "-c", PARENT, task], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        [rank] = map(int, parent.stdout.readline().split())
        parent.kill()
        wait_until_gone([rank])


SCRIPT = """
from aserve import LLM, SamplingParams

print("once")
greedy = SamplingParams(temperature=0.0, max_tokens=5)
with LLM("demo", tensor_parallel_size=2) as first, LLM("demo", tensor_parallel_size=2) as second:
    for llm in (first, second):
        print(llm.generate("Once upon a time", greedy, use_tqdm=False)[0].text)
print(*[path.read_text() for path in __import__("pathlib").Path("/proc/self/task").glob("*/children")])
"""


@pytest.mark.thorough
def test_two_engines_in_a_script_without_a_guard(tmp_path: Path) -> None:
    """Catches ranks that import the main module again, and what an engine leaves behind when it is closed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    once, first, second, children = done.stdout.rstrip("\n").split("\n")
    assert once == "once"
    assert first == second != ""
    assert not children.split()


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV])
def test_a_rank_is_lost(signum: int, number: int) -> None:
    loses_a_rank(signum)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_the_parent_is_lost(signum: int, number: int) -> None:
    """The second: while the rank is stopped."""
    loses_the_parent(signum)
