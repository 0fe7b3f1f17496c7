"""Responses in the background: they are made in tasks of their own, with or without a client who listens.

    start --> opened (or refused, as any request) --> events, kept while it is made and a while longer --> settled
                                                        '--> follow: from any event on, by any number of clients

What a task holds in the engine it gives back at its end, which is the model's, `cancel`, or the engine's own end.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Final

from aserve.core.errors import UnavailableError
from aserve.edges import is_fault
from aserve.engine import Engine
from aserve.http.errors import known_error
from aserve.http.generation import Events, Generation, Settle, open_all
from aserve.http.openai.responses.wire import Response, ResponseWire

EVENT_END: Final = b"\n\n"
ENDED: Final = "the server ended before the response did"
MAX_KEPT_BYTES: Final = 16 * 1024 * 1024
"""Of events of responses that are over, the latest of which can still be followed."""


class Job:
    """One response. events: all that there are, by their sequence numbers; num_bytes: of them. tenant: whose it is.

    opened: done when the engine has taken it, or refused it. settle: see `generation.Settle`.
    """

    def __init__(self, tenant: str, wire: ResponseWire, settle: Settle) -> None:
        self.id: str = wire.response["id"]
        self.tenant = tenant
        self.events: list[bytes] = []
        self.num_bytes = 0
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wire = wire
        self._settle = settle
        self._is_cancelled = False
        self._grown = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def response(self) -> Response:
        """As it is so far."""
        return self._wire.response

    def start(self, engine: Engine, generation: Generation) -> asyncio.Task[None]:
        """Make it, in a task that is returned."""
        self._task = asyncio.create_task(self._run(engine, generation), name="aserve: background response")
        return self._task

    async def cancel(self) -> None:
        """End it with what it has. Returns when it has ended and is settled."""
        if self._task is not None and not self._task.done():
            self._is_cancelled = True
            self._task.cancel()
            await asyncio.wait([self._task])

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes]:
        """The events after that number, as they come. Who leaves off leaves the task alone."""
        num_told = after + 1
        while True:
            if num_told < len(self.events):
                piece = b"".join(self.events[num_told:])
                num_told = len(self.events)
                yield piece
            elif self._task is None or self._task.done():
                return
            else:
                await self._grown.wait()

    async def _run(self, engine: Engine, generation: Generation) -> None:
        try:
            with engine.tenants.staying(self.tenant):
                await self._generate(engine, generation)
        except BaseException as error:  # the edge of this response
            if is_fault(error):
                await self._failed(error)
            elif not isinstance(error, asyncio.CancelledError):
                raise
            elif self._is_cancelled and self._task is not None:
                self._task.uncancel()  # what is cancelled from now on is something else
                await self._give_up(self._wire.cancel)
            else:
                await self._give_up(partial(self._wire.failure, UnavailableError(ENDED)))
                raise
        finally:
            self.opened.cancel()  # for whoever waits, if it has never been opened
            self._wake()

    async def _failed(self, error: BaseException) -> None:
        known = known_error(error, self.id)  # a future would refuse a StopIteration
        if self.opened.done():
            await self._give_up(partial(self._wire.failure, known))
        else:
            self.opened.set_exception(known)

    async def _generate(self, engine: Engine, generation: Generation) -> None:
        async with open_all(engine, generation) as mailbox:
            self.opened.set_result(None)
            self._add(self._wire.queue())
            events = Events(generation, self._wire)
            async for delta in mailbox:
                piece = events.of(delta)
                if events.num_open == 0:
                    await self._settle()  # before its end is told
                self._add(piece)

    async def _give_up(self, end: Callable[[], bytes]) -> None:
        """The last events of what has no end of its own, which are told even if it cannot be settled.

        They are numbered after what was told: events may have been made that were lost with the fault.
        """
        self._wire.num_events = len(self.events)
        try:
            piece = end()
        except BaseException as error:
            if not is_fault(error):
                raise
            piece = self._wire.failure(known_error(error, self.id))
        try:
            await self._settle_for_sure()
        finally:
            self._add(piece)

    async def _settle_for_sure(self) -> None:
        """Settle it, at the second attempt if need be: the store would have it as one that is being made."""
        try:
            await self._settle()
        except BaseException as error:
            if not is_fault(error):
                raise
            known_error(error, self.id)  # which has it in the log
            await self._settle()

    def _add(self, piece: bytes) -> None:
        self.events += [event + EVENT_END for event in piece.split(EVENT_END)[:-1]]
        self.num_bytes += len(piece)
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class Jobs:
    """The responses that are made in the background, and the latest that were."""

    def __init__(self) -> None:
        self._running: dict[str, Job] = {}
        self._over: dict[str, Job] = {}
        self._num_bytes = 0  # of events of those that are over
        self._tasks: set[asyncio.Task[None]] = set()

    def running(self, tenant: str, id: str) -> Job | None:
        """The tenant's response of that id, if it is being made."""
        return _of(tenant, self._running.get(id))

    def followable(self, tenant: str, id: str) -> Job | None:
        """The same, or one whose events are still kept."""
        return self.running(tenant, id) or _of(tenant, self._over.get(id))

    def forget(self, id: str) -> None:
        """Keep no events of it, once it is over."""
        if (job := self._over.pop(id, None)) is not None:
            self._num_bytes -= job.num_bytes

    async def start(self, engine: Engine, generation: Generation, job: Job) -> None:
        """Returns when the engine has taken it. Raises as `Engine.open` does."""
        task = job.start(engine, generation)
        self._running[job.id] = job
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(job, task))
        try:
            await asyncio.shield(job.opened)
        except asyncio.CancelledError:
            await job.cancel()  # its client has left before it was told that there is one
            raise

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        del self._running[job.id]
        self._over[job.id] = job
        self._num_bytes += job.num_bytes
        while self._num_bytes > MAX_KEPT_BYTES:
            self.forget(next(iter(self._over)))
        if not task.cancelled() and (error := task.exception()) is not None:
            known_error(error, job.id)  # which has it in the log


def _of(tenant: str, job: Job | None) -> Job | None:
    return job if job is not None and job.tenant == tenant else None
