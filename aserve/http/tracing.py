"""Traces: OpenTelemetry's spans of requests, each made when its request is over, from the times that are kept anyway.

    POST /v1/chat/completions    from the head to the answer's end; a child of the client's span (traceparent)
      chat <model>               what the engine was asked, with gen_ai attributes; one for each prompt
        queue, prefill, decode   until admission, until the first token, until the last

Nothing is done while tokens come, and no word of a prompt or an answer is in a span. Who exports the spans, and when,
is the tracer's business. Needs opentelemetry-api: nothing else of aserve imports this module, but the command line when
the environment asks for traces.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Final

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from starlette.types import ASGIApp, Receive, Scope, Send

from aserve.core.ended import EndedRequest
from aserve.edges import aside
from aserve.engine import Engine
from aserve.http.access import TENANT_KEY, UNKNOWN, Record, record_of
from aserve.http.middleware import PUBLIC_PATHS
from aserve.http.pages.static_pages import FILES_PATH
from aserve.http.request_id import SCOPE_KEY
from aserve.http.scope import METHODS

UNTRACED: Final = frozenset({*PUBLIC_PATHS, FILES_PATH, "/"})
"""Probes, scrapes and the files of pages, which come all the time and tell nothing."""
TEXT_PATHS: Final = frozenset({UNKNOWN, "/v1/completions"})
"""Where a prompt is a text and no conversation; and where there is no path, in an application of one's own."""
NS: Final = 1_000_000_000

_log = logging.getLogger(__name__)
Attributes = dict[str, str | int | float | bool | tuple[str, ...]]


class _Visit:
    """A request over HTTP, and what its prompts came to, with the time at which each was over.

    context: of its span, once it is over. What the engine still does for it then is told at once.
    """

    def __init__(self) -> None:
        self.ended: list[tuple[EndedRequest, int]] = []
        self.context: Context | None = None
        self.path = UNKNOWN


_VISIT: Final[ContextVar[_Visit | None]] = ContextVar("aserve.visit", default=None)


class Tracing:
    """ASGI middleware around an application of `create_app`, and an observer of its engine: all that they are asked.

    tracer: the application's own say, or of a TracerProvider made for it. Requests that come another way (from Python,
    or from a batch that is resumed) have spans without one of HTTP above them.
    """

    def __init__(self, app: ASGIApp, engine: Engine, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer
        engine.end_listeners.append(self.request_ended)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; make its spans when it is over."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit, start_ns = _Visit(), time.time_ns()
        token = _VISIT.set(visit)
        try:
            await self._app(scope, receive, send)
        finally:
            _VISIT.reset(token)
            aside(_log, "tracing", scope.get(SCOPE_KEY), self._leave, scope, visit, start_ns)

    def request_ended(self, ended: EndedRequest) -> None:
        """The engine's part of a request is over. Called by the engine, in the task that asked."""
        visit, now_ns = _VISIT.get(), time.time_ns()
        if visit is None:
            self._tell(ended, now_ns, contexts.get_current(), UNKNOWN)
        elif visit.context is None:
            visit.ended.append((ended, now_ns))
        else:
            self._tell(ended, now_ns, visit.context, visit.path)

    def _leave(self, scope: Scope, visit: _Visit, start_ns: int) -> None:
        record = record_of(scope)
        visit.path = record.path
        visit.context = parent = _parent(scope)
        if record.path in UNTRACED:
            return
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        attributes: Attributes = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
        if record.path != UNKNOWN:
            attributes["http.route"] = record.path
        attributes |= _told(scope, record)
        name = method if record.path == UNKNOWN else f"{method} {record.path}"
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=start_ns)
        if record.error is not None and (record.status is None or not 400 <= record.status < 500):
            span.set_status(Status(StatusCode.ERROR))
        visit.context = trace.set_span_in_context(span, parent)
        for ended, end_ns in visit.ended:
            self._tell(ended, end_ns, visit.context, visit.path)
        visit.ended.clear()
        span.end(time.time_ns())

    def _tell(self, ended: EndedRequest, end_ns: int, parent: Context, path: str) -> None:
        """The spans of one prompt."""
        timings = ended.timings
        start_ns = end_ns - round(timings.total_s * NS)
        operation = _operation(ended, path)
        attributes = _attributes(ended, operation)
        span = self._tracer.start_span(
            f"{operation} {ended.model}", parent, SpanKind.INTERNAL, attributes, start_time=start_ns
        )
        if ended.error is not None:
            span.set_status(Status(StatusCode.ERROR))
        context = trace.set_span_in_context(span, parent)
        for name, from_s, to_s in _phases(ended):
            phase: Span = self._tracer.start_span(name, context, start_time=start_ns + round(from_s * NS))
            phase.end(start_ns + round(to_s * NS))
        span.end(end_ns)


def _parent(scope: Scope) -> Context:
    """Where the application that this one is mounted in is, if it traces; else what the client's headers say."""
    current = contexts.get_current()
    if trace.get_current_span(current).get_span_context().is_valid:
        return current
    wanted = propagate.get_global_textmap().fields
    carrier: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        if (field := name.decode("latin-1")) in wanted:
            carrier.setdefault(field, []).append(value.decode("latin-1"))
    if len(carrier.get("traceparent", ())) > 1:  # which of them is meant nobody can know
        return current
    return propagate.extract(carrier, current)


def _told(scope: Scope, record: Record) -> Attributes:
    """How a request was answered, and whose it was."""
    told: Mapping[str, str | int | bool | None] = {
        "http.response.status_code": record.status,
        "error.type": None if record.error is None else record.error.code,
        "aserve.request_id": scope.get(SCOPE_KEY),
        "aserve.tenant": scope.get(TENANT_KEY),
        "aserve.cut": None if record.is_whole else True,
    }
    return {name: value for name, value in told.items() if value is not None}


def _operation(ended: EndedRequest, path: str) -> str:
    """By OpenTelemetry's names."""
    if ended.num_tokens == 0 and ended.timings.first_token_s is not None:
        return "embeddings"
    return "text_completion" if path in TEXT_PATHS else "chat"


def _attributes(ended: EndedRequest, operation: str) -> Attributes:
    request, params = ended.request, ended.request.params
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "aserve",
        "gen_ai.request.model": ended.model,
        "gen_ai.response.model": ended.model,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.cache_read.input_tokens": ended.num_cached_tokens,
        "gen_ai.response.finish_reasons": tuple(reason.value for reason in ended.finish_reasons),
    }
    if ended.error is not None:
        attributes["error.type"] = ended.error
    if operation == "embeddings":
        return attributes
    attributes |= {
        "gen_ai.usage.output_tokens": ended.num_tokens,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    if params.top_k > 0:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.n > 1:
        attributes["gen_ai.request.choice.count"] = params.n
    if params.frequency_penalty:
        attributes["gen_ai.request.frequency_penalty"] = params.frequency_penalty
    if params.presence_penalty:
        attributes["gen_ai.request.presence_penalty"] = params.presence_penalty
    if params.seed is not None:
        attributes["gen_ai.request.seed"] = params.seed
    if ended.timings.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = ended.timings.first_token_s
    return attributes


def _phases(ended: EndedRequest) -> Iterator[tuple[str, float, float]]:
    """Names, and seconds from the arrival. None of a request without a token: nobody was told when it was admitted."""
    queued_s, first_s, last_s = ended.timings.queued_s, ended.timings.first_token_s, ended.last_token_s
    if queued_s is None or first_s is None:
        return
    yield "queue", 0.0, queued_s
    yield "prefill", queued_s, first_s
    if last_s is not None:
        yield "decode", first_s, last_s
