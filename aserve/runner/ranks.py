"""The processes of the ranks besides the first: started, told, watched and ended. The side of rank 0.

    rank 0    runner's thread -- Run, Drop ... --> pipe --> rank 1      it tells in the order of its own steps
              watch thread  <-- pipe <-- Failed, AdapterRead ...        it sees a pipe's end, and who stands still

A rank is a Python of its own, and not a fork or a multiprocessing child: nothing that a program has
done is done twice, and its main module is not imported again. It ends by itself when its pipe does, which is when this
process ends in whatever way. Where one is lost the others are killed, so that nobody waits for them for ever.
"""

import fcntl
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from aserve.core import errors
from aserve.core.errors import AdapterError, AserveError, RankLostError
from aserve.core.ids import AdapterId
from aserve.core.plan import StepPlan
from aserve.models.sharding import Group
from aserve.runner.following import followed, masked_rows
from aserve.runner.groups import GroupBrokenError, GroupLeftError, MeetingFile
from aserve.runner.rank_messages import (
    AdapterRead,
    Answer,
    Capture,
    Close,
    Drop,
    Failed,
    Load,
    PipeReader,
    PipeWriter,
    Run,
    Told,
    decode_answer,
    frame,
)

LOOK_S: Final = 0.25
"""Between two looks at whether a rank stands still."""
STOPPED_LOOKS: Final = 6
"""In a row, before a rank that is stopped (SIGSTOP, a debugger) is given up."""
CAUSE_S: Final = 1.0
"""For a rank to say why it has left the group."""
CLOSE_S: Final = 5.0
STUCK_S: Final = 10.0
"""For steps to land when all is closed, before the ranks that they may wait for are killed."""

PIPE_BYTES: Final = 2**20
"""That one holds, where the system allows it."""

A = TypeVar("A", bound=Answer)
_log = logging.getLogger(__name__)


class _Process:
    """One rank: its process, and both pipes."""

    def __init__(self, rank: int, command: Sequence[str], fds: Sequence[int]) -> None:
        self.rank = rank
        told_read, told_write = os.pipe()
        with suppress(AttributeError, OSError):  # so that a step with many prompts is written without a wait
            fcntl.fcntl(told_write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        answer_read, answer_write = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*command, str(told_read), str(answer_write), str(os.getpid())],
                pass_fds=(told_read, answer_write, *fds),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is for the first rank, which tells the others
            )
        except BaseException:
            os.close(told_write)
            os.close(answer_read)
            raise
        finally:
            os.close(told_read)
            os.close(answer_write)
        self.writer = PipeWriter(told_write)
        self.reader = PipeReader(answer_read)
        self.num_stopped = 0

    def is_stopped(self) -> bool:
        """Whether it has been told to stand still, by a signal."""
        if not hasattr(os, "waitid"):
            return False
        with suppress(ChildProcessError):
            found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            return found is not None and found.si_code == os.CLD_STOPPED
        return False


