"""A world that is recorded: memory is short, so that there is something to tell, and tokens are scored for the tape.

The tape has its thread, which writes as soon as something waits. What was recorded is replayed when the engine has
ended: up to where the recording ends it is what happened, whatever failed.
"""

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from aserve.core.config import Options
from aserve.engine import EngineParts
from aserve.recording import tape as tapes
from aserve.recording.files import Recording, create
from aserve.recording.records import Header
from aserve.recording.scheduler import RecordedScheduler
from aserve.recording.tape import WHOLE, Tape
from aserve.replay.replaying import Replay
from aserve.scheduler.scheduler import Scheduler
from aserve.simulation.meter import Meter
from tests.engines import VOCAB_SIZE
from tests.fakes import ScriptedRunner
from tests.faults.small_world import SmallWorld
from tests.faults.visits import new_folder
from tests.faults.world import Answer

LOOK_S = 0.001
LOOKS = 5000
MAX_BYTES = 10**7


class _Lines(logging.Handler):
    """What the tape logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _File:
    """The tape's, whose calls can be trapped."""

    raw: BinaryIO

    def write(self, data: bytes | memoryview) -> int:
        """As a raw file's."""
        return self.raw.write(data)

    def close(self) -> None:
        """Likewise."""
        self.raw.close()


class RecordedWorld(SmallWorld):
    """tape: once it is entered. Frames are small and written at once, so that there are some in each case."""

    tape: Tape

    def __init__(self, *, failing_steps: tuple[int, ...] = ()) -> None:
        super().__init__(failing_steps=failing_steps)
        self._ends = ExitStack()
        self._log = _Lines()
        self.file = _File()

    def _create(self, path: str) -> _File:
        self.file.raw = create(path)
        return self.file

    def scheduler_class(self, **numbers: Any) -> Scheduler:
        """One that tells the tape, which there is later."""
        told = lambda told: self.tape.tell(told), lambda error: self.tape.give_up(error)
        return RecordedScheduler(*told, clock=lambda: self.clock.read(), scores_all=True, **numbers)

    async def __aenter__(self) -> "RecordedWorld":
        patches = self._ends.enter_context(pytest.MonkeyPatch.context())
        patches.setattr(tapes, "FLUSH_S", LOOK_S)
        patches.setattr(tapes, "FRAME_RECORDS", 16)
        patches.setattr(tapes, "create", self._create)
        logger = logging.getLogger(tapes.__name__)
        logger.addHandler(self._log)
        self._ends.callback(logger.removeHandler, self._log)
        self._path = Path(self._ends.enter_context(new_folder())) / "a.rec"
        config = super()._parts().config
        header = Header(
            version="0",
            started_s=0.0,
            model="scripted",
            fingerprint="",
            vocab_size=VOCAB_SIZE,
            device="cpu",
            dtype="float32",
            options=Options(),
            config=config,
            has_prompts=True,
            has_logprobs=True,
        )
        self.tape = Tape(str(self._path), header, max_bytes=MAX_BYTES)
        self._ends.callback(self.tape.close)
        await super().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        with self._ends:
            await super().__aexit__(*exc)
            if exc == (None, None, None):
                await self._check_recording()

    def _parts(self) -> EngineParts:
        return replace(super()._parts(), on_close=self.tape.close)

    async def answers(self) -> dict[str, Answer]:
        """Of all clients, when what they came to is written, or is not going to be."""
        answers = await super().answers()
        for _ in range(LOOKS):
            if not (self.tape.is_on and self.tape._waiting):
                break
            await asyncio.sleep(LOOK_S)
        return answers

    async def _check_recording(self) -> None:
        """It can be read, ends with one line if it ended early, and what is in it is what happened."""
        assert not self.tape._thread.is_alive()
        recording, meter = Recording(self._path), Meter()
        records = list(recording.records())
        for record in records:
            meter.tell(record)
        ended_early = [line for line in self._log.lines if "has ended after" in line]
        assert len(self._log.lines) == len(ended_early) == (recording.ending != WHOLE), (recording.ending, self._log)
        found = await Replay(recording, ScriptedRunner(model=self.new_model())).run()
        assert found.comparison.is_equal, found.comparison
        assert found.comparison.num_tokens > 100 or recording.ending != WHOLE, recording.ending
