"""JsonEndpoint: a POST route, from its bytes to the call of a handler, and from whatever that raises to an answer.

The edge of a request's task: the only place under http/ besides sse.py that catches every exception.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve.edges import is_fault
from aserve.engine import AsyncEngine
from aserve.http.body import read_object
from aserve.http.connection import ClientGone, while_connected
from aserve.http.errors import error_response
from aserve.http.request_id import SCOPE_KEY, name_request

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request as its handler sees it: the body's fields, the request's id, and how to answer (once).

    is_large: the fields are so many, or so long, that going through them is work for a thread.
    """

    fields: dict[str, Any]
    is_large: bool
    request_id: str
    reply: Callable[[Response], Awaitable[None]]

    async def work(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call what goes through the fields, off the event loop where they are large."""
        if self.is_large:
            return await asyncio.to_thread(function, *arguments, **options)
        return function(*arguments, **options)


Handler = Callable[[Exchange], Awaitable[None]]


class Edge:
    """ASGI middleware around all others: what they raise is answered, or raised if the answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything through."""
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except BaseException as error:
            if has_begun or scope["type"] != "http" or not is_fault(error):
                raise
            await error_response(error, scope.get(SCOPE_KEY))(scope, receive, send)


class _Reply:
    """The answer to a request. has_begun: an error can have no status any more, nor anything after it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.has_begun = False

    async def __call__(self, response: Response) -> None:
        """Send it. Raises `ClientGone`."""
        await response(self._scope, self._receive, self._send_on)

    async def _send_on(self, message: Message) -> None:
        self.has_begun = True
        try:
            await self._send(message)
        except OSError as error:  # ASGI 2.4 says so when the connection is closed
            raise ClientGone from error


class JsonEndpoint:
    """An ASGI application that calls `handler` with the JSON object of each request while the client is there."""

    def __init__(self, engine: AsyncEngine, handler: Handler) -> None:
        self._engine = engine
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        reply = _Reply(scope, receive, send)
        try:
            _ = self._engine.info  # without a model no request is worth reading
            body = await read_object(scope, receive)
            name_request(scope, body.fields.get("request_id"))
        except ClientGone:
            return
        except BaseException as error:
            if not is_fault(error):
                raise
            with suppress(ClientGone):
                await reply(error_response(error, scope[SCOPE_KEY]))
            return
        async with while_connected(receive):
            try:
                await self._handler(Exchange(body.fields, body.is_large, scope[SCOPE_KEY], reply))
            except ClientGone:
                raise
            except BaseException as error:
                if reply.has_begun or not is_fault(error):
                    raise
                await reply(error_response(error, scope[SCOPE_KEY]))
