"""One case of the sweep: a world, a fault at the k-th call of a point, and everything that must hold afterwards."""

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from aserve import adapters
from aserve.http import access
from tests.faults.points import CANARY, Point, Trap
from tests.faults.world import DEAD_STATUS, EMBEDDER, Answer, InlineExecutor, World, held

ACCESS = access._lines.name


@dataclass
class Outcome:
    """What became of a case. complaints: what does not hold, in words."""

    has_fired: bool = False
    has_ended_own: bool = False
    has_ended_engine: bool = False
    is_told_by_raising: bool = False
    complaints: list[str] = field(default_factory=list)


class Log(logging.Handler):
    """All that is logged, and what asyncio complains of."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.surprises: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def surprised(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception handler of the event loop's."""
        self.surprises.append(f"{context.get('message')}: {context.get('exception')!r}")

    @property
    def faults(self) -> list[str]:
        """Lines that tell of a fault."""
        return [line for line in self.lines if line.startswith(("ERROR", "CRITICAL"))]


class Sweep:
    """Cases on one event loop. An async context manager."""

    async def __aenter__(self) -> "Sweep":
        loop = asyncio.get_running_loop()
        gc.collect()
        gc.freeze()  # a runner that is closed collects garbage: not that of all modules each time
        self._log = Log()
        logging.getLogger().addHandler(self._log)
        logging.getLogger(ACCESS).setLevel(logging.INFO)
        loop.set_default_executor(InlineExecutor(1))
        loop.set_exception_handler(self._log.surprised)
        self._expected = {World: await self._undisturbed(World)}
        return self

    async def _undisturbed(self, kind: type[World]) -> dict[str, Answer]:
        """What everybody is told in a world without a fault."""
        self._log.lines.clear()
        async with kind() as world:
            expected = await world.answers() | {"next": await world.next_answer()}
        assert all(answer.status in kind.right_statuses for answer in expected.values()), expected
        assert not self._log.faults, self._log.faults
        return expected

    async def __aexit__(self, *_: object) -> None:
        gc.unfreeze()
        logging.getLogger().removeHandler(self._log)
        logging.getLogger(ACCESS).setLevel(logging.NOTSET)

    async def run(self, point: Point, k: int, fault: type[BaseException]) -> Outcome:
        """A case, in a world of its own."""
        if point.world not in self._expected:
            self._expected[point.world] = await self._undisturbed(point.world)
        self._log.lines.clear()
        self._log.surprises.clear()
        before = _resources()
        outcome = Outcome()
        world = point.world(failing_steps=point.failing_steps)
        trap = Trap(world, k, fault)
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(adapters, "PLACE_S", 3600.0)  # a machine that stands still is nobody's fault
            if point.is_early:
                point.arm(world, trap, patches)
            async with world:
                if not point.is_early:
                    point.arm(world, trap, patches)
                try:
                    answers = await world.answers()
                    patches.undo()
                    answers["next"] = await world.next_answer()
                    for _ in range(3):
                        await asyncio.sleep(0)
                except TimeoutError:
                    outcome.complaints.append("somebody waits for ever")
                    answers = {}
                outcome.has_fired = trap.has_fired
                outcome.has_ended_engine = world.has_died
                outcome.complaints += self._judged(point, trap, answers, outcome)
                outcome.complaints += _kept(world)
        outcome.complaints += [f"left behind: {name}" for name in sorted(_resources() - before)]
        outcome.complaints += self._logged(point, outcome)
        return outcome

    def collect(self) -> list[str]:
        """What is complained of when garbage is."""
        self._log.surprises.clear()
        gc.collect()
        return list(self._log.surprises)

    def _judged(self, point: Point, trap: Trap, answers: dict[str, Answer], outcome: Outcome) -> Iterator[str]:
        """Who was told what."""
        expected = self._expected[point.world]
        changed = [name for name, answer in answers.items() if answer.told != expected[name].told]
        for name, answer in answers.items():
            if (answer.escaped or answer.broken) and not (point.cuts and name == trap.owner and not answer.broken):
                yield f"{name}: raised {answer.escaped}, broke {answer.broken!r}"
            if CANARY.encode() in answer.body:
                yield f"{name}: heard the canary"
        if outcome.has_ended_engine:
            if not point.may_end_engine:
                yield "the engine ended"
            others = [answers[name] for name in changed]
            if any(answer.error is None or answer.status not in (200, DEAD_STATUS) for answer in others):
                yield f"the engine ended and told {[bytes(answer.body[-60:]) for answer in others]}"
            return
        outcome.has_ended_own = bool(changed)
        outcome.is_told_by_raising = changed == [EMBEDDER]
        if changed and (point.of_nobody or (point.of_caller and not trap.owner)):
            yield f"nobody's fault changed {changed}: {bytes(answers[changed[0]].body[-200:])!r}"
        if len(changed) > 1 or (trap.owner and changed not in ([], [trap.owner])):
            yield f"a fault of {trap.owner!r} changed {changed}"
        for name in changed:
            yield from _ended(name, answers[name], expected[name], cuts=point.cuts)

    def _logged(self, point: Point, outcome: Outcome) -> Iterator[str]:
        faults = [line for line in self._log.faults if not point.failing_steps or "ValueError" not in line]
        if len(faults) > 1:
            yield f"logged {len(faults)} times: {[line[:100] for line in faults]}"
        if outcome.has_ended_own and not (faults or point.cuts or outcome.is_told_by_raising):
            yield "ended a request and is not in the log"
        if any(CANARY in line for line in self._log.lines):
            yield "the canary is in the log"
        yield from (f"asyncio: {surprise}" for surprise in self._log.surprises)


def _ended(name: str, answer: Answer, whole: Answer, *, cuts: bool) -> Iterator[str]:
    """Whether an answer that is not the whole one is an error, after a part of the whole one."""
    if answer.error is None and not cuts:
        yield f"{name}: no error ends {answer.status} {bytes(answer.body[-300:])!r}"
    elif answer.error is not None and answer.status not in (200, 500, DEAD_STATUS):
        yield f"{name}: ended with {answer.status}"
    if answer.is_stream and not answer.begins(whole):
        yield f"{name}: was told {answer.texts}"


def _kept(world: World) -> Iterator[str]:
    """What the engine has not let go of."""
    yield from (f"held: {what}" for what in held(world))
    if not world.has_died:
        yield from (f"lost: {what}" for what in world.lost())
    try:
        world.scheduler.check()
    except AssertionError as error:
        yield f"check: {error}"


def _resources() -> set[str]:
    """Tasks, threads and descriptors."""
    tasks = {f"task {task.get_name()} {id(task)}" for task in asyncio.all_tasks()}
    threads = {f"thread {thread.name}" for thread in threading.enumerate()}
    return tasks | threads | {f"descriptor {fd}" for fd in os.listdir("/proc/self/fd")}
