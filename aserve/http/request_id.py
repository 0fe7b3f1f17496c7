"""A name for every request: in the scope for those who answer, and in the X-Request-Id header of the answer.

It is what the client calls it, by an X-Request-Id header or the body's request_id, or else random. Nobody tells
requests apart by it: the engine has ids of its own, and two requests may have one name.
"""

import random
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve.core.request import REQUEST_ID
from aserve.http.dialect import dialect_of, id_headers

SCOPE_KEY: Final = "aserve.request_id"


def name_request(scope: Scope, name: object) -> None:
    """The body's name for a request, unless its header named it; one that is not valid is for others to refuse."""
    if isinstance(name, str) and REQUEST_ID.match(name) and "x-request-id" not in Headers(scope=scope):
        scope[SCOPE_KEY] = name


def id_of(scope: Scope) -> str:
    """The name that a request's header gives it, or a random one."""
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return given if REQUEST_ID.match(given) else f"{random.getrandbits(128):032x}"  # no secret, and no system call


class RequestIds:
    """ASGI middleware. A header that is no REQUEST_ID is passed over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the id in a header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[SCOPE_KEY] = id_of(scope)
        names = id_headers(dialect_of(scope))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = [(name, scope[SCOPE_KEY].encode()) for name in names]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        await self._app(scope, receive, send_with_id)
