"""The engine loop: plan, launch, land, commit, publish; and the mailboxes that it publishes to.

    loop | plan t+1 | launch t+1 |  await land t  | commit t | publish t | plan t+2 ...
    GPU  |====== forward t ======|====== forward t+1 ======|

The device runs a step ahead of the bookkeeping, or a few of a small model's: step t+1 is planned and launched before
the tokens of step t are known. Knows the order of the five verbs, who is waiting for which request, and what a failed
step means for them. Does not know what a block, a tensor, a prompt's text or HTTP is.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from aserve.core.errors import (
    AserveError,
    InvalidRequestError,
    QueueTimeoutError,
    StepFailedError,
    UnavailableError,
)
from aserve.core.ids import ChoiceId, RequestId
from aserve.core.outputs import FinishReason, SeqDelta, StepTokens
from aserve.core.plan import StepPlan
from aserve.core.ports import Clock, Flight, Runner
from aserve.core.request import Request
from aserve.mailbox import Mailbox
from aserve.metrics.engine_metrics import EngineMetrics, RequestTimes
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduler.statistics import Statistics
from aserve.tenants import Tenants
from aserve.text.stream import TextStream

WATCH_S: Final = 0.1
"""Between two looks at how late the event loop is."""

StreamMaker = Callable[[], TextStream]
"""Makes the stream of one more choice."""


class _Reader:
    """A request that somebody waits for: its times, where its deltas go, and how many choices are open."""

    __slots__ = ("mailbox", "num_open", "request", "times")

    def __init__(self, request: Request, times: RequestTimes) -> None:
        self.request = request
        self.mailbox = Mailbox(request.params.n, request.id)
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

    token_texts: as a Tokenizer's. tenants: whose accounts are charged.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        metrics: EngineMetrics,
        clock: Clock,
        token_texts: Mapping[int, str | None],
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
        self._ended: AserveError | None = None

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

    def _check_running(self) -> None:
        if self._ended is not None:
            raise self._ended

    @contextmanager
    def _reading(self, requests: Sequence[Request], new_streams: Sequence[StreamMaker]) -> Iterator[list[Mailbox]]:
        """Wait for requests that the scheduler has."""
        readers = []
        for request, new_stream in zip(requests, new_streams, strict=True):
            reader = _Reader(request, self._metrics.arrived(request, self._clock()))
            choices = {(request.id, index): _Choice(reader, new_stream()) for index in range(request.params.n)}
            self._readers[request.id] = reader
            self._choices |= choices
            self._tenants.account(request.tenant).opened(len(request.prompt_token_ids), self._clock())
            readers.append(reader)
        self._doorbell.set()
        try:
            yield [reader.mailbox for reader in readers]
        finally:  # finished, failed, cancelled or disconnected: one way out
            for reader in readers:
                self._charge(reader)
                del self._readers[reader.request.id]
                for index in range(reader.request.params.n):
                    del self._choices[reader.request.id, index]
                self._scheduler.cancel(reader.request.id)
                reader.times.left(self._clock())

    def _charge(self, reader: _Reader) -> None:
        """Put what a request has come to on its tenant's account."""
        request, num_cached = reader.request, self._choices[reader.request.id, 0].num_cached
        account = self._tenants.account(request.tenant)
        account.closed(len(request.prompt_token_ids), num_cached, reader.times.num_tokens, self._clock())

    async def run(self) -> None:
        """Step until cancelled. A step that raises ends the requests in it; anything else that raises ends the loop."""
        try:
            await self._step_forever()
        finally:
            self._ended = UnavailableError("the engine has stopped")
            self._fail(list(self._readers), self._ended)

    async def watch(self) -> None:
        """Measure, until cancelled, how late the event loop comes to what is due: all tasks of the process share it.

        And end what is over its deadline while a step takes long.
        """
        while True:
            due_s = self._clock() + WATCH_S
            await asyncio.sleep(WATCH_S)
            self._metrics.loop_lags_s.append(max(0.0, self._clock() - due_s))
            self._expire()

    async def _step_forever(self) -> None:
        flying: deque[tuple[StepPlan, Flight]] = deque()
        while True:
            self._expire()
            plan = self._scheduler.plan(self._clock())
            if plan is not None and (launched := self._launch(plan)) is not None:
                flying.append(launched)
            if flying and (plan is None or len(flying) == self._scheduler.max_in_flight):
                if not await self._land(*flying.popleft()):
                    while flying:
                        await self._discard(flying.popleft()[1])  # planned on top of the failed step
            elif plan is None:
                await self._doorbell.wait()
            self._doorbell.clear()  # no await between here and plan(): no wake-up is lost

    def _expire(self) -> None:
        """End the requests whose deadline has come: with what they have, or unserved."""
        expired = self._scheduler.expire(self._clock())
        if expired is not None:
            self._publish(StepTokens([], [], list(expired.deltas)))
            self._fail(expired.unserved, QueueTimeoutError("the request's deadline came while it waited to be served"))

    def _launch(self, plan: StepPlan) -> tuple[StepPlan, Flight] | None:
        try:
            return plan, self._runner.launch(plan)
        except Exception as error:  # the edge where a step's failure becomes its requests' failure
            self._step_failed(plan, error)
            return None

    async def _land(self, plan: StepPlan, flight: Flight) -> bool:
        """Wait for a step and publish what it brought; False if it raised."""
        try:
            result = await flight.land()
        except Exception as error:  # the same edge, later
            self._step_failed(plan, error)
            return False
        self._publish(self._scheduler.commit(result))
        return True

    @staticmethod
    async def _discard(flight: Flight) -> None:
        """Wait for a step whose result no longer matters, so that the next launch finds the device in order."""
        with suppress(Exception):  # the step before it failed and has been reported; this one stood on it
            await flight.land()

    def _step_failed(self, plan: StepPlan, error: Exception) -> None:
        self._metrics.step_failed(error)
        failed = self._scheduler.fail(plan.step_id)
        self._fail(failed, StepFailedError(f"the step computing this request failed ({type(error).__name__})"))

    def _fail(self, request_ids: Iterable[RequestId], error: AserveError) -> None:
        for request_id in request_ids:
            if (reader := self._readers.get(request_id)) is not None:
                reader.times.left(self._clock(), FinishReason.ERROR)
                reader.mailbox.fail(error)

    def _publish(self, step: StepTokens) -> None:
        """The one loop over a step's tokens: most are looked up together, and each is text as it is."""
        now = self._clock()
        texts = map(self._token_texts.__getitem__, step.token_ids)
        all_times: list[RequestTimes] = []
        others: list[tuple[_Choice, SeqDelta]] = []
        for choice_id, token_id, text in zip(step.choices, step.token_ids, texts, strict=True):
            choice = self._choices.get(choice_id)
            if choice is None:
                continue
            reader = choice.reader
            all_times.append(reader.times)
            request_id, index = choice_id
            if text is None or not choice.stream.is_plain or not reader.mailbox.offer(index, text, token_id):
                others.append((choice, SeqDelta(request_id, (token_id,), None, None, index, choice.num_cached)))
        self._metrics.one_token_each(now, all_times)
        for delta in step.deltas:
            choice = self._choices.get((delta.request_id, delta.index))
            if choice is not None:
                choice.num_cached = delta.num_cached_tokens
                choice.reader.times.tokens(now, len(delta.token_ids))
                others.append((choice, delta))
        for choice, delta in others:  # after all tokens are counted, for any of them may end its request
            self._publish_delta(choice, delta, now)

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
        reader.mailbox.put(text)
