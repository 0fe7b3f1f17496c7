"""Connection: one client's bytes to Hypercorn's protocol and back, within limits; Connections: all of them.

    socket -> data_received -> inbox -> _feed -> Http1 (parses, calls the application)
    socket <- transport     <- _send (waits while the write buffer is full)  <-'
                            <- Door, for what is refused before it is parsed

What it promises:
- a client that leaves is noticed at once, also while its next request waits behind a running one (pipelining), and the
  application gets http.disconnect. The end of the client's sending (half-close) counts as leaving: TCP cannot tell the
  two apart, and going on would compute answers for nobody;
- nothing waits for ever: the request's head, an idle connection and a reader who does not read each have a deadline;
- what one connection may hold in memory is bounded, both ways;
- when the server ends a connection first, what the client was still sending is read and thrown away for a while, since
  closing at once would reset the connection and might destroy the answer on its way.
It knows nothing of routes, bodies or the engine.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.utils import parse_socket_addr
from starlette.types import ASGIApp

from aserve.core.faults import describe
from aserve.edges import is_fault
from aserve.http.access import log_access
from aserve.http.doorman import Doorman
from aserve.server.door import HOLD_S, Door
from aserve.server.http1 import Http1, hypercorn_config

_log = logging.getLogger(__name__)

MAX_INBOX_BYTES: Final = 64 * 1024
"""Received and not yet parsed. Over it reading pauses, or the connection ends if only pipelining can be the cause."""
WRITE_BUFFER_BYTES: Final = 64 * 1024
"""Written and not yet taken by the kernel. Over it the application waits."""
CROWDED: Final = 0.75
"""The share of the connections that there may be from which on they are many."""
_BUSY: Final = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a connection may take over each thing, in seconds, and how many there may be.

    head_timeout_s: to send a request's head, from its first byte.
    keep_alive_s: to begin the first or the next request. Longer than the idle timeout of the usual proxies in front
    (60 s). While connections are many, `head_timeout_s` if that is shorter.
    send_timeout_s: to take enough of what is written to it.
    linger_s: to go away after the server has ended the connection.
    leave_s: for the application to end once the client has left; it is cancelled then.
    """

    head_timeout_s: float = 5.0
    keep_alive_s: float = 75.0
    send_timeout_s: float = 30.0
    linger_s: float = 2.0
    leave_s: float = 10.0
    max_connections: int = 1000


