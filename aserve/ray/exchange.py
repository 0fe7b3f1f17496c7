"""Exchange: one carried request through an ASGI application, whose answer is taken by iterating.

    Carried --> application --> send, or the direct line --> pieces that nobody has taken yet --> one item for all

What comes while the reader is away is one piece when it comes back: an item costs far more to carry than its bytes.
Leaving the iteration is the client's leaving.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from starlette.types import ASGIApp, Message

from aserve.http.access import record_of
from aserve.http.direct import STATE_KEY, DirectLine
from aserve.ray.carried import Carried, Head, Item, Tail

MAX_BEHIND_BYTES: Final = 256 * 1024
"""Of an answer that is not taken: beyond it the application has to wait, as with a client that does not read."""
LEAVE_S: Final = 5.0
"""How long an application may take to notice that its client has left."""


class Exchange:
    """Answers one request. replica: who does, for the `Head`."""

    def __init__(self, app: ASGIApp, carried: Carried, replica: str) -> None:
        self._app = app
        self._carried = carried
        self._replica = replica
        self._line = DirectLine()
        self._scope = carried.scope({STATE_KEY: self._line})
        self._head: Head | None = None
        self._pieces: list[bytes] = []
        self._num_behind = 0
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self._left = asyncio.Event()
        self._has_read = False

    async def items(self) -> AsyncGenerator[Item]:
        """The answer. Raises what the application raises, as one that could not be answered."""
        task = asyncio.create_task(self._run(), name="aserve: a carried request")
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                is_over = task.done()
                if self._head is not None:
                    head, self._head = self._head, None
                    yield head
                if self._pieces:
                    yield self._take()
                if is_over:
                    break
            await task
            error = record_of(self._scope).error
            yield Tail(None if error is None else error.code)
        finally:
            await self._leave(task)

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            asyncio.get_running_loop().call_soon(self._news.set)  # when this task is done

    async def _leave(self, task: asyncio.Task[None]) -> None:
        self._line.disconnect()
        self._left.set()
        self._taken.set()
        if not task.done():
            await asyncio.wait({task}, timeout=LEAVE_S)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        self._num_behind = 0
        self._taken.set()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _receive(self) -> Message:
        if not self._has_read:
            self._has_read = True
            return {"type": "http.request", "body": self._carried.body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = tuple((bytes(name), bytes(value)) for name, value in message.get("headers", ()))
            self._head = Head(message["status"], headers, self._replica)
            return  # nobody needs it before the first piece
        while self._num_behind > MAX_BEHIND_BYTES and not self._left.is_set():
            self._taken.clear()
            await self._taken.wait()
        piece = message.get("body", b"")
        self._put(piece)
        if not message.get("more_body", False):
            self._line.disconnect()
        elif self._line.is_requested_by(piece):
            self._line.connect(self._is_clear, self._write)

    def _put(self, piece: bytes) -> None:
        if piece:
            self._pieces.append(piece)
            self._num_behind += len(piece)
        self._news.set()

    def _is_clear(self) -> bool:
        return self._num_behind <= MAX_BEHIND_BYTES and not self._left.is_set()

    def _write(self, piece: bytes) -> bool:
        if not self._is_clear():
            return False
        self._put(piece)
        return True
