"""Dispatch: the ingress as an ASGI application. Sends each request to a replica, and what comes back to the client.

    request --> Ask (what it begins with, whose it is) --> a replica --> Head, pieces, Tail --> client
                    ^                                         |
                    '--- gone, draining or full: another <----'  as long as nothing has been sent to the client

A stream whose replica goes away ends with an error in the stream, as its API spells it. What concerns all replicas, or
is kept by one of them, is told apart first (whole.py). Knows neither Ray nor the engine.
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
from aserve.http.scope import route_path
from aserve.http.sse import event, named_event
from aserve.ray.carried import Carried, Head, Tail, carried_of
from aserve.ray.replicas import NO_ASK, LostAnswerError, ReplicaLost, Replicas, Target
from aserve.ray.whole import WholeService, is_kept
from aserve.routing import Ask, keys_of, session_of

REPLICA_HEADER: Final = b"x-aserve-replica"
"""Of an answer: who gave it. Of a request: who shall."""
DONE: Final = b"data: [DONE]\n\n"
RESPONSES_PATH: Final = "/v1/responses"
ROUTED_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES_PATH, "/v1/messages"})
"""Whose bodies tell how a prompt begins."""
ELSEWHERE: Final = frozenset({429, 503, 529})
"""Statuses of a replica that is full or about to end: another may do better."""
NOT_HERE: Final = frozenset({404, 503})
"""Statuses of a replica that does not keep what was asked for."""
_DROPPED: Final = frozenset({b"x-request-id"})
"""Headers of replicas' answers that Serve's proxy says itself."""


class Dispatch:
    """retries: other replicas that one request is sent to, at most."""

    def __init__(self, replicas: Replicas, *, retries: int = 2) -> None:
        self._replicas = replicas
        self._whole = WholeService(replicas)
        self._retries = retries
        self._model_names: frozenset[str] = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whose body comes at once, as from the guard."""
        carried = carried_of(scope, await _body(receive))
        async with while_connected(receive):
            answerer = self._whole.answerer(carried)
            if answerer is not None:
                await (await self._whole.answer(answerer, carried))(scope, receive, send)
            elif is_kept(carried):
                await self._ask_in_turn(carried, scope, receive, send)
            else:
                await self._ask_one(carried, scope, receive, send)

    async def ask_of(self, carried: Carried) -> Ask:
        """What the router is told of a request. A name that is none of the model's is an adapter's."""
        if carried.method != "POST" or carried.path not in ROUTED_PATHS:
            return NO_ASK
        try:
            fields = msgspec.json.decode(carried.body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return NO_ASK  # a replica says what is wrong with it
        model = fields.get("model")
        if model is not None and not self._model_names:
            self._model_names = await self._whole.model_names()
        adapter = model if isinstance(model, str) and self._model_names and model not in self._model_names else ""
        return Ask(id="", keys=keys_of(fields), session=session_of(fields, _headers(carried)), adapter=adapter)

    async def _ask_one(self, carried: Carried, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request answered by the replica that the router chooses; by others where that one cannot."""
        ask, only = await self.ask_of(carried), _headers(carried).get(REPLICA_HEADER.decode(), "")
        tried: list[str] = []
        for attempt in range(self._retries + 1):
            is_last = bool(only) or attempt == self._retries
            relay = _Relay(carried, send, frozenset() if is_last else ELSEWHERE)
            try:
                await self._relay(relay, ask, Target(only, tuple(tried)), scope)
                return
            except _Elsewhere as elsewhere:
                tried.append(elsewhere.replica)
                if only:
                    break
        await error_response(UnavailableError("no replica could answer"), carried.request_id)(scope, receive, send)

    async def _ask_in_turn(self, carried: Carried, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask one replica after another for what one of them keeps; the last one's answer counts."""
        names = await self._whole.names()
        for place, name in enumerate(names, 1):
            relay = _Relay(carried, send, frozenset() if place == len(names) else NOT_HERE)
            try:
                await self._relay(relay, await self.ask_of(carried), Target(only=name), scope)
                return
            except _Elsewhere:
                continue
        await error_response(UnavailableError("no replica could answer"), carried.request_id)(scope, receive, send)

    async def _relay(self, relay: "_Relay", ask: Ask, target: Target, scope: Scope) -> None:
        """Have one replica answer. Raises `_Elsewhere` while nothing has been sent."""
        try:
            async with aclosing(self._replicas.respond(relay.carried, ask, target)) as items:
                await relay.run(items, scope)
        except ReplicaLost as lost:
            if not relay.has_begun:
                raise _Elsewhere(lost.replica) from lost
            await relay.fail(LostAnswerError(), scope)


class _Elsewhere(Exception):
    """A replica is gone before its answer began, or answered in a way that another may do better than."""

    def __init__(self, replica: str) -> None:
        self.replica = replica


class _Relay:
    """One replica's answer on its way to the client. better_elsewhere: statuses that are not sent on."""

    def __init__(self, carried: Carried, send: Send, better_elsewhere: frozenset[int]) -> None:
        self.carried = carried
        self._send = send
        self._better_elsewhere = better_elsewhere
        self.has_begun = False
        self._head: Head | None = None
        self._is_stream = False

    async def run(self, items: AsyncGenerator[Any], scope: Scope) -> None:
        """To its end. Raises what the iteration raises, `_Elsewhere`, and `ClientGone`."""
        async for item in items:
            if isinstance(item, Head):
                if item.status in self._better_elsewhere:
                    raise _Elsewhere(item.replica)
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
        told = failure_of(route_path(scope), error, self.carried.request_id)
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
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(pieces)
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _headers(carried: Carried) -> Mapping[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in carried.headers}
