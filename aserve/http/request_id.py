"""An id for every request: in the scope for those who answer, and in the X-Request-Id header of the answer."""

import uuid
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SCOPE_KEY: Final = "aserve.request_id"


class RequestIds:
    """ASGI middleware. Ids are ours and unique: what a client calls its request cannot collide with another's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the id in a header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[SCOPE_KEY] = uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)
