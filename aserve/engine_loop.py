"""The engine loop: steps for as long as it runs, and the mailboxes that it publishes to.

    loop | plan t+1 | launch t+1 |  await land t  | commit t | publish t | plan t+2 ...
    GPU  |====== forward t ======|====== forward t+1 ======|

The device runs a step ahead of the bookkeeping, or a few of a small model's: step t+1 is planned and launched before
the tokens of step t are known; see stepping.py. Knows who is waiting for which request. Does not know what a block, a
tensor, a prompt's text or HTTP is.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import msgspec

from aserve.core.errors import AserveError, InvalidRequestError, QueueTimeoutError, StepTimeoutError, UnavailableError
from aserve.core.faults import WISHES, all_stacks, log_fault, report
from aserve.core.ids import ChoiceId, RequestId
from aserve.core.outputs import FinishReason, SeqDelta, StepTokens
from aserve.core.ports import Clock, Flight, Runner
from aserve.core.request import Request
from aserve.edges import aside, is_fault
from aserve.mailbox import Mailbox
from aserve.metrics.engine_metrics import EngineMetrics, RequestTimes
from aserve.observe.observer import Observer
from aserve.scheduler.scheduler import Scheduler
from aserve.stepping import Stepper
from aserve.tenants import Tenants
from aserve.text.stream import TextStream, VectorStream

WATCH_S: Final = 0.1
"""Between two looks at how late the event loop is."""

ENDED: Final = "the engine has stopped"

StreamMaker = Callable[[], TextStream | VectorStream]
"""Makes the stream of one more choice."""

_log = logging.getLogger(__name__)


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

    __slots__ = ("num_cached", "offer", "reader", "stream", "times")

    def __init__(self, reader: _Reader, stream: TextStream | VectorStream) -> None:
        self.reader, self.offer, self.times = reader, reader.mailbox.offer, reader.times
        self.stream = stream
        self.num_cached = 0


class EngineLoop:
    """Steps the scheduler and the runner for as long as `run` runs. Every method is for one event loop's thread.

    token_texts: as a Tokenizer's. step_timeout_s: how long a step may be under way; 0 is for ever. tenants: whose
    accounts are charged. observer: tells whoever looks on.
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
        self.observer = Observer(scheduler.readings, clock, metrics)
        self._steps = Stepper(scheduler, runner, metrics, clock, self, self.observer)
        self._metrics = metrics
        self._clock = clock
        self._token_texts = token_texts
        self._tenants = tenants or Tenants(clock)
        self._readers: dict[RequestId, _Reader] = {}
        self._choices: dict[ChoiceId, _Choice] = {}
        self._doorbell = asyncio.Event()
        self._has_ended, self._step_timeout_s = False, step_timeout_s
        self._overdue: AserveError | None = None
        self._watched: Flight | None = None
        self._watched_since_s = 0.0
        self._task: asyncio.Task[object] | None = None

    @property
    def num_readers(self) -> int:
        """Requests that are open: running, waiting, or finished and not yet left."""
        return len(self._readers)

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
        with self._may_tear():
            self._scheduler.add(request)
        with self._reading([request], [new_stream]) as (mailbox,):
            yield mailbox

    @asynccontextmanager
    async def fork(
        self, request_id: RequestId, index: int, branches: Sequence[Request], new_streams: Sequence[StreamMaker]
    ) -> AsyncIterator[list[Mailbox]]:
        """Continue a choice of an open request as new requests, whose prompts are its history; otherwise as `open`."""
        self._check_running()
        with self._may_tear():
            self._scheduler.fork(request_id, index, branches)
        with self._reading(branches, new_streams) as mailboxes:
            yield mailboxes

    def abort(self, request_id: RequestId) -> bool:
        """End a request with what it has, for the reason ABORT; False if none is open that has not ended."""
        reader = self._readers.get(request_id)
        if reader is None or reader.times.has_ended:
            return False
        now = self._clock()
        self._publish_others(self._give_back(request_id, is_abort=True), [], now)
        for index in range(reader.request.params.n if reader.num_open else 0):
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
                if request.explain:
                    aside(_log, "explaining", request.id, self.observer.explain, request)
            self._doorbell.set()
            yield [reader.mailbox for reader in readers]
        finally:  # finished, failed, cancelled or disconnected: one way out
            for reader in readers:
                aside(_log, "charging", reader.request.id, self._charge, reader)
            for request in requests:
                self._readers.pop(request.id, None)
                for index in range(request.params.n):
                    self._choices.pop((request.id, index), None)
                self._give_back(request.id)
            for reader in readers:
                aside(_log, "ending", reader.request.id, reader.mailbox.leave)
                aside(_log, "counting", reader.request.id, reader.times.left, self._clock(), FinishReason.ABORT)
                aside(_log, "telling", reader.request.id, reader.times.told, self._clock())
                if reader.request.explain:
                    aside(_log, "explaining", reader.request.id, self.observer.leave, reader.request)

    @contextmanager
    def _may_tear(self) -> Iterator[None]:
        """Around a call into the scheduler: if that breaks its bookkeeping, the next step makes it anew."""
        try:
            with self._steps.may_tear():
                yield
        except BaseException:
            self._doorbell.set()
            raise

    def _give_back(self, request_id: RequestId, *, is_abort: bool = False) -> Sequence[SeqDelta]:
        """Have the scheduler forget a request, now or when its bookkeeping is made anew; returns what is told of it."""
        was_torn = self._steps.is_torn
        try:
            with self._may_tear():
                if is_abort:
                    return self._scheduler.abort(request_id)
                self._scheduler.cancel(request_id)
        except WISHES:
            raise
        except BaseException as error:
            if not was_torn:  # else it is the same fault that shows again
                log_fault(_log, "giving back", error, request_id)
        return ()

    def _choice_ended(self, reader: _Reader, index: int, reason: FinishReason, num_last: int) -> None:
        """Count a choice. num_last: tokens of its last delta, which has all of a choice that was ranked."""
        request, params = reader.request, reader.request.params
        num_tokens = num_last if params.is_ranked else reader.times.num_tokens
        if params.n > 1 and not params.is_ranked and reason is not FinishReason.ABORT:  # whose history is gone
            num_tokens = len(self._scheduler.history(request.id, index)) - len(request.prompt_token_ids)
        reader.times.choice_ended(reason, num_tokens)

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
            self.end()

    def end(self) -> None:
        """Refuse requests and end the open ones: what `run` does last, and who starts it in a task that never began."""
        self._has_ended = True
        self.observer.close()
        for request_id in tuple(self._readers):
            self.fail(request_id, UnavailableError(ENDED))

    async def watch(self) -> None:
        """Until cancelled, measure how late the event loop comes to what is due, and see that steps land in time.

        And end what is over its deadline while a step takes long.
        """
        while True:
            try:
                await self._look()
            except BaseException as error:  # whoever keeps watch does not fall
                if not is_fault(error):
                    raise
                log_fault(_log, "watching", error)
                await asyncio.sleep(WATCH_S)

    async def _look(self) -> None:
        due_s = self._clock() + WATCH_S
        await asyncio.sleep(WATCH_S)
        now = self._clock()
        lag_s = max(0.0, now - due_s)
        self._metrics.loop_lags_s.append(lag_s)
        if self.observer.is_watched:
            aside(_log, "observing", None, self.observer.looked, lag_s, self._steps.awaited)
        self._expire()
        if (flight := self._steps.awaited) is not self._watched:
            self._watched, self._watched_since_s = flight, now
        elif flight is not None and self._step_timeout_s and now - self._watched_since_s > self._step_timeout_s:
            self._give_up(StepTimeoutError(self._step_timeout_s))
        if (lost := self._steps.lost) is not None and self._overdue is None:
            self._give_up(lost)

    def _give_up(self, error: AserveError) -> None:
        """A step is overdue or can never land, and nothing interrupts it: say where all threads are, end the loop."""
        self._overdue = error
        _log.critical("%s; the threads are here:\n%s", error.message, all_stacks())
        if self._task is not None:
            self._task.cancel()

    async def _step_forever(self) -> None:
        while True:
            await self._steps.run_until_idle()
            await self._doorbell.wait()
            self._doorbell.clear()  # no await between here and the next plan: no wake-up is lost

    def _expire(self) -> None:
        """End the requests whose deadline has come: with what they have, or unserved."""
        now = self._clock()
        if now < self._scheduler.next_deadline_s:
            return
        with self._may_tear():
            expired = self._scheduler.expire(now)
        if expired is not None:
            self.publish(StepTokens([], [], list(expired.deltas)), now)
            for request_id in expired.unserved:
                self.fail(request_id, QueueTimeoutError("the request's deadline came while it waited to be served"))

    # The audience of the steps.

    def expire(self) -> None:
        """As the Protocol says."""
        aside(_log, "ending what is over its deadline", None, self._expire)

    def open_requests(self) -> Collection[RequestId]:
        """As the Protocol says."""
        return self._readers.keys()

    def is_told(self, request_id: RequestId) -> bool:
        """As the Protocol says."""
        return self._readers[request_id].num_open == 0

    def fail(self, request_id: RequestId, error: AserveError) -> None:
        """End a request for its reader."""
        if (reader := self._readers.get(request_id)) is not None:
            reader.num_open = 0
            reader.mailbox.fail(error)
            reader.times.error = error.code
            aside(_log, "counting", request_id, reader.times.left, self._clock(), FinishReason.ERROR)

    def publish(self, step: StepTokens, now: float) -> None:
        """The one loop over a step's tokens: most are looked up together, and each is text as it is."""
        token_texts = self._token_texts
        all_times: list[RequestTimes] = []
        others: list[tuple[_Choice, SeqDelta]] = []
        for choice_id, token_id in zip(step.choices, step.token_ids):  # noqa: B905  as long as each other
            choice = self._choices.get(choice_id)
            if choice is None:
                continue
            all_times.append(choice.times)
            try:
                text = token_texts[token_id]
                is_out = text is not None and choice.stream.is_plain and choice.offer(choice_id[1], text, token_id)
            except BaseException as error:
                self._publish_failed(choice.reader, error)
                continue
            if not is_out:
                request_id, index = choice_id
                others.append((choice, SeqDelta(request_id, (token_id,), None, None, index, choice.num_cached)))
        try:
            if all_times:
                self._metrics.one_token_each(now, all_times)
        except BaseException as error:
            self._counting_failed(error)
        if step.deltas or others:
            self._publish_others(step.deltas, others, now)

    def _publish_others(self, deltas: Sequence[SeqDelta], others: list[tuple[_Choice, SeqDelta]], now: float) -> None:
        """What is more than one token, and tokens that were not taken as they are."""
        for delta in deltas:
            choice = self._choices.get((delta.request_id, delta.index))
            if choice is not None and choice.reader.num_open:  # else another choice of it has failed in this step
                choice.num_cached = delta.num_cached_tokens
                count = choice.reader.times.tokens
                told = len(delta.token_ids), delta.queued_s, int(delta.vector is not None), delta.num_cached_tokens
                aside(_log, "counting", delta.request_id, count, now, *told)
                others.append((choice, delta))
        for choice, delta in others:  # after all tokens are counted, for any of them may end its request
            try:
                if choice.reader.num_open:
                    self._publish_delta(choice, delta, now)
            except BaseException as error:
                self._publish_failed(choice.reader, error)

    def _counting_failed(self, error: BaseException) -> None:
        """As `aside`, which would cost every step more than the counting itself."""
        if isinstance(error, WISHES):
            raise error
        log_fault(_log, "counting", error)

    def _publish_failed(self, reader: _Reader, error: BaseException) -> None:
        """The edge of a request: its text cannot be made or handed over, and nobody else's is affected."""
        if isinstance(error, WISHES):
            raise error
        request_id = reader.request.id
        self._give_back(request_id)
        self.fail(request_id, report(_log, "publishing", error, request_id))

    def _publish_delta(self, choice: _Choice, delta: SeqDelta, now: float) -> None:
        """A delta, as text, to its reader."""
        text = choice.stream.push(delta)
        if text is None:
            return
        reader = choice.reader
        if text.finish_reason is not None:
            num_dropped = len(delta.token_ids) - len(text.token_ids)
            if delta.finish_reason is None or num_dropped:  # a stop string, which the scheduler does not see
                with self._may_tear():
                    self._scheduler.finish(delta.request_id, delta.index, num_dropped=num_dropped)
            reader.num_open -= 1
            ended = text.index, text.finish_reason, len(text.token_ids)
            aside(_log, "counting", delta.request_id, self._choice_ended, reader, *ended)
            if not reader.num_open:
                aside(_log, "counting", delta.request_id, reader.times.finished, now, text.finish_reason)
            text = msgspec.structs.replace(text, timings=reader.times.timings(now))
        reader.mailbox.put(text)