class Ranks:
    """The `Followers` of rank 0. group: theirs, left when one is lost. meeting: where it meets; closed with this."""

    def __init__(self, commands: Sequence[Sequence[str]], group: Group, meeting: MeetingFile) -> None:
        """commands: of rank 1 and on; two file descriptors, and this process, are added to each. Raises OSError."""
        self._group = group
        self._meeting = meeting
        self._changed = threading.Condition()
        self._answers: dict[type[Any], dict[int, Any]] = {}
        self._adapters_read: dict[tuple[int, int], str | None] = {}
        self._failure: AserveError | None = None
        """Why a rank but the first has failed, since the last recovery."""
        self._lost: RankLostError | None = None
        self._num_recoveries = self._num_tickets = 0
        self._is_closing = False
        self._processes: list[_Process] = []
        self._start_error: BaseException | None = None
        self._started = threading.Event()
        # It starts them too: a rank asks the system to be killed when the thread ends that started it.
        self._watcher = threading.Thread(target=self._watch, args=(commands,), name="aserve-ranks", daemon=True)
        self._watcher.start()
        self._started.wait()
        if self._start_error is not None:
            self.close()
            raise self._start_error

    @property
    def lost(self) -> AserveError | None:
        """Which rank is gone, and how; None while all are there."""
        return self._lost

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes."""
        return tuple(each.process.pid for each in self._processes)

    # What they are told.

    def run(self, plan: StepPlan, *, recovers: bool) -> None:
        """As the Protocol says."""
        if recovers:
            with self._changed:
                self._failure = None
                self._num_recoveries += 1
        self.tell(Run(followed(plan), masked_rows(plan), recovers))

    def drop(self, adapter: AdapterId) -> None:
        """As the Protocol says."""
        with suppress(RankLostError):
            self.tell(Drop(adapter))

    def capture(self) -> None:
        """As the Protocol says."""
        self.tell(Capture())

    def load(self, adapter: AdapterId, folder: str) -> None:
        """Have all of them read an adapter; waits. Raises `AdapterError`, and `RankLostError`."""
        with self._changed:
            ticket = self._num_tickets = self._num_tickets + 1
        self.tell(Load(ticket, adapter, folder))
        wanted = [(each.rank, ticket) for each in self._processes]
        self._wait(lambda: all(key in self._adapters_read for key in wanted))
        found = [self._adapters_read.pop(key) for key in wanted]
        error = next(filter(None, found), None)
        if error is not None:
            raise AdapterError(error)

    def tell(self, message: Told) -> None:
        """Write a message to each of them. Raises `RankLostError`."""
        framed = frame(message)
        for each in self._processes:
            if self._lost is not None:
                raise self._lost
            try:
                each.writer.write(framed)
            except OSError:
                self._lose(each, "has closed its pipe")

    # What they answer.

    def answers(self, kind: type[A]) -> list[A]:
        """Wait until each of them has given this answer, and take them. Raises what one has failed of."""
        self._wait(lambda: len(self._answers.get(kind, ())) == len(self._processes))
        found = self._answers.pop(kind)
        return [found[rank] for rank in sorted(found)]

    def _wait(self, has_come: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: has_come() or self._failure is not None or self._lost is not None)
            if not has_come():
                raise self._failure or self._lost or AssertionError("nobody woke it")

    def check(self) -> None:
        """As the Protocol says."""
        if (error := self._lost or self._failure) is not None:
            raise error

    def cause_of(self, error: BaseException) -> BaseException:
        """As the Protocol says."""
        if not isinstance(error, GroupBrokenError | GroupLeftError):
            return error
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._lost is not None, CAUSE_S)
            return self._lost or self._failure or error

    def _received(self, each: _Process, answer: Answer) -> None:
        with self._changed:
            if isinstance(answer, AdapterRead):
                self._adapters_read[each.rank, answer.ticket] = answer.error
            elif isinstance(answer, Failed) and answer.num_recoveries < self._num_recoveries:
                return  # what it failed of has been taken back
            elif isinstance(answer, Failed):
                self._failure = _error_of(each.rank, answer)
                self._group.leave()  # on a device nobody else would end the call in which this rank waits
            else:
                self._answers.setdefault(type(answer), {})[each.rank] = answer
            self._changed.notify_all()

    # The watch.

    def _watch(self, commands: Sequence[Sequence[str]]) -> None:
        try:
            for rank, command in enumerate(commands, start=1):
                self._processes.append(_Process(rank, command, self._meeting.fds))
        except BaseException as error:  # the edge of a thread
            self._start_error = error
            return
        finally:
            self._started.set()
        by_fd = {each.reader.fd: each for each in self._processes}
        while by_fd:
            ready, _, _ = select.select(list(by_fd), [], [], LOOK_S)
            for fd in ready:
                payloads = by_fd[fd].reader.read()
                for payload in payloads or ():
                    self._received(by_fd[fd], decode_answer(payload))
                if payloads is None:
                    self._ended(by_fd.pop(fd))
            for each in by_fd.values():
                each.num_stopped = each.num_stopped + 1 if each.is_stopped() else 0
                if each.num_stopped == STOPPED_LOOKS:
                    self._lose(each, "stands still: it was stopped by a signal")

    def _ended(self, each: _Process) -> None:
        """Its pipe is closed: it is ending, or has."""
        with suppress(subprocess.TimeoutExpired):
            each.process.wait(CLOSE_S)
        code = each.process.returncode
        how = "closed its pipe" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        if not self._is_closing:
            self._lose(each, how)

    def _lose(self, each: _Process, how: str) -> None:
        with self._changed:
            if self._lost is None and not self._is_closing:
                self._lost = RankLostError(f"rank {each.rank} (process {each.process.pid}) {how}")
                _log.critical("%s", self._lost.message)
        self.kill()
        self._group.leave()
        with self._changed:
            self._changed.notify_all()

    def kill(self) -> None:
        """End all of them at once, whatever they are at."""
        for each in self._processes:
            each.process.kill()

    def close(self) -> None:
        """Have them end, and wait for that; who does not is killed. Nothing is left of them. Idempotent."""
        self._is_closing = True
        with suppress(RankLostError):
            self.tell(Close())
        end_s = time.monotonic() + CLOSE_S
        for each in self._processes:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, end_s - time.monotonic()))
        self.kill()
        for each in self._processes:
            each.process.wait()
        self._watcher.join()
        self._group.leave()
        for each in self._processes:
            os.close(each.writer.fd)
            os.close(each.reader.fd)
        self._processes.clear()
        self._meeting.close()


def _error_of(rank: int, failed: Failed) -> AserveError:
    """What a rank raised, as it would be raised here."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, AserveError):
        with suppress(TypeError):  # one that makes its own message
            error: AserveError = kind(failed.message)
            return error
    return RankLostError(f"rank {rank} failed: {failed.kind}\n{failed.message}")


def python_command(module: str, *arguments: str) -> list[str]:
    """This Python, running the `main` of a module that it finds where this process does.

    Raises `RankLostError` where the program is not run by a Python that can be started.
    """
    if not sys.executable or not hasattr(os, "fork"):
        raise RankLostError("tensor_parallel_size: no further Python process can be started here")
    places = [place or os.getcwd() for place in sys.path]
    program = f"import sys; sys.path[:] = {places!r}; from {module} import main; main()"
    return [sys.executable, "-P", "-c", program, *arguments]
