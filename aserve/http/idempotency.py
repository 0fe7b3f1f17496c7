"""Idempotency: ASGI middleware that answers a POST with an Idempotency-Key once, and from then on the same way.

    guard( Idempotency( routes ) )       the body has come whole; whose key it is told by the credentials sent with it

A request with a key runs in a task of its own: its client may leave and come back, within `LINGER_S`, and find it going
on. One without a key goes by untouched. A retry of another request under the same key is refused with 422.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve.core.errors import InvalidRequestError
from aserve.edges import aside, is_fault
from aserve.http.access import record_of
from aserve.http.connection import ClientGone, while_connected
from aserve.http.direct import STATE_KEY
from aserve.http.errors import HttpError, error_response
from aserve.stores.idempotency import MAX_KEY_CHARS, IdempotencyStore, KeptAnswer, KeyReusedError

LINGER_S: Final = 30.0
"""How long a request goes on whose client has left."""
HEADER: Final = b"idempotency-key"
REPLAYED: Final = (b"idempotent-replayed", b"true")
"""A header of answers that were asked for before."""
_KEY: Final = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,%d}[\x21-\x7e])?" % (MAX_KEY_CHARS - 2))
_CREDENTIALS: Final = (b"authorization", b"x-api-key")
_log = logging.getLogger(__name__)


class Idempotency:
    """send_timeout_s: how long a client may take nothing of its answer."""

    def __init__(
        self, app: ASGIApp, store: IdempotencyStore, *, linger_s: float = LINGER_S, send_timeout_s: float = 30.0
    ) -> None:
        self._app = app
        self._store = store
        self._linger_s = linger_s
        self._send_timeout_s = send_timeout_s
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        keys = [value for name, value in scope.get("headers", ()) if name == HEADER]
        if scope["type"] != "http" or scope["method"] != "POST" or not keys:
            await self._app(scope, receive, send)
            return
        if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
            told = f"Idempotency-Key must be one header of 1 to {MAX_KEY_CHARS} printable ASCII characters"
            await error_response(InvalidRequestError(told, "idempotency-key"))(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        name, fingerprint = _name_of(scope, keys[0]), hashlib.sha256(body).digest()
        try:
            answer = self._store.find(name, fingerprint)
        except KeyReusedError as error:
            await error_response(HttpError(422, error.code, error.message))(scope, receive, send)
            return
        is_new = answer is None
        if answer is None:
            answer = self._store.begin(name, fingerprint)
            task = asyncio.create_task(self._run(scope, body, name, answer), name="aserve: an idempotent request")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        with suppress(ClientGone):
            async with while_connected(receive):
                await self._follow(answer, send, is_new=is_new)

    async def _follow(self, answer: KeptAnswer, send: Send, *, is_new: bool) -> None:
        """Send what there is of it, and what comes."""
        answer.num_readers += 1
        has_begun = False
        try:
            async for piece in answer.pieces():
                if not has_begun:
                    has_begun = True
                    await self._put(send, _start_of(answer, is_new=is_new))
                await self._put(send, {"type": "http.response.body", "body": piece, "more_body": True})
            if not has_begun:
                await self._put(send, _start_of(answer, is_new=is_new))
            await self._put(send, {"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            answer.num_readers -= 1
            if answer.num_readers == 0 and not answer.has_ended:
                asyncio.get_running_loop().call_later(self._linger_s, _leave, answer)

    async def _put(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)
        except (OSError, TimeoutError) as error:
            raise ClientGone from error

    async def _run(self, scope: Scope, body: bytes, name: bytes, answer: KeptAnswer) -> None:
        """Have the application answer, and keep what it says."""
        has_read = False

        async def receive() -> Message:
            nonlocal has_read
            if not has_read:
                has_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await answer.abandoned.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.begin(message["status"], tuple(message.get("headers", ())))
            elif piece := message.get("body", b""):
                answer.add(piece)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_whole.append(True)

        is_whole: list[bool] = []
        fault: BaseException | None = None
        try:
            scope["state"] = _without_line(scope.get("state", {}))
            await self._app(scope, receive, send)
        except BaseException as error:
            if not is_fault(error):
                raise
            fault = error
        finally:
            is_good = bool(is_whole) and fault is None and answer.status in range(200, 300)
            is_good = is_good and record_of(scope).error is None and not record_of(scope).was_aborted
            answer.end(fault if is_whole or fault is not None else ClientGone())
            aside(_log, "keeping an answer", None, lambda: self._store.settle(name, answer, is_good=is_good))


def _leave(answer: KeptAnswer) -> None:
    if answer.num_readers == 0:
        answer.abandoned.set()


def _start_of(answer: KeptAnswer, *, is_new: bool) -> Message:
    headers = [*answer.headers] if is_new else [*answer.headers, REPLAYED]
    return {"type": "http.response.start", "status": answer.status or 500, "headers": headers}


def _name_of(scope: Scope, key: bytes) -> bytes:
    """Of whose request of which path it is. Credentials are part of it: nobody finds another's answers."""
    given = [value for name, value in scope["headers"] if name in _CREDENTIALS]
    parts = [scope["path"].encode(), key, *given]
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()


def _without_line(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the server offers, but its line: the answer comes through `send`, where it is heard."""
    return {name: value for name, value in state.items() if name != STATE_KEY}


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None where the client left."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)
