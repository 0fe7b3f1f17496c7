"""face: the ingress's ASGI application, over any `Replicas`.

Edge( Ids( guard( Idempotency( Dispatch ) ) ) )        who may ask is the replicas' business
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from aserve.cli.flags import ServerOptions
from aserve.http.access import RECORD_KEY, Record
from aserve.http.app import DIALECTS
from aserve.http.endpoint import Edge
from aserve.http.idempotency import Idempotency
from aserve.http.middleware import MAX_BODY_BYTES, guard
from aserve.http.request_id import SCOPE_KEY, id_of
from aserve.ray.dispatch import Dispatch
from aserve.ray.replicas import Replicas
from aserve.stores.idempotency import IdempotencyStore


def face(replicas: Replicas, given: ServerOptions, *, retries: int = 2) -> ASGIApp:
    """The application. given: of it, max_body_bytes and root_path, and how answers are kept."""
    app: ASGIApp = Dispatch(replicas, retries=retries)
    if given.idempotency_bytes:
        store = IdempotencyStore(max_bytes=given.idempotency_bytes, max_age_s=given.idempotency_age)
        app = Idempotency(app, store, send_timeout_s=given.send_timeout)
    guarded = guard(app, max_body_bytes=given.max_body_bytes or MAX_BODY_BYTES)
    return Edge(_Named(guarded), dialects=DIALECTS, root_path=given.root_path)


class _Named:
    """Gives each request its id, which Serve's proxy puts into headers, and a record of what goes wrong with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on. Serve asks for the lifespan, of which there is nothing to say."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] == "http":
            scope[SCOPE_KEY] = id_of(scope)
            scope[RECORD_KEY] = Record()
        await self._app(scope, receive, send)


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
