"""A client that speaks raw bytes, small ASGI applications, and a server of them on a free port."""

import asyncio
import json
import os
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from starlette.types import ASGIApp, Receive, Scope, Send

from aserve.http.doorman import Doorman
from aserve.http.middleware import guard
from aserve.server.connection import Connection
from aserve.server.connections import Connections, Limits
from aserve.server.sockets import listen

PATIENCE_S = 200.0
"""How long a test waits for what must happen soon."""
HEAD = b"%s HTTP/1.1\r\nHost: x\r\n"


def request(target: bytes = b"/", method: bytes = b"GET", *headers: bytes, body: bytes = b"") -> bytes:
    lines = [b"%s %s HTTP/1.1" % (method, target), b"Host: x", *headers]
    if body:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  there are no events for what tests look at
            await asyncio.sleep(0)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after checking that it is one, in ASCII."""
        self.body.decode("ascii")
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class Client:
    """One connection. Every wait has a limit."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, receive_buffer_bytes: int | None = None) -> Self:
        sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except OSError:
            sock.close()
            raise
        return cls(*await asyncio.open_connection(sock=sock, limit=2**16))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            await self.writer.drain()

    async def until(self, separator: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(separator)

    async def head(self) -> Answer:
        status_line, *lines = (await self.until(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        pairs = (line.split(":", 1) for line in lines)
        return Answer(int(status_line.split()[1]), {name.lower(): value.strip() for name, value in pairs}, b"")

    async def chunk(self) -> bytes:
        """One piece of a chunked body; empty at its end."""
        size = int(await self.until(b"\r\n"), 16)
        async with asyncio.timeout(PATIENCE_S):
            return (await self.reader.readexactly(size + 2))[:-2]

    async def chunks(self) -> bytes:
        pieces = []
        while piece := await self.chunk():
            pieces.append(piece)
        return b"".join(pieces)

    async def answer(self) -> Answer:
        answer = await self.head()
        if answer.headers.get("transfer-encoding") == "chunked":
            answer.body = await self.chunks()
        else:
            async with asyncio.timeout(PATIENCE_S):
                answer.body = await self.reader.readexactly(int(answer.headers.get("content-length", "0")))
        return answer

    async def ask(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.answer()

    async def ask_head(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.head()

    def reset(self) -> None:
        """Leave without goodbye: RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:  # else the server has ended the connection
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def rest(self) -> bytes:
        """All that comes until the server ends the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@dataclass
class Site:
    """A server of one application, and what it holds."""

    port: int
    connections: Connections
    clients: list[Client] = field(default_factory=list)

    async def connect(self, receive_buffer_bytes: int | None = None) -> Client:
        """A client that is closed with the site, if not before."""
        self.clients.append(await Client.connect(self.port, receive_buffer_bytes))
        return self.clients[-1]

    async def ask(self, data: bytes) -> Answer:
        client = await self.connect()
        try:
            return await client.ask(data)
        finally:
            await client.close()

    async def quiet(self, num_open: int = 0) -> None:
        """Wait until all connections but so many are gone, with their tasks."""
        await until(lambda: len(self.connections) <= num_open)


@asynccontextmanager
async def serving(
    app: ASGIApp,
    protocol: Callable[[Connections], Connection] = Connection,
    *,
    doorman: Doorman | None = None,
    **limits: Any,
) -> AsyncGenerator[Site]:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        connections = Connections(app, Limits(**limits), tasks, doorman)
        sock = listen("127.0.0.1", 0, 512)
        listener = await loop.create_server(lambda: protocol(connections), sock=sock)
        try:
            yield (site := Site(sock.getsockname()[1], connections))
        finally:
            listener.close()
            connections.abort()
            for client in site.clients:
                await client.close()


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# Applications


class Recorder:
    """Answers "ok" at once on every path; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        self.asked.append((scope["method"], scope["path"], message.get("body", b"")))
        await reply(send, 200, b"ok")


class Stream:
    """Sends a chunk whenever `more` is set, until `end` is set or the client leaves; keeps count of both."""

    def __init__(self) -> None:
        self.more = asyncio.Event()
        self.end = asyncio.Event()
        self.num_begun = 0
        self.num_left = 0
        self.num_ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.num_begun += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        gone = asyncio.create_task(receive())
        end = asyncio.create_task(self.end.wait())
        await asyncio.wait({gone, end}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            assert gone.result()["type"] == "http.disconnect"
            self.num_left += 1
            end.cancel()
            return
        gone.cancel()
        await send({"type": "http.response.body", "body": b"ended"})
        self.num_ended += 1


async def reply(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


__all__ = [
    "Answer",
    "Client",
    "Recorder",
    "Site",
    "Stream",
    "guard",
    "num_files",
    "reply",
    "request",
    "serving",
    "until",
]
