"""Replay: the recorded plans launched one after the other, as many under way as there were.

    recording  Planned 7   Planned 8   Landed 7   Planned 9   Landed 8 ...
    runner     launch 7    launch 8    land 7     launch 9    land 8        and what lands is compared

Knows the runner as a Protocol. Rows, blocks and their moves are as recorded; so is what the device has to wait for.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from aserve.core.errors import RecordingError
from aserve.core.faults import describe
from aserve.core.ids import SeqId
from aserve.core.plan import StepResult
from aserve.core.ports import Flight, Runner
from aserve.edges import is_fault
from aserve.recording.files import Recording, landed_plans
from aserve.recording.plans import from_record
from aserve.recording.records import Init, Landed, Plan, Planned
from aserve.replay.comparing import Comparer, Comparison
from aserve.replay.forced import Answers, ForcedMask, masked_answers, runs

OnStep = Callable[[Planned, Landed, StepResult], None]


class Replayed(NamedTuple):
    """What came of a replay. seconds: that it took, recorded_s: that the same steps took, each by itself."""

    comparison: Comparison
    seconds: float
    recorded_s: float


def check_replayable(recording: Recording, *, checks: bool) -> None:
    """Raise `RecordingError` for what a replay cannot do, before a model is loaded."""
    header = recording.header
    if checks and not header.has_prompts:
        raise RecordingError(
            f"{recording.path}: recorded without prompts: other tokens are computed, and nothing can be checked; "
            "record with --record-prompts, or replay without --check"
        )
    num_adapters = len(header.options.lora_modules)
    for record in landed_plans(recording):
        for init in record.plan.inits if isinstance(record, Planned) else ():
            if init.adapter is not None and init.adapter >= num_adapters:
                raise RecordingError(
                    f"{recording.path}: request {init.request_id} has an adapter that was loaded while the engine ran; "
                    "a replay has only those of --lora-modules"
                )


class Replay:
    """Of one recording by one runner."""

    def __init__(self, recording: Recording, runner: Runner) -> None:
        self._recording = recording
        self._runner = runner
        self._comparer = Comparer()
        self._answers: Answers = masked_answers(recording)
        self._num_landed: dict[SeqId, int] = dict.fromkeys(self._answers, 0)
        self._flying: deque[tuple[Planned, Flight]] = deque()
        self._recorded_s = 0.0

    async def run(self, last_step: int | None = None, on_step: OnStep | None = None) -> Replayed:
        """Launch and land all steps, or those up to one. on_step: is told of each that has landed.

        Raises `RecordingError` where a step fails, or is in the recording twice.
        """
        started_s = time.perf_counter()
        for record in landed_plans(self._recording):
            if isinstance(record, Planned):
                if last_step is not None and record.plan.step_id > last_step:
                    continue
                self._comparer.planned(record.plan)
                plan = from_record(record.plan, self._mask)
                self._flying.append((record, self._runner.launch(plan)))
            elif isinstance(record, Landed) and self._flying:
                await self._land(record, on_step)
                if record.step_id == last_step:
                    break
        for planned, flight in self._flying:  # whose landing was not recorded
            await self._landed(planned.plan, flight)
        return Replayed(self._comparer.comparison, time.perf_counter() - started_s, self._recorded_s)

    async def _land(self, recorded: Landed, on_step: OnStep | None) -> None:
        planned, flight = self._flying.popleft()
        if planned.plan.step_id != recorded.step_id:
            raise RecordingError(
                f"{self._recording.path}: step {recorded.step_id} landed before step {planned.plan.step_id}"
            )
        result = await self._landed(planned.plan, flight)
        self._recorded_s += recorded.took_s
        self._comparer.landed(planned.plan, recorded, result)
        if self._answers:
            for piece, places in runs(planned.plan, recorded.token_ids, recorded.num_accepted):
                if piece.seq_id in self._num_landed:
                    self._num_landed[piece.seq_id] += len(places)
        if on_step is not None:
            on_step(planned, recorded, result)

    async def _landed(self, plan: Plan, flight: Flight) -> StepResult:
        try:
            return await flight.land()
        except BaseException as error:
            if not is_fault(error):
                raise
            raise RecordingError(f"step {plan.step_id} failed in the replay: {describe(error)}") from error

    def _mask(self, init: Init) -> ForcedMask:
        answer = self._answers.get(init.seq_id, [])
        return ForcedMask(answer, self._num_landed.get(init.seq_id, 0), self._recording.header.vocab_size)
