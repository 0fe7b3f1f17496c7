"""Dispatch: the ingress as an ASGI application. Sends each request to a replica, and what comes back to the client.

    request --> Ask (what it begins with, whose it is) --> a replica --> Head, pieces, Tail --> client
                    ^                                         |
                    '--- gone, draining or full: another <----'  as long as nothing has been sent to the client

A stream whose replica goes away ends with an error in the stream, as its API spells it. What is asked of all replicas
(whole.py) and what one of them keeps (kept.py) comes first. Knows neither Ray nor the engine.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.types import Message, Receive, Scope, Send

from aserve.core.errors import AserveError, UnavailableError
from aserve.http.access import record_of
from aserve.http.app import DIALECTS
from aserve.http.connection import ClientGone, while_connected
from aserve.http.dialect import dialect_at
from aserve.http.errors import error_body, error_response
from aserve.http.request_id import SCOPE_KEY
from aserve.http.scope import route_path
from aserve.http.sse import event, named_event
from aserve.ray.carried import Carried, Head, Tail, carried_of
from aserve.ray.replicas import ANYWHERE, NO_ASK, LostAnswerError, ReplicaLost, Replicas, Target
from aserve.routing import Ask, keys_of, session_of

REPLICA_HEADER: Final = b"x-aserve-replica"
"""Of an answer: who gave it. Of a request: who shall."""
DONE: Final = b"data: [DONE]\n\n"
RESPONSES_PATH: Final = "/v1/responses"
ROUTED_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES_PATH, "/v1/messages"})
"""Whose bodies tell how a prompt begins."""
ELSEWHERE: Final = frozenset({429, 503, 529})
"""Statuses of a replica that is full or about to end: another may do better."""
_DROPPED: Final = frozenset({b"x-request-id"})
"""Headers of replicas' answers that Serve's proxy says itself."""


class Dispatch:
    """model_names: those of the model itself; a request's other name is an adapter's. retries: of one request."""

    def __init__(self, replicas: Replicas, *, retries: int = 2, model_names: frozenset[str] = frozenset()) -> None:
        self._replicas = replicas
        self._retries = retries
        self._model_names = model_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whose body comes at once, as from the guard."""
        body = await _body(receive)
        carried = carried_of(scope, body)
        async with while_connected(receive):
            await self.answer(carried, self.ask_of(carried), scope, receive, send)

    def ask_of(self, carried: Carried) -> Ask:
        """What the router is told of a request."""
        if carried.method != "POST" or carried.path not in ROUTED_PATHS:
            return NO_ASK
        try:
            fields = msgspec.json.decode(carried.body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return NO_ASK  # a replica says what is wrong with it
        model = fields.get("model")
        adapter = model if isinstance(model, str) and self._model_names and model not in self._model_names else ""
        return Ask(id="", keys=keys_of(fields), session=session_of(fields, _headers(carried)), adapter=adapter)

    async def answer(
        self, carried: Carried, ask: Ask, scope: Scope, receive: Receive, send: Send, only: str = ""
    ) -> None:
        """Have it answered, by other replicas where one cannot."""
        tried: list[str] = []
        only = only or _headers(carried).get(REPLICA_HEADER.decode(), "")
        while True:
            relay = _Relay(carried, send, is_last=bool(only) or len(tried) >= self._retries)
            target = Target(only, tuple(tried)) if only or tried else ANYWHERE
            try:
                async with aclosing(self._replicas.respond(carried, ask, target)) as items:
                    await relay.run(items, scope)
                return
            except _Refused as refused:
                tried.append(refused.replica)
            except ReplicaLost as lost:
                if relay.has_begun:
                    await relay.fail(LostAnswerError(), scope)
                    return
                if relay.is_last:
                    await error_response(UnavailableError("no replica could answer"), carried.request_id)(
                        scope, receive, send
                    )
                    return
                tried.append(lost.replica)


class _Refused(Exception):
    """A replica's answer is one that another may do better than."""

    def __init__(self, replica: str) -> None:
        self.replica = replica


class _Relay:
    """One replica's answer on its way to the client. is_last: it is sent on, whatever it is."""

    def __init__(self, carried: Carried, send: Send, *, is_last: bool) -> None:
        self._carried = carried
        self._send = send
        self.is_last = is_last
        self.has_begun = False
        self._head: Head | None = None
        self._is_stream = False

    async def run(self, items: AsyncGenerator[Any], scope: Scope) -> None:
        """To its end. Raises what the iteration raises, `_Refused`, and `ClientGone`."""
        async for item in items:
            if isinstance(item, Head):
                if item.status in ELSEWHERE and not self.is_last:
                    raise _Refused(item.replica)
                self._head = item
            elif isinstance(item, Tail):
                await self._end(item, scope)
                return
            else:
                await self._begin()
                await self._put({"type": "http.response.body", "body": item, "more_body": True})
        raise ReplicaLost("" if self._head is None else self._head.replica)  # without an end

    async def _begin(self) -> None:
        if self.has_begun or self._head is None:
            return
        headers = [pair for pair in self._head.headers if pair[0] not in _DROPPED]
        self._is_stream = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers)
        headers.append((REPLICA_HEADER, self._head.replica.encode()))
        self.has_begun = True
        await self._put({"type": "http.response.start", "status": self._head.status, "headers": headers})

    async def _end(self, tail: Tail, scope: Scope) -> None:
        if tail.error is not None:
            record_of(scope).error = _ToldError(tail.error)
        await self._begin()
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: AserveError, scope: Scope) -> None:
        """What the client still can be told: a stream ends with an error; what has a length is cut."""
        record_of(scope).error = error
        if not self._is_stream:
            raise error
        told = failure_of(route_path(scope), error, self._carried.request_id)
        await self._put({"type": "http.response.body", "body": told, "more_body": False})

    async def _put(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error


class _ToldError(AserveError):
    """An error that a replica told the client of."""

    def __init__(self, code: str) -> None:
        super().__init__("the replica has told the client")
        self.code = code


def failure_of(path: str, error: AserveError, request_id: str) -> bytes:
    """The last events of a stream that cannot go on, as the API at this path spells them."""
    dialect = dialect_at(path, DIALECTS)
    if dialect is not None:
        return named_event(b"error", dialect.body(error, request_id))
    if path == RESPONSES_PATH:
        fields = msgspec.json.decode(error_body(error))["error"]
        told = {"type": "error", "code": fields["code"], "message": fields["message"], "param": fields["param"]}
        return named_event(b"error", msgspec.json.encode(told))
    return event(error_body(error)) + DONE


async def _body(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(pieces)
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _headers(carried: Carried) -> Mapping[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in carried.headers}


__all__ = ["REPLICA_HEADER", "SCOPE_KEY", "Dispatch", "failure_of"]
