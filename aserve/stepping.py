"""Stepper: plan, launch, land, commit; and what becomes of all requests when one of the four raises.

    launch, land    the step is taken back, `Scheduler.revert`, and runs again by halves until its culprit is found
    plan, commit    the bookkeeping is torn: it is made anew, `Scheduler.restart`; who tears it twice at one token ends
    add, cancel...  from outside of steps: it is made anew before the next plan

Knows the order of the verbs and how many steps may be under way. Who reads what comes out is told by an `Audience`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import inf
from typing import Final, Protocol

from aserve.core.errors import (
    AserveError,
    DeviceLostError,
    InsufficientMemoryError,
    StepFailedError,
)
from aserve.core.faults import WISHES, describe, log_fault
from aserve.core.ids import RequestId
from aserve.core.outputs import StepTokens
from aserve.core.plan import StepPlan, StepResult
from aserve.core.ports import Clock, Flight, MayBeLost, Runner
from aserve.edges import aside, is_fault
from aserve.metrics.engine_metrics import EngineMetrics
from aserve.observe.observer import Observer
from aserve.observe.step import ObservedStep
from aserve.scheduler.scheduler import Scheduler

MAX_RESTARTS: Final = 64
"""Of the bookkeeping, with no step that lands between two of them."""

_log = logging.getLogger(__name__)


class Audience(Protocol):
    """Those who wait for what steps bring."""

    def publish(self, step: StepTokens, now: float) -> None:
        """What a step brought that landed at `now`, on the engine's clock. Raises nothing."""
        ...

    def fail(self, request_id: RequestId, error: AserveError) -> None:
        """A request has ended so, if somebody still waits for it."""
        ...

    def open_requests(self) -> Collection[RequestId]:
        """The requests that somebody has and has not left, ended or not."""
        ...

    def expire(self) -> None:
        """End what is over its deadline, before a plan. Raises nothing."""
        ...

    def is_told(self, request_id: RequestId) -> bool:
        """Whether an open request's end has been told."""
        ...


