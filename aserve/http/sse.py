"""EventStream: ready-made bytes to a client as server-sent events.

sse-starlette's response, with its transport replaced: one task beside the writer instead of three, no watcher of
uvicorn's shutdown (our streams end when the engine ends them), no logging of what is sent, and no timer per event.
Where the server offers a direct line, events may be written from outside the stream's task, while that waits for more.
Knows nothing of what the events say.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from aserve.core.errors import AserveError
from aserve.edges import is_fault
from aserve.http.access import Record, record_of
from aserve.http.connection import ClientGone
from aserve.http.direct import DirectLine, direct_line
from aserve.http.errors import known_error
from aserve.http.tasks import task_group

KEEP_ALIVE: Final = b": keep-alive\n\n"


def event(json: bytes) -> bytes:
    """One event. JSON has no line break outside strings and escapes those inside, so it is always one line."""
    return b"data: " + json + b"\n\n"


def named_event(name: bytes, json: bytes) -> bytes:
    """One event of a kind that has a name."""
    return b"event: " + name + b"\ndata: " + json + b"\n\n"


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """ping_s: after so much silence a comment is sent, which keeps proxies from closing the connection.

    send_timeout_s: a client that takes longer to accept one piece of the stream is given up.
    """

    ping_s: float = 15.0
    send_timeout_s: float = 30.0


class EventStream(EventSourceResponse):
    """Sends `first`, then what `rest` yields as it comes; what `failure` says of an exception from `rest`, at the end.

    `first` may be set until it is sent: a stream that is made while a prompt is computed begins the sooner.

    Raises `ClientGone` when the client is given up. The caller closes `rest`, and watches for the client's leaving.
    request_id: whose stream it is, for the log.
    """

    def __init__(
        self,
        first: bytes,
        rest: AsyncIterator[bytes],
        limits: StreamLimits,
        failure: Callable[[AserveError], bytes],
        request_id: str | None = None,
    ) -> None:
        super().__init__(rest, ping=limits.ping_s, send_timeout=limits.send_timeout_s)
        self.first = first
        self._rest = rest
        self._limits = limits
        self._failure = failure
        self._request_id = request_id
        self._turn = asyncio.Lock()
        self._sending = False
        self._since_s = 0.0  # when the send in progress began, or the last one ended
        self._line = DirectLine()  # dead, where the server has none
        self._record = Record()
        self._time = asyncio.get_running_loop().time

    @property
    def takes_more(self) -> bool:
        """Whether `write_now` would write."""
        return self._line.is_clear()

    def write_now(self, piece: bytes) -> bool:
        """Write a piece (b"" is none), while nothing else is being sent. False: `rest` has to bring it."""
        if piece:
            if not self._line.write(piece):
                return False
            self._since_s = self._time()
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, every piece, and the end of the body; of a HEAD the headers alone."""
        self._record = record_of(scope)
        if (line := direct_line(scope)) is not None:
            line.request(self.first)
            self._line = line
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope.get("method") == "HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        self._since_s = self._time()  # else the silence before the first piece would be broken at once
        async with task_group() as tasks:
            keeper = tasks.create_task(self._keep_alive(send), name="aserve: keep-alive")
            await self._write_all(send)
            keeper.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_all(self, send: Send) -> None:
        try:
            await self._write(send, self.first)
            async for piece in self._rest:
                if not self.write_now(piece):
                    await self._write(send, piece)
        except ClientGone:
            raise
        except BaseException as error:  # the status is long sent: the client learns of it in the stream
            if not is_fault(error):
                raise
            self._record.error = known_error(error, self._request_id)
            await self._write(send, self._failure(self._record.error))

    async def _write(self, send: Send, piece: bytes) -> None:
        async with self._turn:
            self._sending, self._since_s = True, self._time()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._sending, self._since_s = False, self._time()

    async def _keep_alive(self, send: Send) -> None:
        """Break the silence, and give up on a client that does not read."""
        while True:
            limit_s = self._limits.send_timeout_s if self._sending else self._limits.ping_s
            remaining_s = self._since_s + limit_s - self._time()
            if remaining_s > 0:
                await asyncio.sleep(remaining_s)
            elif self._sending:
                raise ClientGone
            else:
                await self._ping_once(send)

    async def _ping_once(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.send_timeout_s):
                await self._write(send, KEEP_ALIVE)
        except TimeoutError as error:
            raise ClientGone from error
