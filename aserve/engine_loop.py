"""The engine loop: plan, launch, land, commit, publish; and the mailboxes that it publishes to.

    loop | plan t+1 | launch t+1 |  await land t  | commit t | publish t | plan t+2 ...
    GPU  |====== forward t ======|====== forward t+1 ======|

The device runs a step ahead of the bookkeeping, or a few of a small model's: step t+1 is planned and launched before
the tokens of step t are known. Knows the order of the five verbs, who is waiting for which request, and what a failed
step means for them. Does not know what a block, a tensor, a prompt's text or HTTP is.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from math import inf
from typing import Final

import msgspec

from aserve.core.errors import (
    AserveError,
    DeviceLostError,
    InsufficientMemoryError,
    InvalidRequestError,
    NonFiniteLogitsError,
    QueueTimeoutError,
    StepFailedError,
    StepTimeoutError,
    UnavailableError,
)
from aserve.core.faults import WISHES, all_stacks, describe, log_fault, report
from aserve.core.ids import ChoiceId, RequestId
from aserve.core.outputs import FinishReason, SeqDelta, StepTokens
from aserve.core.plan import StepPlan, StepResult
from aserve.core.ports import Clock, Flight, Runner
from aserve.core.request import Request
from aserve.edges import is_fault
from aserve.mailbox import Mailbox
from aserve.metrics.engine_metrics import EngineMetrics, RequestTimes
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduler.statistics import Statistics
from aserve.tenants import Tenants
from aserve.text.stream import TextStream

WATCH_S: Final = 0.1
"""Between two looks at how late the event loop is."""

ENDED: Final = "the engine has stopped"

StreamMaker = Callable[[], TextStream]
"""Makes the stream of one more choice."""


_log = logging.getLogger(__name__)


class _NeverLaunched:
    """The flight of a step that could not be launched."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def land(self) -> StepResult:
        """Raises what `launch` raised."""
        raise self._error


class _Reader:
    """A request that somebody waits for: its times, where its deltas go, and how many choices are open."""

    __slots__ = ("mailbox", "num_open", "request", "times")

    def __init__(self, request: Request, times: RequestTimes) -> None:
        self.request = request
        self.mailbox = Mailbox(request.params.n, request.id, request.prompt_token_ids)
        self.times = times
        self.num_open = request.params.n


class _Choice:
    """One answer: its text so far, and who waits for it. num_cached: see SeqDelta, once it has begun."""

    __slots__ = ("num_cached", "reader", "stream")

    def __init__(self, reader: _Reader, stream: TextStream) -> None:
        self.reader = reader
        self.stream = stream
        self.num_cached = 0


