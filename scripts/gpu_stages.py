"""Commands under time limits, one after another or side by side, and a JSON line in stages.jsonl when each has ended.

A record: stage, ending ("ok", "failed", "cut off" at its limit, "not started"), seconds, limit_s, results (the JSON
lines that the command printed, each of which begins with {"bench"), end (its last other lines).
"""

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from load.process import process_tree

GRACE_S: Final = 20.0
"""From SIGTERM to SIGKILL; a benchmark gives its server 15."""
KILLED_S: Final = 10.0
"""From SIGKILL on, in which memory comes back; one that a driver holds up is not waited for any longer."""
POLL_S: Final = 0.01
END_LINES: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36

Record = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A command with seconds to run in, and what its environment has besides this process's."""

    name: str
    limit_s: float
    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


class Stages:
    """Runs stages for `seconds` in all; on_record is called after each record, from this thread. Linux only."""

    def __init__(self, folder: Path, seconds: float, on_record: Callable[[Record], None]) -> None:
        self._folder, self._on_record = folder, on_record
        self._end_s = time.monotonic() + seconds

    def run(self, group: Sequence[Stage]) -> bool:
        """Those of a group side by side, but one whose limit is more than the time left; whether all ended well.

        Processes that a stage has left running, servers say, are killed when its group has ended.
        """
        left_s = self._end_s - time.monotonic()
        records = []
        for stage in group:
            if stage.limit_s > left_s:
                end = [f"{left_s:.0f} s were left of all, and it may take {stage.limit_s:g}"]
                records.append(_record(stage, "not started", 0.0, end))
                self._keep(records[-1])
        started = [stage for stage in group if stage.limit_s <= left_s]
        with ThreadPoolExecutor(max(1, len(started))) as pool, ending_all():
            for future in as_completed([pool.submit(self._run, stage) for stage in started]):
                records.append(future.result())
                self._keep(records[-1])
        return all(record["ending"] == "ok" for record in records)

    def refuse(self, group: Sequence[Stage], reason: str) -> None:
        """Records of stages that are not started."""
        for stage in group:
            self._keep(_record(stage, "not started", 0.0, [reason]))

    def _run(self, stage: Stage) -> Record:
        log = running_log(self._folder, stage.name)
        begin_s = time.monotonic()
        with log.open("wb") as output:
            popen = subprocess.Popen(
                stage.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(stage.environ),
                process_group=0,
            )
            try:
                ending = "failed" if popen.wait(stage.limit_s) else "ok"
            except subprocess.TimeoutExpired:
                ending = "cut off"
                _end(popen)
        return _record(stage, ending, time.monotonic() - begin_s, log.read_text(errors="replace").splitlines())

    def _keep(self, record: Record) -> None:
        """Into stages.jsonl, its output into log.txt."""
        with (self._folder / "stages.jsonl").open("a") as stages:
            stages.write(json.dumps(record) + "\n")
        log = running_log(self._folder, record["stage"])
        if log.exists():
            with (self._folder / "log.txt").open("a") as all_logs:
                all_logs.write(f"== {record['stage']}\n{log.read_text(errors='replace')}\n")
            log.unlink()
        self._on_record(record)


@contextmanager
def ending_all() -> Iterator[None]:
    """At its end every process is killed that was started meanwhile, by this one, its children and theirs.

    They are found although their parents are gone: Linux makes them this process's children.
    """
    prctl = ctypes.CDLL(None).prctl
    before = process_tree(os.getpid())
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        pids = [pid for pid in process_tree(os.getpid()) if pid not in before]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + KILLED_S
        while any(map(_runs, pids)) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def running_log(folder: Path, name: str) -> Path:
    """Where a stage writes while it runs."""
    return folder / f"running-{name}.log"


def parse_log(lines: Sequence[str]) -> tuple[list[Record], list[str]]:
    """The results in a command's output, and its last other lines."""
    results, others = [], []
    for line in lines:
        result = _result(line)
        if result is None:
            others.append(line)
        else:
            results.append(result)
    return results, others[-END_LINES:]


def read_records(folder: Path) -> dict[str, Record]:
    """The last record of each stage, in their order. A stage that was running when all ended is "cut off"."""
    path = folder / "stages.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = {record["stage"]: record for record in map(json.loads, lines)}
    for log in sorted(folder.glob("running-*.log")):
        name = log.stem.removeprefix("running-")
        results, end = parse_log(log.read_text(errors="replace").splitlines())
        ended = {"ending": "cut off", "seconds": None, "limit_s": None}
        records[name] = {"stage": name, **ended, "results": results, "end": end}
    return records


def _result(line: str) -> Record | None:
    if not line.startswith('{"bench"'):
        return None
    try:
        result: Record = json.loads(line)
    except ValueError:  # the line that was being written when its process was killed
        return None
    return result


def _record(stage: Stage, ending: str, seconds: float, output: Sequence[str]) -> Record:
    results, end = parse_log(output)
    times = {"seconds": round(seconds, 1), "limit_s": stage.limit_s}
    return {"stage": stage.name, "ending": ending, **times, "results": results, "end": end}


def _runs(pid: int) -> bool:
    """Whether a child has yet to end. One of a stage's own, which has been waited for, does not."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _end(popen: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # it ended by itself
        os.killpg(popen.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            popen.wait(GRACE_S)
        os.killpg(popen.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        popen.wait(KILLED_S)