class _NeverLaunched:
    """The flight of a step that could not be launched."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def land(self) -> StepResult:
        """Raises what `launch` raised."""
        raise self._error


class Stepper:
    """Steps a scheduler and a runner. awaited: the flight whose landing is waited for, if one is.

    observer: is told of each step while somebody looks on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        metrics: EngineMetrics,
        clock: Clock,
        audience: Audience,
        observer: Observer,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._mortal = runner if isinstance(runner, MayBeLost) else None
        self._metrics = metrics
        self._clock = clock
        self._audience = audience
        self._observer = observer
        self._flying: deque[tuple[StepPlan, Flight, float, ObservedStep | None]] = deque()
        self._last_landed_s = 0.0
        self._torn_by: BaseException | None = None
        self._num_restarts = 0
        self._restarted_behind_s = 0.0
        self.awaited: Flight | None = None

    @property
    def lost(self) -> AserveError | None:
        """Why the runner computes nothing any more, if it says so by itself."""
        return self._mortal.lost if self._mortal is not None else None

    @property
    def is_torn(self) -> bool:
        """Whether the bookkeeping is to be made anew before the next plan."""
        return self._torn_by is not None

    @contextmanager
    def may_tear(self) -> Iterator[None]:
        """Around a call into the scheduler that is no part of a step: what is no AserveError may leave it torn."""
        try:
            yield
        except (AserveError, *WISHES):
            raise
        except BaseException as error:
            self._torn_by = error
            raise

    async def run_until_idle(self) -> None:
        """Step until there is nothing to do; it has not waited since it saw that.

        Each turn plans and launches a step, and lands the oldest while as many are under way as may be, or if none can
        be planned. Raises `DeviceLostError`, and what the scheduler raises when nothing helps.
        """
        flying, scheduler, audience = self._flying, self._scheduler, self._audience
        while True:
            if scheduler.next_deadline_s < inf:
                audience.expire()
            if self._torn_by is not None:
                await self._start_over(self._torn_by, is_of_step=False)
            try:
                now = self._clock()
                plan = scheduler.plan(now)
            except WISHES:
                raise
            except BaseException as error:
                await self._start_over(error)
                continue
            if plan is None:
                if not flying:
                    return
                await self._land()
            num_kept = scheduler.max_in_flight - 1 if plan is None or self._launch(plan, now) else 0
            while len(flying) > num_kept:
                await self._land()

    def _launch(self, plan: StepPlan, now: float) -> bool:
        """False for a step that could not be launched, behind which nothing is to be."""
        seen = None
        if self._observer.is_watched:
            seen = ObservedStep(now, self._clock())
            aside(_log, "observing", None, self._observer.planned, plan, seen)
        try:
            self._flying.append((plan, self._runner.launch(plan), now, seen))
        except WISHES:
            raise
        except BaseException as error:  # an edge: a step's failure is found out about where it would have landed
            self._flying.append((plan, _NeverLaunched(error), now, seen))
            return False
        if seen is not None:
            seen.launched_s = self._clock()
        return True

    async def _land(self) -> None:
        """Wait for the oldest step and publish what it brought. If it failed, those on top of it are gone as well."""
        plan, flight, launched_s, seen = self._flying.popleft()
        self.awaited = flight
        if seen is not None:
            seen.waited_s = self._clock()
        try:
            result = await flight.land()
            now = self._clock()
        except BaseException as error:  # the edge of a step
            self.awaited = None
            if not is_fault(error):
                raise
            await self._take_back(plan, error)
            return
        self.awaited = None
        assert result.step_id == plan.step_id, f"step {result.step_id} landed before step {plan.step_id}"
        took_s = now - max(launched_s, self._last_landed_s)
        try:
            if result.failed:
                for request_id, reason in self._scheduler.expel(result.failed).items():
                    self._audience.fail(request_id, reason)
            step = self._scheduler.commit(result, took_s)
        except WISHES:
            raise
        except BaseException as error:
            await self._start_over(error, now)
            return
        self._last_landed_s = now
        if seen is not None:
            seen.took_s, seen.landed_s, seen.committed_s = took_s, now, self._clock()
        self._audience.publish(step, now)
        if seen is not None and self._observer.is_watched:
            aside(_log, "observing", None, self._observer.published, plan, result, step, seen)

    async def _landed(self, flight: Flight) -> StepResult:
        """Wait for a flight, and let others see that."""
        self.awaited = flight
        try:
            return await flight.land()
        finally:
            self.awaited = None

    async def _drop_flying(self) -> None:
        """Wait for the steps that stand on one that is gone, so that the next launch finds the device in order."""
        while self._flying:
            try:
                await self._landed(self._flying.popleft()[1])
            except BaseException as error:
                if not is_fault(error):
                    raise

    # When a verb raises.

    async def _take_back(self, plan: StepPlan, error: BaseException) -> None:
        """A step failed: see whether the device is still there, undo the step, and end its culprit once that is known.

        Raises `DeviceLostError`.
        """
        aside(_log, "counting", None, self._metrics.step_failed, error)
        self._tell_taken_back(plan.step_id)
        await self._drop_flying()
        try:
            await self._landed(self._runner.recover())
        except BaseException as lost:
            if not is_fault(lost):
                raise
            _log.critical("the device is lost: %s\nafter a step failed: %s", describe(lost), describe(error))
            raise DeviceLostError from error
        try:
            culprit = self._scheduler.revert(plan.step_id, out_of_memory=_is_memory(error))
        except WISHES:
            raise
        except BaseException as torn_by:
            await self._start_over(torn_by)
            return
        if culprit is not None:
            self._blame(culprit, error)

    async def _start_over(self, error: BaseException, now: float = 0.0, *, is_of_step: bool = True) -> None:
        """The bookkeeping is torn: it is made anew, and what has not been told yet is computed again.

        now: when the step landed that was being taken in. is_of_step: a step raised it, and not who came or left, to
        whom it has been told. Raises `error` when nothing helps.
        """
        self._torn_by = None
        if self._last_landed_s > self._restarted_behind_s:
            self._num_restarts, self._restarted_behind_s = 0, self._last_landed_s
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            raise error
        restart = self._scheduler.restart(self._audience.open_requests())
        self._tell_taken_back(None)
        self._audience.publish(restart.taken_in, now)
        lost = [request_id for request_id in restart.lost if not self._audience.is_told(request_id)]
        for request_id in lost:
            self._blame(request_id, error)
        if is_of_step and not lost:
            log_fault(_log, "scheduling", error)
        await self._drop_flying()
        await asyncio.sleep(0)  # it may be called again and again, with nothing to wait for

    def _tell_taken_back(self, step_id: int | None) -> None:
        if self._observer.is_watched:
            aside(_log, "observing", None, self._observer.taken_back, step_id)

    def _blame(self, request_id: RequestId, error: BaseException) -> None:
        """End a request at which steps fail."""
        fault_id = log_fault(_log, "a step", error, request_id)
        if _is_memory(error):
            failure: AserveError = InsufficientMemoryError(f"no memory for this request alone (fault {fault_id})")
        else:
            failure = StepFailedError(type(error).__name__, fault_id)
        self._audience.fail(request_id, failure)


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, InsufficientMemoryError | MemoryError)
