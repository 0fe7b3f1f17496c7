"""JsonEndpoint: a POST route, from its bytes to the call of a handler, and from whatever that raises to an answer.

The edge of a request's task: the only place under http/ besides sse.py that catches every exception.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve.edges import is_fault
from aserve.engine import Engine
from aserve.http.access import Record, record_of
from aserve.http.body import Glance, at_nothing, read_object
from aserve.http.connection import ClientGone, while_connected
from aserve.http.dialect import Dialect, note_dialect
from aserve.http.errors import error_response
from aserve.http.keys import tenant_of
from aserve.http.request_id import SCOPE_KEY, name_request
from aserve.http.shapes import UnknownFieldError
from aserve.tenants import Allowance
from aserve.workers import Workers

MAX_WARNINGS: Final = 32
"""Unknown fields that a lenient server leaves out of a request; one more is refused."""
MAX_WARNING_CHARS: Final = 1024
"""Of the header that tells of them."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request as its handler sees it: the body's fields, the request's id, and how to answer (once).

    is_large: the fields are so many, or so long, that going through them is work for one of the `workers`.
    tenant: on whose account it is. record: to be told what the access log shall say. warnings: for the answer's body.
    default_priority: of a request that names none.
    """

    fields: dict[str, Any]
    is_large: bool
    request_id: str
    tenant: str
    reply: Callable[[Response], Awaitable[None]]
    workers: Workers
    record: Record
    warnings: list[str] = field(default_factory=list)
    default_priority: int = 0

    def priority_of(self, named: int | None) -> int:
        """The one that its fields name, else the default."""
        return self.default_priority if named is None else named

    async def work(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call what goes through the fields, off the event loop where they are large."""
        if self.is_large:
            return await self.workers.run(function, *arguments, **options)
        return function(*arguments, **options)


Handler = Callable[[Exchange], Awaitable[None]]


class Edge:
    """ASGI middleware around all others: what they raise is answered, or raised if the answer has begun.

    dialects: those that are spoken at some of the paths. root_path: what a proxy has taken off all paths, or has not.
    """

    def __init__(self, app: ASGIApp, dialects: Sequence[Dialect] = (), root_path: str = "") -> None:
        self._app = app
        self._dialects = dialects
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything through."""
        has_begun = False
        if scope["type"] == "http":
            scope["root_path"] = scope.get("root_path") or self._root_path
            note_dialect(scope, self._dialects)

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


class Reply:
    """The answer to a request. has_begun: an error can have no status any more, nor anything after it.

    headers: what every answer says besides its own.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, headers: Callable[[], dict[str, str]]) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._headers = headers
        self.has_begun = False

    async def __call__(self, response: Response) -> None:
        """Send it. Raises `ClientGone`."""
        response.headers.update(self._headers())
        await response(self._scope, self._receive, self._send_on)

    async def _send_on(self, message: Message) -> None:
        self.has_begun = True
        try:
            await self._send(message)
        except OSError as error:  # ASGI 2.4 says so when the connection is closed
            raise ClientGone from error


class JsonEndpoint:
    """An ASGI application that calls `handler` with the JSON object of each request while the client is there.

    A request is open until it is answered, to its stream's end. glance: looks at the fields of a large body before they
    are decoded. generates: it will need room in the engine; where there is none, it is refused before that. lenient:
    what nobody knows is left out, and told.
    """

    def __init__(
        self,
        engine: Engine,
        handler: Handler,
        glance: Glance = at_nothing,
        *,
        generates: bool = False,
        lenient: bool = False,
    ) -> None:
        self._engine = engine
        self._handler = handler
        self._glance = glance
        self._generates = generates
        self._lenient = lenient

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        tenant, workers = tenant_of(scope), self._engine.workers
        warnings: list[str] = []

        def headers() -> dict[str, str]:
            told = {"x-aserve-warnings": "; ".join(warnings)[:MAX_WARNING_CHARS]} if warnings else {}
            return limit_headers(self._engine.tenants.allowances(tenant)) | told

        reply = Reply(scope, receive, send, headers)
        with ExitStack() as while_open:
            try:
                _ = self._engine.info  # without a model no request is worth reading
                while_open.enter_context(self._engine.tenants.entered(tenant))
                if self._generates:
                    self._engine.check_room(tenant=tenant)
                body = await read_object(scope, receive, workers, self._glance)
                name_request(scope, body.fields.get("request_id"))
            except ClientGone:
                return
            except BaseException as error:
                if not is_fault(error):
                    raise
                with suppress(ClientGone):
                    await reply(error_response(error, scope[SCOPE_KEY]))
                return
            request_id, record = scope[SCOPE_KEY], record_of(scope)
            exchange = Exchange(body.fields, body.is_large, request_id, tenant, reply, workers, record, warnings)
            async with while_connected(receive):
                await self._handle(exchange, reply)

    async def _handle(self, exchange: Exchange, reply: Reply) -> None:
        try:
            await self._attempt(exchange)
        except ClientGone:
            raise
        except BaseException as error:
            if reply.has_begun or not is_fault(error):
                raise
            await reply(error_response(error, exchange.request_id))

    async def _attempt(self, exchange: Exchange) -> None:
        """Handlers look at all names before they do anything else, so that they can be called again."""
        while True:
            try:
                await self._handler(exchange)
                return
            except UnknownFieldError as error:
                if not self._lenient or len(exchange.warnings) == MAX_WARNINGS:
                    raise
                exchange.warnings.append(error.message)
                del error.fields[error.name]


def limit_headers(allowances: Mapping[str, Allowance]) -> dict[str, str]:
    """OpenAI's x-ratelimit headers, for what is limited."""
    headers = {}
    for name, allowance in allowances.items():
        headers[f"x-ratelimit-limit-{name}"] = str(allowance.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(allowance.remaining)
        headers[f"x-ratelimit-reset-{name}"] = duration(allowance.reset_s)
    return headers


def duration(seconds: float) -> str:
    """As OpenAI spells it: 6m0s, 1.5s or 20ms."""
    num_ms = round(seconds * 1000)
    if num_ms < 1000:
        return f"{num_ms}ms"
    minutes, rest_ms = divmod(num_ms, 60_000)
    return f"{minutes}m{rest_ms / 1000:g}s" if minutes else f"{rest_ms / 1000:g}s"
