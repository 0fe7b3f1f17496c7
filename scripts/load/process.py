"""A server in a process group of its own: started, waited for, weighed, and stopped whatever it does. Linux only."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

POLL_S: Final = 0.01
STOP_S: Final = 15.0
"""What a server gets after the first signal, before it is killed."""


class ServerError(Exception):
    """The server ended, or did not do in time what it was waited for; the message has the end of its log."""


class Footprint(NamedTuple):
    """A process tree: its processes, the sum of their resident sets, and the same with shared pages counted once."""

    num_processes: int
    rss_mib: float
    pss_mib: float


class Server:
    """A running command. Use as a context manager: leaving it ends every process of the group.

    log: where its output goes. environ: added to this process's own.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path, environ: Mapping[str, str] | None = None) -> None:
        self.port, self.log = port, log
        self.launched_s = time.perf_counter()
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | dict(environ or {}),
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, path: str, timeout_s: float, body: bytes | None = None) -> float:
        """Ask until the answer is 200: seconds since the launch. Raises ServerError."""
        while True:
            if self._popen.poll() is not None:
                raise ServerError(f"it ended with {self._popen.returncode}: {self._log_end()}")
            left_s = timeout_s - (time.perf_counter() - self.launched_s)
            if left_s <= 0:
                raise ServerError(f"no answer to {path} within {timeout_s:g} s: {self._log_end()}")
            if self._ask(path, body, left_s) == 200:
                return time.perf_counter() - self.launched_s
            time.sleep(POLL_S)

    def footprint(self) -> Footprint:
        """Its memory and its children's, now."""
        sizes = [memory for pid in self.processes() if (memory := _memory_kib(pid))]
        return Footprint(len(sizes), sum(rss for rss, _ in sizes) / 1024, sum(pss for _, pss in sizes) / 1024)

    def processes(self) -> list[int]:
        """Its process id and those of its descendants."""
        return process_tree(self._popen.pid)

    def stop(self) -> None:
        """SIGTERM to the server, and after a while SIGKILL to its whole group. Idempotent."""
        if self._popen.poll() is None:
            self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):  # it is killed with the rest of its group
                self._popen.wait(STOP_S)
        with suppress(ProcessLookupError):  # nobody was left
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _ask(self, path: str, body: bytes | None, timeout_s: float) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request("POST" if body else "GET", path, body, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def _log_end(self) -> str:
        return log_end(self.log)


def log_end(log: Path) -> str:
    """What a server or program said last."""
    return log.read_text(errors="replace")[-1500:].strip()


def run_program(command: Sequence[str], log: Path, environ: Mapping[str, str], timeout_s: float) -> str:
    """What a command prints, which has so long for it. Raises ServerError; ends all its processes. log: its stderr."""
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=os.environ | dict(environ),
            text=True,
            start_new_session=True,
        ) as popen,
    ):
        try:
            printed, _ = popen.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerError(f"it took more than {timeout_s:g} s: {log_end(log)}") from None
        finally:
            with suppress(ProcessLookupError):  # nobody was left
                os.killpg(popen.pid, signal.SIGKILL)
    if popen.returncode != 0:
        raise ServerError(f"it ended with {popen.returncode}: {log_end(log)}")
    return printed


def process_tree(root: int) -> list[int]:
    """A process id and those of its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    tree = [root]
    for pid in tree:  # grows while it is walked
        tree += children.get(pid, [])
    return tree


def exit_on_sigterm() -> None:
    """End as if by sys.exit when told to, so that the servers that were started are stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _parent(process: Path) -> int | None:
    try:
        after_name = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None  # it has ended
    return int(after_name[1])


def _memory_kib(pid: int) -> tuple[int, int] | None:
    """Resident and proportional set sizes; None for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines[1:])}
    return sizes["Rss"], sizes["Pss"]
