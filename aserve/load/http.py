"""HTTP/1.1 from the client's side, as cheap as it gets: one `asyncio.Protocol`, and a time for every read.

Only what answers to a POST need: a Content-Length, chunks, or a body that lasts until the connection ends. No trailers,
no redirects, no compression.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Final, cast
from urllib.parse import urlsplit

END_OF_HEAD: Final = b"\r\n\r\n"


class AnswerError(Exception):
    """The request had no proper answer; the message says why."""


class ConnectionDropped(AnswerError):
    """The server closed a kept-alive connection before the answer's first byte: another connection may do."""


@dataclass(slots=True)
class Answer:
    """One answer as it came: the status, and when each read's share of the body was there (`time.perf_counter`)."""

    sent_s: float
    status: int = 0
    reads: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(data for _, data in self.reads)


class AnswerParser:
    """The bytes of one answer, fed as they come, to the bytes of its body. Does no I/O and reads no clock."""

    def __init__(self) -> None:
        self.status = 0
        self.keeps_alive = True
        self.ended = False
        self._rest = b""
        self._chunked = False
        self._remaining: int | None = None

    @property
    def started(self) -> bool:
        """Whether anything has come."""
        return self.status != 0 or self._rest != b""

    def feed(self, data: bytes) -> bytes:
        """The part of the body that `data` completes. A chunk is given out when all of it is there."""
        if self.status == 0:
            head, end, data = (self._rest + data).partition(END_OF_HEAD)
            if not end:
                self._rest = head
                return b""
            self._rest = b""
            self._read_head(head)
        if self._chunked:
            return self._take_chunks(data)
        if self._remaining is not None:
            self._remaining -= len(data)
            self.ended = self._remaining <= 0
        return data

    def end(self) -> None:
        """The server has closed the connection. Raises AnswerError where more was to come."""
        if self.status == 0 or self._chunked or self._remaining is not None:
            raise AnswerError("the server closed the connection within the answer")
        self.ended = True

    def _read_head(self, head: bytes) -> None:
        start_line, *lines = head.decode("latin-1").split("\r\n")
        version, status = start_line.split(" ")[:2]
        headers = {name.lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
        self.status = int(status)
        self._chunked = headers.get("transfer-encoding", "") == "chunked"
        if not self._chunked and "content-length" in headers:
            self._remaining = int(headers["content-length"])
        endless = not self._chunked and self._remaining is None
        self.keeps_alive = not endless and version == "HTTP/1.1" and headers.get("connection") != "close"

    def _take_chunks(self, data: bytes) -> bytes:
        data = self._rest + data
        bodies, at = [], 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line_end].partition(b";")[0], 16)
            body_end = line_end + 2 + size
            if body_end + 2 > len(data):
                break
            bodies.append(data[line_end + 2 : body_end])
            at = body_end + 2
            if size == 0:
                self.ended = True
                break
        self._rest = data[at:]
        return b"".join(bodies)


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self.open = False
        self.used = False
        self._transport: asyncio.Transport | None = None
        self._parser = AnswerParser()
        self._answer: Answer | None = None
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From asyncio."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one, and no subclass
        self.open = True

    def data_received(self, data: bytes) -> None:
        """From asyncio: one read."""
        now = time.perf_counter()
        if self._answer is None or self._ended is None or self._ended.done():
            self.close()  # bytes that nobody asked for
            return
        try:
            body = self._parser.feed(data)
        except ValueError as error:
            self._fail(AnswerError(f"not HTTP: {error}"))
            return
        if body:
            self._answer.reads.append((now, body))
        if self._parser.ended:
            self._ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """From asyncio."""
        self.open = False
        if self._ended is None or self._ended.done():
            return
        if self.used and not self._parser.started:
            self._fail(ConnectionDropped("the server closed a kept-alive connection"))
            return
        try:
            self._parser.end()
            self._ended.set_result(None)
        except AnswerError as error:
            self._fail(error)

    async def post(self, request: bytes) -> Answer:
        """Send a rendered request and wait for the whole answer. Raises AnswerError."""
        assert self._transport is not None
        self._parser = AnswerParser()
        self._ended = asyncio.get_running_loop().create_future()
        self._answer = answer = Answer(time.perf_counter())
        self._transport.write(request)
        await self._ended
        answer.status = self._parser.status
        self.used = True
        if not self._parser.keeps_alive:
            self.close()
        return answer

    def close(self) -> None:
        """Close. Idempotent."""
        self.open = False
        if self._transport is not None:
            self._transport.close()

    def _fail(self, error: AnswerError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
        self.close()


class Client:
    """Requests to one URL, over as many connections as there are requests at once.

    url: up to where the paths of the API start. keep_alive: False opens a connection for every request.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, keep_alive: bool = True, timeout_s: float = 600
    ) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n"
        self._headers += f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers += "" if keep_alive else "Connection: close\r\n"
        self._keep_alive, self._timeout_s = keep_alive, timeout_s
        self._idle: list[Connection] = []
        self.num_retries = 0

    def render(self, path: str, body: bytes) -> bytes:
        """A POST as bytes."""
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def post(self, request: bytes) -> Answer:
        """Send what `render` made. Raises AnswerError, OSError or TimeoutError.

        Where the server had closed the connection that was kept alive the request is sent once more, on a new one.
        """
        async with asyncio.timeout(self._timeout_s):
            sent_s = time.perf_counter()
            connection = await self._connection()
            try:
                answer = await connection.post(request)
            except ConnectionDropped:
                self.num_retries += 1
                connection = await self._connection(fresh=True)
                answer = await connection.post(request)
                answer.sent_s = sent_s  # what the drop cost is part of the answer's time
            except asyncio.CancelledError:
                connection.close()
                raise
        if connection.open and self._keep_alive:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self, *, fresh: bool = False) -> Connection:
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection
