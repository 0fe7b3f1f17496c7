"""create_app: the OpenAI API of an engine as an ASGI application, to be served or to be mounted in another one."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from aserve.core.errors import AserveError
from aserve.engine import AsyncEngine
from aserve.http.access import AccessLog
from aserve.http.body import Glance
from aserve.http.endpoint import Edge, Handler, JsonEndpoint
from aserve.http.errors import handle_error
from aserve.http.keys import Keyring
from aserve.http.middleware import MAX_BODY_BYTES, MAX_TOTAL_BODY_BYTES, PUBLIC_PATHS, guard
from aserve.http.openai.chat import chat_completions
from aserve.http.openai.completions import completions
from aserve.http.openai.glance import generation_glance, text_glance
from aserve.http.openai.models import model_routes
from aserve.http.openai.tokenize import detokenize, tokenize
from aserve.http.openapi import openapi_route
from aserve.http.ops import ops_routes
from aserve.http.request_id import RequestIds
from aserve.http.sse import StreamLimits


def create_app(
    engine: AsyncEngine,
    *,
    api_keys: Sequence[str] = (),
    keyring: Keyring | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_total_body_bytes: int = MAX_TOTAL_BODY_BYTES,
    body_timeout_s: float = 10.0,
    stream_limits: StreamLimits | None = None,
) -> Starlette:
    """The application. `engine` may be entered later, and by whom is not its business: until then it answers 503.

    api_keys: with any, a request needs one of them as a bearer token, except for the health routes. keyring: instead of
    them, where it matters whose key it is.
    max_body_bytes, body_timeout_s: how long a request's body may be, and how long the client may be silent within it.
    max_total_body_bytes: of all that are being received; a large one beyond it is answered with 503.
    """
    limits = stream_limits or StreamLimits()

    def post(path: str, handler: Handler, glance: Glance, *, generates: bool = False) -> Route:
        return Route(path, JsonEndpoint(engine, handler, glance, generates=generates), methods=["POST"])

    routes = [
        post("/v1/chat/completions", chat_completions(engine, limits), generation_glance(engine), generates=True),
        post("/v1/completions", completions(engine, limits), generation_glance(engine), generates=True),
        post("/tokenize", tokenize(engine), text_glance(engine)),
        post("/detokenize", detokenize(engine), text_glance(engine)),
        *model_routes(engine),
        *ops_routes(engine),
        openapi_route(),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Edge),
            Middleware(RequestIds),
            Middleware(AccessLog, paths=[route.path for route in routes], quiet_paths=PUBLIC_PATHS),
            Middleware(
                guard,
                api_keys=api_keys,
                keyring=keyring,
                max_body_bytes=max_body_bytes,
                max_total_body_bytes=max_total_body_bytes,
                body_timeout_s=body_timeout_s,
            ),
        ],
        exception_handlers=dict.fromkeys((AserveError, HTTPException, Exception), handle_error),
    )
    app.router.redirect_slashes = False  # a redirect would be built from the Host header; and OpenAI's has none
    return app
