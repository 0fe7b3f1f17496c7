"""Connection: one client's bytes to Hypercorn's protocol and back, within limits.

    socket -> data_received -> inbox -> _feed -> Http1 (parses, calls the application)
    socket <- transport     <- _send (waits while the write buffer is full)  <-'
                  <- Door <-  what is refused before it is parsed (door.py)

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
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast

from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.utils import parse_socket_addr

from aserve.core.faults import describe
from aserve.edges import is_fault
from aserve.http.access import log_access
from aserve.server import lobby
from aserve.server.connections import Connections
from aserve.server.door import HOLD_S
from aserve.server.http1 import Http1
from aserve.server.writing import WRITE_BUFFER_BYTES, in_pieces

_log = logging.getLogger(__name__)

MAX_INBOX_BYTES: Final = 64 * 1024
"""Received and not yet parsed. Over it reading pauses, or the connection ends if only pipelining can be the cause."""
_BUSY: Final = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client. Made by the event loop for each that connects; ends by itself."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._limits = connections.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._http: Http1
        self._door = connections.doors.new(self._look)
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
        self._is_writable = True  # the same, where it is asked for each token
        self.is_silent = True
        self._head: bytes | None = b""  # of an answer, until more of it is written; None: it comes next
        self._idle = True
        self._idle_since_s = 0.0
        self._fresh = True  # the next byte begins a request, and none before it waits for its answer
        self._ending = False  # the server has said its last word
        self._descriptor: int | None = None  # while in the lobby
        self._is_secure = False

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve, or say that the server is full."""
        self._transport = cast("asyncio.Transport", transport)
        try:
            self._begin()
        except BaseException as error:  # the edge where a connection's failure ends that connection alone
            if not is_fault(error):
                raise
            _log.error("a connection failed at its beginning: %s", describe(error))
            self._connections.forget(self)
            self._transport.abort()

    def _begin(self) -> None:
        if not self._connections.admit(self):
            log_access(logging.WARNING, status=503, error="too_many_connections")
            self._transport.write(_BUSY)
            self._transport.close()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._is_secure = self._transport.get_extra_info("sslcontext") is not None
        self._http = self._new_http()
        self._connections.mark(self, idle=True)
        self._begin_idling()
        self._task = self._connections.tasks.create_task(self._run())

    def data_received(self, data: bytes) -> None:
        """Keep bytes for the parser; bound how many."""
        if self._task is None or self._left or self._ending:
            return
        self._inbox += data
        self.is_silent = False
        begins, self._idle = self._idle or self._door.stands, False
        if self._door.takes(self._inbox, begins=self._fresh):
            return
        self.leave_lobby()
        if begins:
            self._end_in(self._limits.head_timeout_s)
        self._fresh = False
        self._arrived.set()
        if len(self._inbox) > MAX_INBOX_BYTES:
            if self._http.answering:  # this much is pipelined; to pause would hide the client's departure
                self.close()
            else:
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The client has sent its last byte and counts as gone. What is being written may still reach it."""
        self._leave()
        return not self._ending and not self._is_secure

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._end_in(None)
        self._leave()
        self._lost.set()
        self._writable.set()

    def pause_writing(self) -> None:
        """The write buffer is over its limit."""
        self._is_writable = False
        self._writable.clear()

    def resume_writing(self) -> None:
        """The write buffer has room again."""
        self._is_writable = True
        self._writable.set()

    # How it ends

    def close(self) -> None:
        """End the connection as soon as what was written has been taken."""
        self._leave()
        if self._lost.is_set():
            return
        self._flush()
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
        self.leave_lobby()
        self._door.leave(self._inbox)
        if self._presence is not None:
            self._presence.reschedule(self._loop.time())

    def _end_in(self, delay_s: float | None, end: Callable[[], None] | None = None) -> None:
        """Set the one deadline of the connection, or with None clear it. end: what then happens, if not `abort`."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if delay_s is None else self._loop.call_later(delay_s, end or self.abort)

    def _begin_idling(self) -> None:
        self._idle_since_s = self._loop.time()
        self._end_in(self._connections.idle_timeout_s, self._end_idling)

    def _end_idling(self) -> None:
        """The deadline has come, unless a request has been refused meanwhile, which moves no timer."""
        left_s = self._idle_since_s + self._connections.idle_timeout_s - self._loop.time()
        if self._idle and left_s <= 0:
            self.abort()
        else:
            self._end_in(max(left_s, HOLD_S), self._end_idling)

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
            self._is_secure,
            parse_socket_addr(family, self._transport.get_extra_info("peername")),
            parse_socket_addr(family, self._transport.get_extra_info("sockname")),
            self._send,
            is_clear=self._is_clear,
            write_chunk=self._write_chunk,
            hold_head=self._hold_head,
        )

    # What is refused before it is parsed
    def _look(self) -> None:
        """What stands at the door is refused, held until the rest of it comes, or let in."""
        try:
            if self._door.stands:
                self._answer_at_the_door()
        except BaseException as error:  # the edge where a connection's failure ends that connection alone
            if not is_fault(error):
                raise
            _log.error("a connection failed at the door: %s", describe(error))
            self.abort()

    def _answer_at_the_door(self) -> None:
        was_holding = self._door.is_holding
        is_draining = self._connections.context.terminated.is_set()
        answer = self._door.answer(self._inbox) if self._is_clear() and not is_draining else None
        if answer is None:
            self._let_in()
        elif answer:
            self._inbox.clear()
            self._transport.write(answer)
            self._idle = True
            self._idle_since_s = self._loop.time()
            self._connections.touch(self)
            self._enter_lobby()
            if was_holding:
                self._connections.mark(self, idle=True)
                self._begin_idling()
        elif not was_holding:
            self._connections.mark(self, idle=False)
            self._end_in(HOLD_S, self._let_in)

    def _let_in(self) -> None:
        """What stands at the door is for the application to answer, or to wait for."""
        if not self._door.stands:
            return
        self._door.open()
        self.leave_lobby()
        self._fresh = False
        self._end_in(self._limits.head_timeout_s)
        self._arrived.set()

    def _enter_lobby(self) -> None:
        if self._descriptor is not None or not lobby.EXISTS or self._is_secure:
            return
        socket = self._transport.get_extra_info("socket")
        if socket is not None and not self._transport.is_closing():  # else writing failed
            self._descriptor = socket.fileno()
            self._transport.pause_reading()
            self._connections.doors.enter_lobby(self._descriptor, self)

    def leave_lobby(self) -> None:
        """The event loop says when something has come."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._connections.doors.lobby.leave(descriptor, self)
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def read(self) -> None:
        """Take what has come, past the transport, which does not read in the lobby."""
        assert self._descriptor is not None, "only the lobby calls this"
        try:
            data = os.read(self._descriptor, MAX_INBOX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self.abort()
            return
        if data:
            self.data_received(data)
        else:
            self.eof_received()

    # What the protocol calls
    async def _send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Updated):
            self._idle = event.idle
            self._fresh = event.idle and not self._inbox and self._http.is_fresh
            self._connections.mark(self, idle=event.idle)
            if event.idle:
                self._begin_idling()
            else:
                self._end_in(None)
        elif isinstance(event, Closed):
            self._flush()
            self._end()

    def _hold_head(self) -> None:
        """What is written next goes out with what follows it, at once, or by itself when the event loop has turned."""
        self._flush()
        self._head = None

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head:
            self._put(head)

    def _put(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        try:
            self._transport.write(data)
        except BaseException:  # nothing that came after it would be understood
            self.abort()
            raise

    def _is_clear(self) -> bool:
        """Whether a write would be taken without waiting."""
        return self._is_writable and not self._transport.is_closing()

    def _write_chunk(self, piece: bytes) -> bool:
        """Write a piece of a body as a chunk (RFC 9112, 7.1), if `_is_clear`; each token comes by here."""
        if not self._is_writable or self._transport.is_closing():
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    async def _write(self, data: bytes) -> None:
        if self._transport.is_closing():
            await asyncio.sleep(0)  # lets an application that only writes hear that the client has left
            return
        if self._head is None:
            self._head = data
            self._loop.call_soon(self._flush)
            return
        head, self._head = self._head, b""
        await in_pieces(head + data, self._put, self._writable, self._limits.send_timeout_s, self.abort)

    def _end(self) -> None:
        """Say the last word, and leave the client time to read it."""
        if self._ending or self._transport.is_closing():
            return
        self._ending = True
        self._inbox.clear()
        unsent = self._is_secure or self._transport.get_write_buffer_size() > 0  # what is encrypted is not in that size
        self._connections.mark(self, idle=not unsent)
        if self._is_secure:  # TLS has no half of an end, and says by itself that it is one
            self._transport.close()
        else:
            self._transport.write_eof()
        self._end_in(self._limits.send_timeout_s if unsent else self._limits.linger_s)