class Connections:
    """The open connections of a server: which of them are idle, and how all of them end.

    app: called for each request. tasks: owns what the connections run. doorman: may refuse requests before that.
    """

    def __init__(self, app: ASGIApp, limits: Limits, tasks: asyncio.TaskGroup, doorman: Doorman | None = None) -> None:
        self.app = ASGIWrapper(app)
        self.limits = limits
        self.tasks = tasks
        self.doorman = doorman
        self.config = hypercorn_config()
        self.context = WorkerContext(max_requests=None)
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # in the order in which they became idle
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_busy(self) -> int:
        """Connections with a request that has not been answered to its end."""
        return len(self._open) - len(self._idle)

    @property
    def idle_timeout_s(self) -> float:
        """How long a connection may be idle: less where others may need its place."""
        limits = self.limits
        is_crowded = len(self._open) > CROWDED * limits.max_connections
        return min(limits.head_timeout_s, limits.keep_alive_s) if is_crowded else limits.keep_alive_s

    def admit(self, connection: "Connection") -> bool:
        """Take a new connection in, ending the one that has been idle longest if there are too many."""
        if len(self._open) >= self.limits.max_connections:
            if not self._idle:
                return False
            next(iter(self._idle)).close()
        self._open.add(connection)
        return True

    def mark(self, connection: "Connection", *, idle: bool) -> None:
        """Note that a connection waits for its next request, or no longer does."""
        self._idle.pop(connection, None)
        if idle and connection in self._open:
            self._idle[connection] = None
        self._changed.set()

    def forget(self, connection: "Connection") -> None:
        """Note that a connection is gone, and all that it ran has ended."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._changed.set()

    async def announce_end(self) -> None:
        """From now on whoever asks whether the server is ready hears that it is not."""
        await self.context.terminate.set()

    async def drain(self) -> None:
        """From now on end each connection after its answer. Returns when no request is open."""
        await self.context.terminated.set()
        while self.num_busy > 0:
            await self._change()

    async def close(self) -> None:
        """End all connections as soon as what was written to them has been taken. Returns when all are gone."""
        for connection in list(self._open):
            connection.close()
        while self._open:
            await self._change()

    def abort(self) -> None:
        """End all connections at once, and cancel what they run."""
        for connection in list(self._open):
            connection.abort(cancel=True)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Connection(asyncio.Protocol):
    """One client. Made by the event loop for each that connects; ends by itself."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._limits = connections.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._http: Http1
        self._door = Door(connections.doorman, connections.config)
        self._group = TaskGroup(self._loop)
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._inbox = bytearray()
        self._arrived = asyncio.Event()
        self._presence: asyncio.Timeout | None = None  # "times out" when the client leaves
        self._left = False
        self._lost = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._idle = True
        self._ending = False  # the server has said its last word

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve, or say that the server is full."""
        self._transport = cast("asyncio.Transport", transport)
        if not self._connections.admit(self):
            log_access(logging.WARNING, status=503, error="too_many_connections")
            self._transport.write(_BUSY)
            self._transport.close()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._http = self._new_http()
        self._connections.mark(self, idle=True)
        self._end_in(self._connections.idle_timeout_s)
        self._task = self._connections.tasks.create_task(self._run())

    def data_received(self, data: bytes) -> None:
        """Keep bytes for the parser; bound how many."""
        if self._task is None or self._left or self._ending:
            return
        begins, self._idle = self._idle, False
        self._inbox += data
        if self._refuses():
            return
        if begins:
            self._end_in(self._limits.head_timeout_s)
        self._arrived.set()
        if len(self._inbox) > MAX_INBOX_BYTES:
            if self._http.answering:  # this much is pipelined; to pause would hide the client's departure
                self.close()
            else:
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The client has sent its last byte and counts as gone. What is being written may still reach it."""
        self._leave()
        return not self._ending

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._end_in(None)
        self._leave()
        self._lost.set()
        self._writable.set()

    def pause_writing(self) -> None:
        """The write buffer is over its limit."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The write buffer has room again."""
        self._writable.set()

    # How it ends

    def close(self) -> None:
        """End the connection as soon as what was written has been taken."""
        self._leave()
        if self._lost.is_set():
            return
        self._connections.mark(self, idle=False)
        self._transport.close()
        self._end_in(self._limits.send_timeout_s)

    def abort(self, *, cancel: bool = False) -> None:
        """End the connection now; with `cancel`, do not wait for the application either."""
        self._leave()
        self._transport.abort()
        if cancel and self._task is not None:
            self._task.cancel()

    def _leave(self) -> None:
        """The client is gone, or is treated so: stop parsing, tell the application."""
        if self._left:
            return
        self._left = True
        self._door.leave()
        if self._presence is not None:
            self._presence.reschedule(self._loop.time())

    def _end_in(self, delay_s: float | None, end: Callable[[], None] | None = None) -> None:
        """Set the one deadline of the connection, or with None clear it. end: what then happens, if not `abort`."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if delay_s is None else self._loop.call_later(delay_s, end or self.abort)

    # The task

    async def _run(self) -> None:
        try:
            await self._serve()
        except BaseException as error:  # the edge where a connection's failure ends that connection alone
            if not is_fault(error):
                raise
            _log.error("a connection failed: %s", describe(error))
            self._transport.abort()
        else:
            self.close()
            await self._lost.wait()
        finally:
            self._connections.forget(self)

    async def _serve(self) -> None:
        """Serve until the client has left and the application has ended, by itself or cancelled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as patience, self._group:
                await self._feed_until_left()
                patience.reschedule(self._loop.time() + self._limits.leave_s)
                await self._http.handle(Closed())

    async def _feed_until_left(self) -> None:
        if self._left:
            return
        try:
            async with asyncio.timeout(None) as self._presence:
                await self._feed()
        except TimeoutError:
            pass  # the client has left
        finally:
            self._presence = None

    async def _feed(self) -> None:
        """Parse what arrives, and call the application. Waits behind a running answer and while a body is not read."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            received, self._inbox = bytes(self._inbox), bytearray()
            self._transport.resume_reading()
            await self._http.handle(RawData(received))

    def _new_http(self) -> Http1:
        family = self._transport.get_extra_info("socket").family
        return Http1(
            self._connections.app,
            self._connections.config,
            self._connections.context,
            self._group,
            False,
            parse_socket_addr(family, self._transport.get_extra_info("peername")),
            parse_socket_addr(family, self._transport.get_extra_info("sockname")),
            self._send,
            is_clear=self._is_clear,
            write_now=self._write_now,
        )

    # What is refused before it is parsed

    def _refuses(self) -> bool:
        """Whether what is in the inbox is a request that has been refused, or will be when all of it is there."""
        door = self._door
        was_holding = door.is_holding
        answer = door.answer(self._inbox) if self._may_refuse() else None
        if answer is None:
            door.forget()
            return False
        if answer:
            self._inbox.clear()
            self._transport.write(answer)
            self._idle = True
            self._connections.mark(self, idle=True)
            self._end_in(self._connections.idle_timeout_s)
        elif not was_holding:
            self._connections.mark(self, idle=False)
            self._end_in(HOLD_S, self._hand_over)
        return True

    def _may_refuse(self) -> bool:
        """Whether the inbox has the beginning of a request, and an answer would be written at once and in its turn."""
        is_draining = self._connections.context.terminated.is_set()
        return not self._arrived.is_set() and self._is_clear() and self._http.is_fresh and not is_draining

    def _hand_over(self) -> None:
        """What was held takes too long to come: it is the application's to wait for it."""
        self._door.forget()
        self._arrived.set()

    # What the protocol calls
    async def _send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Updated):
            self._idle = event.idle
            self._connections.mark(self, idle=event.idle)
            self._end_in(self._connections.idle_timeout_s if event.idle else None)
        elif isinstance(event, Closed):
            self._end()

    def _is_clear(self) -> bool:
        """Whether a write would be taken without waiting."""
        return self._writable.is_set() and not self._transport.is_closing()

    def _write_now(self, data: bytes) -> bool:
        """Write if `_is_clear`."""
        if not self._writable.is_set() or self._transport.is_closing():
            return False
        self._transport.write(data)
        return True

    async def _write(self, data: bytes) -> None:
        if self._transport.is_closing():
            await asyncio.sleep(0)  # lets an application that only writes hear that the client has left
            return
        self._transport.write(data)
        if self._writable.is_set():
            return
        try:
            async with asyncio.timeout(self._limits.send_timeout_s):
                await self._writable.wait()
        except TimeoutError:
            self.abort()

    def _end(self) -> None:
        """Say the last word, and leave the client time to read it."""
        if self._ending or self._transport.is_closing():
            return
        self._ending = True
        self._inbox.clear()
        unsent = self._transport.get_write_buffer_size() > 0
        self._connections.mark(self, idle=not unsent)
        self._transport.write_eof()
        self._end_in(self._limits.send_timeout_s if unsent else self._limits.linger_s)