class EngineLoop:
    """Steps the scheduler and the runner for as long as `run` runs. Every method is for one event loop's thread.

    token_texts: as a Tokenizer's. step_timeout_s: how long a step may be under way; 0 is for ever. tenants: whose
    accounts are charged.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        metrics: EngineMetrics,
        clock: Clock,
        token_texts: Mapping[int, str | None],
        *,
        step_timeout_s: float = 0.0,
        tenants: Tenants | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._metrics = metrics
        self._clock = clock
        self._token_texts = token_texts
        self._tenants = tenants or Tenants(clock)
        self._readers: dict[RequestId, _Reader] = {}
        self._choices: dict[ChoiceId, _Choice] = {}
        self._doorbell = asyncio.Event()
        self._has_ended = False
        self._step_timeout_s = step_timeout_s
        self._landing_since_s = inf
        """When the wait for the step that is next to land began; never, between two of them."""
        self._overdue: StepTimeoutError | None = None
        self._task: asyncio.Task[object] | None = None

    @property
    def num_readers(self) -> int:
        """Requests that are open: running, waiting, or finished and not yet left."""
        return len(self._readers)

    def statistics(self) -> Statistics:
        """A snapshot of the scheduler's counts."""
        return self._scheduler.statistics()

    def request(self, request_id: RequestId) -> Request:
        """The request that is open under that id. Raises `InvalidRequestError` if there is none."""
        if request_id not in self._readers:
            raise InvalidRequestError(f"request {request_id!r} is not open", "request_id")
        return self._readers[request_id].request

    @asynccontextmanager
    async def open(self, request: Request, new_stream: StreamMaker) -> AsyncIterator[Mailbox]:
        """Submit a request; inside the block read its mailbox, whose choices are written through a new stream each.

        Leaving the block, however that comes, frees all that the request holds.

        Raises `ContextLengthError` if it can never fit, `InvalidRequestError` if a request of the same id is open,
        `OverloadedError` if too much waits and `UnavailableError` if the loop has ended.
        """
        self._check_running()
        if request.id in self._readers:
            raise InvalidRequestError(f"a request with the id {request.id} is open already", "request_id")
        self._scheduler.add(request)
        with self._reading([request], [new_stream]) as (mailbox,):
            yield mailbox

    @asynccontextmanager
    async def fork(
        self, request_id: RequestId, index: int, branches: Sequence[Request], new_streams: Sequence[StreamMaker]
    ) -> AsyncIterator[list[Mailbox]]:
        """Continue a choice of an open request as new requests, whose prompts are its history; otherwise as `open`."""
        self._check_running()
        self._scheduler.fork(request_id, index, branches)
        with self._reading(branches, new_streams) as mailboxes:
            yield mailboxes

    def abort(self, request_id: RequestId) -> bool:
        """End a request with what it has, for the reason ABORT; False if none is open that has not ended."""
        reader = self._readers.get(request_id)
        if reader is None or reader.times.has_ended:
            return False
        self._scheduler.cancel(request_id)
        now = self._clock()
        for index in range(reader.request.params.n):
            choice = self._choices[request_id, index]
            last = SeqDelta(request_id, (), FinishReason.ABORT, None, index, choice.num_cached)
            self._publish_delta(choice, last, now)
        return True

    def _check_running(self) -> None:
        if self._has_ended:
            raise UnavailableError(ENDED)

    @contextmanager
    def _reading(self, requests: Sequence[Request], new_streams: Sequence[StreamMaker]) -> Iterator[list[Mailbox]]:
        """Wait for requests that the scheduler has; whatever happens, it has them no more afterwards."""
        readers: list[_Reader] = []
        try:
            for request, new_stream in zip(requests, new_streams, strict=True):
                reader = _Reader(request, self._metrics.arrived(request, request.arrival_s))
                readers.append(reader)
                self._tenants.account(request.tenant).opened(len(request.prompt_token_ids), self._clock())
                self._readers[request.id] = reader
                self._choices |= {(request.id, i): _Choice(reader, new_stream()) for i in range(request.params.n)}
            self._doorbell.set()
            yield [reader.mailbox for reader in readers]
        finally:  # finished, failed, cancelled or disconnected: one way out
            for reader in readers:
                self._charge(reader)
            for request in requests:
                self._readers.pop(request.id, None)
                for index in range(request.params.n):
                    self._choices.pop((request.id, index), None)
                self._scheduler.cancel(request.id)
            for reader in readers:
                reader.times.left(self._clock())

    def _charge(self, reader: _Reader) -> None:
        """Put what a request has come to on its tenant's account."""
        request, first = reader.request, self._choices.get((reader.request.id, 0))
        num_cached = 0 if first is None else first.num_cached
        account = self._tenants.account(request.tenant)
        account.closed(len(request.prompt_token_ids), num_cached, reader.times.num_tokens, self._clock())

    async def run(self) -> None:
        """Step until cancelled. What makes a step fail ends its request; a lost device, or a bug of ours, the loop."""
        self._task = asyncio.current_task()
        try:
            await self._step_forever()
        except asyncio.CancelledError:
            if self._overdue is not None:
                raise self._overdue from None
            raise
        finally:
            self._has_ended = True
            for request_id in tuple(self._readers):
                self._fail(request_id, UnavailableError(ENDED))

    async def watch(self) -> None:
        """Until cancelled, measure how late the event loop comes to what is due, and see that steps land in time.

        And end what is over its deadline while a step takes long.
        """
        while True:
            due_s = self._clock() + WATCH_S
            await asyncio.sleep(WATCH_S)
            now = self._clock()
            self._metrics.loop_lags_s.append(max(0.0, now - due_s))
            self._expire()
            if self._step_timeout_s and now - self._landing_since_s > self._step_timeout_s:
                self._give_up()

    def _give_up(self) -> None:
        """A step is overdue, and nothing can interrupt it: say where all threads are, and end the loop."""
        self._landing_since_s = inf
        self._overdue = StepTimeoutError(self._step_timeout_s)
        _log.critical("%s; the threads are here:\n%s", self._overdue.message, all_stacks())
        if self._task is not None:
            self._task.cancel()

    async def _step_forever(self) -> None:
        flying: deque[tuple[StepPlan, Flight]] = deque()
        while True:
            self._expire()
            plan = self._scheduler.plan(self._clock())
            if plan is not None:
                flight = self._launch(plan)
                flying.append((plan, flight))
                if isinstance(flight, _NeverLaunched):  # nothing is to be launched behind it
                    while flying:
                        await self._land(flying)
            if flying and (plan is None or len(flying) >= self._scheduler.max_in_flight):
                await self._land(flying)
            elif plan is None:
                await self._doorbell.wait()
            self._doorbell.clear()  # no await between here and plan(): no wake-up is lost

    def _expire(self) -> None:
        """End the requests whose deadline has come: with what they have, or unserved."""
        expired = self._scheduler.expire(self._clock())
        if expired is not None:
            self._publish(StepTokens([], [], list(expired.deltas)))
            for request_id in expired.unserved:
                self._fail(request_id, QueueTimeoutError("the request's deadline came while it waited to be served"))

    def _launch(self, plan: StepPlan) -> Flight:
        try:
            return self._runner.launch(plan)
        except WISHES:
            raise
        except BaseException as error:  # an edge: a step's failure is found out about where it would have landed
            return _NeverLaunched(error)

    async def _land(self, flying: deque[tuple[StepPlan, Flight]]) -> None:
        """Wait for the oldest step and publish what it brought. If it failed, those on top of it are gone as well."""
        plan, flight = flying.popleft()
        try:
            result = await self._landed(flight)
        except BaseException as error:  # the edge of a step
            if not is_fault(error):
                raise
            while flying:
                await self._discard(flying.popleft()[1])
            await self._take_back(plan, error)
            return
        if result.failed:
            for request_id in self._scheduler.expel(result.failed):
                self._fail(request_id, NonFiniteLogitsError())
        self._publish(self._scheduler.commit(result))

    async def _discard(self, flight: Flight) -> None:
        """Wait for a step that stood on one that failed, so that the next launch finds the device in order."""
        try:
            await self._landed(flight)
        except BaseException as error:
            if not is_fault(error):
                raise

    async def _landed(self, flight: Flight) -> StepResult:
        """Wait for a flight, under the eyes of `watch`."""
        self._landing_since_s = self._clock()
        try:
            return await flight.land()
        finally:
            self._landing_since_s = inf

    async def _take_back(self, plan: StepPlan, error: BaseException) -> None:
        """A step failed: see whether the device is still there, undo the step, and end its culprit once that is known.

        Raises `DeviceLostError`.
        """
        self._metrics.step_failed(error)
        try:
            await self._landed(self._runner.recover())
        except BaseException as lost:
            if not is_fault(lost):
                raise
            _log.critical("the device is lost: %s\nafter a step failed: %s", describe(lost), describe(error))
            raise DeviceLostError from error
        out_of_memory = isinstance(error, InsufficientMemoryError | MemoryError)
        culprit = self._scheduler.revert(plan.step_id, out_of_memory=out_of_memory)
        if culprit is not None:
            fault_id = log_fault(_log, "a step", error, culprit)
            if out_of_memory:
                self._fail(culprit, InsufficientMemoryError(f"no memory for this request alone (fault {fault_id})"))
            else:
                self._fail(culprit, StepFailedError(type(error).__name__, fault_id))

    def _fail(self, request_id: RequestId, error: AserveError) -> None:
        """End a request for its reader."""
        if (reader := self._readers.get(request_id)) is not None:
            reader.times.left(self._clock(), FinishReason.ERROR)
            reader.mailbox.fail(error)

    def _publish(self, step: StepTokens) -> None:
        """The one loop over a step's tokens: most are looked up together, and each is text as it is."""
        now = self._clock()
        token_texts = self._token_texts
        all_times: list[RequestTimes] = []
        others: list[tuple[_Choice, SeqDelta]] = []
        for choice_id, token_id in zip(step.choices, step.token_ids, strict=True):
            choice = self._choices.get(choice_id)
            if choice is None:
                continue
            reader = choice.reader
            all_times.append(reader.times)
            request_id, index = choice_id
            try:
                text = token_texts[token_id]
                is_out = text is not None and choice.stream.is_plain and reader.mailbox.offer(index, text, token_id)
            except BaseException as error:
                self._publish_failed(reader, error)
                continue
            if not is_out:
                others.append((choice, SeqDelta(request_id, (token_id,), None, None, index, choice.num_cached)))
        self._metrics.one_token_each(now, all_times)
        for delta in step.deltas:
            choice = self._choices.get((delta.request_id, delta.index))
            if choice is not None:
                choice.num_cached = delta.num_cached_tokens
                choice.reader.times.tokens(now, len(delta.token_ids), delta.queued_s)
                others.append((choice, delta))
        for choice, delta in others:  # after all tokens are counted, for any of them may end its request
            try:
                self._publish_delta(choice, delta, now)
            except BaseException as error:
                self._publish_failed(choice.reader, error)

    def _publish_failed(self, reader: _Reader, error: BaseException) -> None:
        """The edge of a request: its text cannot be made or handed over, and nobody else's is affected."""
        if isinstance(error, WISHES):
            raise error
        request_id = reader.request.id
        self._scheduler.cancel(request_id)
        self._fail(request_id, report(_log, "publishing", error, request_id))

    def _publish_delta(self, choice: _Choice, delta: SeqDelta, now: float) -> None:
        """A delta, as text, to its reader."""
        text = choice.stream.push(delta)
        if text is None:
            return
        reader = choice.reader
        if text.finish_reason is not None:
            if delta.finish_reason is None:  # a stop string, which the scheduler does not see
                self._scheduler.finish(delta.request_id, delta.index)
            reader.num_open -= 1
            if not reader.num_open:
                reader.times.finished(now, text.finish_reason)
            text = msgspec.structs.replace(text, timings=reader.times.timings(now))
        reader.mailbox.put(text)
