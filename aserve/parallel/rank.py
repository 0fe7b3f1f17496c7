"""The process of a rank besides the first, which rank 0 starts with a task and two pipes.

    main thread     reads what it is told; when the pipe ends, rank 0 has, and it ends at once, whatever it is at
    loading         a thread that loads, meets the others, measures, and makes the runner
    runner          computes steps, in the order in which they are told

Begun by child.py.
"""

import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec.structs import replace

from aserve.core.errors import AserveError
from aserve.core.faults import describe
from aserve.parallel.share import make_runner
from aserve.parallel.task import RankTask
from aserve.runner.failures import SkippedStepError
from aserve.runner.flight import Landed
from aserve.runner.groups import GroupBrokenError, GroupLeftError
from aserve.runner.rank_messages import (
    AdapterRead,
    Answer,
    Begin,
    Capture,
    Close,
    Drop,
    Failed,
    Join,
    Load,
    PipeReader,
    PipeWriter,
    Ready,
    Run,
    Told,
    decode_told,
    frame,
)
from aserve.runner.runner import ModelRunner

EXIT_ORPHANED: Final = 1
EXIT_FAILED: Final = 70


class Rank:
    """One rank's life, and whom it answers."""

    def __init__(self, task: RankTask, told_fd: int, answer_fd: int) -> None:
        self._task = task
        self._reader = PipeReader(told_fd)
        self._writer = PipeWriter(answer_fd)
        self._while_loading: queue.SimpleQueue[Join | Begin] = queue.SimpleQueue()
        self._made: ModelRunner | None = None
        self._num_recoveries = 0
        self._adapters = ThreadPoolExecutor(1, thread_name_prefix="aserve-adapters")

    def serve(self) -> None:
        """Load, then do what is told. Does not return."""
        threading.Thread(target=self._load, name="aserve-loading", daemon=True).start()
        while (payloads := self._reader.read()) is not None:
            for payload in payloads:
                self._heed(decode_told(payload))
        os._exit(EXIT_ORPHANED)

    def _heed(self, told: Told) -> None:
        match told:
            case Join() | Begin():
                self._while_loading.put(told)
            case Run():
                self._num_recoveries += told.recovers
                landed = self._runner.follow(told.plan, told.masked, recovers=told.recovers)
                landed.add_done_callback(partial(self._landed, self._num_recoveries))
            case Drop():
                self._runner.drop(told.adapter)
            case Load():
                self._adapters.submit(self._load_adapter, told)
            case Capture():
                self._runner.capture()
            case Close():
                if self._made is not None:
                    self._made.close()
                os._exit(0)

    @property
    def _runner(self) -> ModelRunner:
        assert self._made is not None, "rank 0 waits until it is"
        return self._made

    def _answer(self, answer: Answer) -> None:
        with suppress(OSError):  # rank 0 has gone, which the main thread sees
            self._writer.write(frame(answer))

    def _landed(self, num_recoveries: int, landed: Landed) -> None:
        """Tell of a step that failed here by itself, and not because another rank had left."""
        error = landed.result()
        if isinstance(error, BaseException) and not isinstance(
            error, SkippedStepError | GroupBrokenError | GroupLeftError
        ):
            self._answer(replace(_failed(error), num_recoveries=num_recoveries))

    def _load_adapter(self, told: Load) -> None:
        error = None
        try:
            self._runner.load(told.adapter, told.folder)
        except BaseException as raised:  # the edge of a thread
            error = f"rank {self._task.rank}: {_failed(raised).message}"
        self._answer(AdapterRead(told.ticket, error))

    def _load(self) -> None:
        try:
            self._made = make_runner(self._task, self._answer, self._while_loading.get)
        except BaseException as error:  # the edge of a thread
            self._answer(_failed(error))
            os._exit(EXIT_FAILED)
        self._answer(Ready())


def _failed(error: BaseException) -> Failed:
    return Failed(type(error).__name__, error.message if isinstance(error, AserveError) else describe(error))
