"""create_app: the OpenAI API of an engine, and Anthropic's, as an ASGI application, to be served or to be mounted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from aserve.core.errors import AserveError, UnavailableError
from aserve.engine import Engine
from aserve.http.access import AccessLog
from aserve.http.anthropic.errors import ANTHROPIC
from aserve.http.anthropic.messages import count_tokens
from aserve.http.batch.batches import Batches
from aserve.http.batch.files import file_routes
from aserve.http.batch.lines import line_handlers
from aserve.http.batch.routes import batch_routes, create_batch
from aserve.http.body import Glance, at_nothing
from aserve.http.endpoint import Edge, Handler, JsonEndpoint
from aserve.http.errors import handle_error
from aserve.http.inspector import inspector_route
from aserve.http.keys import Keyring
from aserve.http.middleware import MAX_BODY_BYTES, MAX_TOTAL_BODY_BYTES, PUBLIC_PATHS, guard
from aserve.http.openai.adapters import load_adapter, unload_adapter
from aserve.http.openai.glance import generation_glance, input_glance, text_glance
from aserve.http.openai.models import model_routes
from aserve.http.openai.responses.create import count_input_tokens
from aserve.http.openai.responses.keeping import Kept
from aserve.http.openai.responses.later import later_routes
from aserve.http.openai.tokenize import detokenize, tokenize, tokenizer_info_route
from aserve.http.openapi import openapi_route
from aserve.http.ops import ops_routes
from aserve.http.options import DEFAULTS, AppOptions
from aserve.http.pages.static_pages import FILES_PATH, StaticPages
from aserve.http.pooling.classify import classify
from aserve.http.pooling.embeddings import pooling
from aserve.http.pooling.scores import rerank, score
from aserve.http.request_id import RequestIds
from aserve.http.requests import request_routes
from aserve.http.sse import StreamLimits
from aserve.stores.batches import BatchStore
from aserve.stores.responses import MemoryStore, ResponseStore

DIALECTS: Final = (ANTHROPIC,)
"""Of the APIs that are not OpenAI's."""
BASE_BODY_BYTES: Final = 3 * 1024 * 1024
"""Of a body, whatever the context: a long field besides the prompt, or a batch of short prompts."""
BODY_BYTES_PER_TOKEN: Final = 8
"""A token in JSON: a number of six digits and a comma, or a word of text, some characters escaped."""


def create_app(  # noqa: PLR0913  all but the engine may be left out
    engine: Engine,
    *,
    api_keys: Sequence[str] = (),
    keyring: Keyring | None = None,
    max_body_bytes: int | None = None,
    max_total_body_bytes: int = MAX_TOTAL_BODY_BYTES,
    body_timeout_s: float = 10.0,
    stream_limits: StreamLimits | None = None,
    response_store: ResponseStore | None = None,
    options: AppOptions = DEFAULTS,
) -> Starlette:
    """The application. `engine` may be entered later, and by whom is not its business: until then it answers 503.

    api_keys: with any, a request needs one of them as a bearer token, except for the health routes and the pages.
    keyring: instead of them, where it matters whose key it is.
    max_body_bytes: of a request; None for `body_limit`, up to which a body that is refused costs little to refuse.
    body_timeout_s: how long the client may be silent within its body.
    max_total_body_bytes: of all that are being received; a large one beyond it is answered with 503.
    response_store: where /v1/responses keeps them; None is memory of its own. Whoever made it closes it.
    options: what else is decided of the API.
    """
    limits = stream_limits or StreamLimits()
    kept = Kept(response_store or MemoryStore())
    handlers = line_handlers(engine, limits, kept, options)
    batches = Batches(engine, BatchStore(options.batch_store, options.batch_store_bytes), handlers)
    routes = _routes(engine, limits, options, handlers, kept, batches)
    public_paths = PUBLIC_PATHS
    if options.ui:
        is_open = not api_keys if keyring is None else keyring.is_open
        routes.append(inspector_route(engine, limits, is_open=is_open))
        pages = StaticPages()
        routes += pages.routes()
        public_paths |= pages.paths
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Edge, dialects=DIALECTS, root_path=options.root_path),
            Middleware(RequestIds),
            Middleware(AccessLog, paths=[route.path for route in routes], quiet_paths={*PUBLIC_PATHS, FILES_PATH}),
            *options.cors(),
            Middleware(
                guard,
                api_keys=api_keys,
                keyring=keyring,
                max_body_bytes=max_body_bytes or body_limit(engine),
                max_total_body_bytes=max_total_body_bytes,
                body_timeout_s=body_timeout_s,
                public_paths=public_paths,
            ),
            *options.kept_answers(limits.send_timeout_s),
        ],
        exception_handlers=dict.fromkeys((AserveError, HTTPException, Exception), handle_error),
    )
    app.state.batches = batches  # who serves it resumes those that a process before it has left, and closes their store
    app.router.redirect_slashes = False  # a redirect would be built from the Host header; and OpenAI's has none
    return app


def _routes(
    engine: Engine,
    limits: StreamLimits,
    options: AppOptions,
    handlers: Mapping[str, Handler],
    kept: Kept,
    batches: Batches,
) -> list[Route]:
    def post(path: str, handler: Handler, glance: Glance, *, generates: bool = False) -> Route:
        endpoint = JsonEndpoint(engine, handler, glance, generates=generates, lenient=options.lenient)
        return Route(path, endpoint, methods=["POST"])

    glances = dict.fromkeys(("/v1/chat/completions", "/v1/completions"), generation_glance(engine))
    glances["/v1/responses"] = input_glance(engine)
    routes = [
        *(post(url, handler, glances.get(url, at_nothing), generates=True) for url, handler in handlers.items()),
        post("/v1/responses/input_tokens", count_input_tokens(engine, kept), at_nothing),
        *later_routes(kept, limits),
        post("/pooling", pooling(engine), at_nothing, generates=True),
        post("/classify", classify(engine), at_nothing, generates=True),
        *(post(path, score(engine), at_nothing, generates=True) for path in ("/score", "/v1/score")),
        *(post(path, rerank(engine), at_nothing, generates=True) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        post("/v1/messages/count_tokens", count_tokens(engine), at_nothing),
        post("/tokenize", tokenize(engine), text_glance(engine)),
        post("/detokenize", detokenize(engine), text_glance(engine)),
        post("/v1/load_lora_adapter", load_adapter(engine), at_nothing),
        post("/v1/unload_lora_adapter", unload_adapter(engine), at_nothing),
        post("/v1/batches", create_batch(batches), at_nothing),
        *batch_routes(batches),
        *file_routes(batches.store),
        *model_routes(engine),
        *ops_routes(engine),
        *request_routes(engine),
        openapi_route(options),
    ]
    if options.enable_tokenizer_info_endpoint:
        routes.append(tokenizer_info_route(engine))
    return routes


def body_limit(engine: Engine) -> Callable[[], int]:
    """Tells how many bytes a body may have: 3 MiB and 8 bytes for each token of the model's context, up to 8 MiB.

    Before the model is loaded, which is when no body is parsed, 8 MiB.
    """

    def max_bytes() -> int:
        try:
            context = engine.info.max_model_len
        except UnavailableError:
            return MAX_BODY_BYTES
        return min(MAX_BODY_BYTES, BASE_BODY_BYTES + BODY_BYTES_PER_TOKEN * context)

    return max_bytes
