"""The guard: what stands between a hostile network and the application, as plain ASGI.

    guard(app) = HeadCheck( BearerAuth( WholeBody(app) ) )

Each layer either passes the request on or answers it with an error in OpenAI's shape. The guard holds behind any ASGI
server and inside any application that it is mounted in. It knows HTTP, but neither routes nor the engine.

The body is read in full, under its limits, before the application is called. So an answer that comes early (404, 429)
never leaves a body unread: servers that queue body messages per request stop reading the connection when that queue
is full, and then neither the client's departure nor the end of the request reaches the application.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve.http.access import TENANT_KEY
from aserve.http.errors import HttpError, error_response
from aserve.http.keys import Keyring, holder
from aserve.http.scope import METHODS, route_path

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
"""The largest request body. A context of a million tokens is about 5 MB of JSON text, or 8 MB of token ids."""
MAX_TOTAL_BODY_BYTES: Final = 32 * MAX_BODY_BYTES
"""Of all bodies together that have been received and not yet been read by the application."""
SMALL_BODY_BYTES: Final = 64 * 1024
"""Bodies up to this size are taken in any case: connections are few enough to bound them."""
MAX_BODY_PIECES: Final = 65_536
"""The most messages that a body may come in: a piece costs far more to handle than its bytes."""
MIN_BODY_BYTES_PER_S: Final = 1024
"""A body that comes slower than this on average is given up, so that one byte now and then holds nothing for ever."""
MAX_HEADERS: Final = 100
MAX_HEADER_BYTES: Final = 16 * 1024
MAX_TARGET_BYTES: Final = 8 * 1024
PUBLIC_PATHS: Final = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})
"""What needs no key: probes and scrapers come without one, and none of these tells what anybody asked."""


_ENCODED_SLASH: Final = re.compile(rb"%2f", re.IGNORECASE)
HOST: Final = re.compile(rb"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_CONTENT_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_HTTP_VERSIONS: Final = frozenset({"1.0", "1.1", "2", "3"})


UNAUTHORIZED: Final = HttpError(
    401,
    "invalid_api_key",
    "a valid API key is needed: send it as 'Authorization: Bearer <key>', or as 'x-api-key: <key>'",
    {"www-authenticate": "Bearer"},
)
TOO_MUCH: Final = HttpError(
    503, "server_overloaded", "too many large requests are being received", {"retry-after": "1"}
)
TOO_SLOW: Final = HttpError(408, "request_timeout", "the request body did not arrive in time")


def guard(
    app: ASGIApp,
    *,
    api_keys: Sequence[str] = (),
    keyring: Keyring | None = None,
    max_body_bytes: int | Callable[[], int] = MAX_BODY_BYTES,
    max_total_body_bytes: int = MAX_TOTAL_BODY_BYTES,
    body_timeout_s: float = 10.0,
    public_paths: Iterable[str] = PUBLIC_PATHS,
) -> ASGIApp:
    """Put an application behind the guard.

    api_keys: any of these opens every path; none means that no key is asked for. keyring: instead of them.
    max_body_bytes: of one request; what tells it, where it is known only later.
    max_total_body_bytes: of bodies being received, and of those that wait to be read by the application.
    body_timeout_s: how long a body may stand still, and how long it may take beyond what its size allows.
    public_paths: exact paths (below where the application is mounted) that are open without a key.
    """
    held = HeldBytes(max_total_body_bytes)
    max_bytes = max_body_bytes if callable(max_body_bytes) else lambda: max_body_bytes
    app = WholeBody(app, held, max_bytes=max_bytes, timeout_s=body_timeout_s)
    keyring = keyring or Keyring(api_keys)
    if not keyring.is_open:
        app = BearerAuth(app, keyring, public_paths)
    return HeadCheck(app)


class HeadCheck:
    """Refuses request heads that are too large, ambiguous, or that a proxy in front may have read differently.

    An encoded slash is no slash (RFC 3986, section 2.2): the path keeps it as `%2F`, so that `/v1%2Fmodels` is not
    `/v1/models`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what `check_head` refuses, and end WebSockets, which aserve does not speak."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        refusal = check_head(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await refuse(refusal, scope, receive, send)
            return
        path, num_slashes = _ENCODED_SLASH.subn(b"%252F", scope.get("raw_path") or b"")
        if num_slashes:
            scope["path"] = unquote(path.decode("latin-1"))
        await self._app(scope, receive, send)


def check_head(scope: Scope) -> HttpError | None:
    """What is wrong with a request's head, or None."""
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    names = [name for name, _ in headers]
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        return HttpError(
            431, "headers_too_large", f"more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them"
        )
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_TARGET_BYTES:
        return HttpError(414, "uri_too_long", f"the URL is longer than {MAX_TARGET_BYTES} bytes")
    if scope["http_version"] not in _HTTP_VERSIONS:
        return HttpError(505, "http_version_not_supported", "this server speaks HTTP/1.1")
    if scope["method"] not in METHODS:
        return HttpError(501, "method_not_implemented", "this is no method of HTTP; methods are case-sensitive")
    if scope["method"] in ("CONNECT", "TRACE"):
        return HttpError(405, "method_not_allowed", "this method is not served", {"allow": "DELETE, GET, HEAD, POST"})
    if b"content-length" in names and b"transfer-encoding" in names:
        return HttpError(400, "bad_request", "Content-Length and Transfer-Encoding exclude each other")
    if not all(_CONTENT_LENGTH.fullmatch(value) for name, value in headers if name == b"content-length"):
        return HttpError(400, "bad_request", "Content-Length is not a number of bytes")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or not all(HOST.fullmatch(host) for host in hosts):
        return HttpError(400, "bad_request", "the Host header is not a host name with an optional port")
    return None


class BearerAuth:
    """Asks for an API key on every path that is not public, whether or not the path exists.

    The application finds in the scope whose key it was, under `TENANT_KEY`.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, public_paths: Iterable[str]) -> None:
        self._app = app
        self._keyring = keyring
        self._public_paths = frozenset(public_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 to a request without a valid key."""
        if scope["type"] == "http" and route_path(scope) not in self._public_paths:
            tenant = holder(scope, self._keyring)
            if tenant is None:
                await refuse(UNAUTHORIZED, scope, receive, send)
                return
            if tenant:
                scope[TENANT_KEY] = tenant
        await self._app(scope, receive, send)


class HeldBytes:
    """How many bytes of bodies are in memory, of all requests together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def fits(self, num_bytes: int) -> bool:
        """Whether there is room for a body that has come to `num_bytes`, which are counted already."""
        return num_bytes <= SMALL_BODY_BYTES or self.num_bytes <= self._max_bytes


class Body:
    """One request's body on its way; counted until the application asks for what comes after it, or has ended."""

    def __init__(self, held: HeldBytes, receive: Receive) -> None:
        self._held = held
        self._receive = receive
        self._pieces: deque[bytes] = deque()
        self.num_bytes = 0

    @property
    def num_pieces(self) -> int:
        """Messages that it came in."""
        return len(self._pieces)

    def add(self, piece: bytes) -> bool:
        """Take a piece; whether there was room for it among the bodies of all requests."""
        self._pieces.append(piece)
        self.num_bytes += len(piece)
        self._held.num_bytes += len(piece)
        return self._held.fits(self.num_bytes)

    async def replay(self) -> Message:
        """A `receive` that gives the body once and then what the server's gives: the disconnect.

        A large one in the pieces in which it came: to join them takes longer than the event loop has time.
        """
        if self._pieces:
            if self.num_bytes <= SMALL_BODY_BYTES:
                self._pieces = deque([b"".join(self._pieces)])
            piece = self._pieces.popleft()
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        self.release()
        return await self._receive()

    def release(self) -> None:
        """Count it no longer. Idempotent."""
        self._held.num_bytes -= self.num_bytes
        self.num_bytes = 0
        self._pieces.clear()


class WholeBody:
    """Reads the body in full before it calls the application, which then waits for no piece of it.

    413 when it is too large: by its Content-Length before a byte is read, else when the limit is passed.
    503 when it is large and there are too many like it. 408 when it stalls. A client that leaves before the end of its
    body never reaches the application.
    """

    def __init__(self, app: ASGIApp, held: HeldBytes, *, max_bytes: Callable[[], int], timeout_s: float) -> None:
        self._app = app
        self._held = held
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with a `receive` that gives the body, then whatever comes after it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._max_bytes()
        lengths = [int(value) for name, value in scope["headers"] if name == b"content-length"]
        if lengths and max(lengths) > max_bytes:
            await refuse(too_large(max_bytes), scope, receive, send)
            return
        body = Body(self._held, receive)
        try:
            outcome = await self._read(body, receive, max_bytes)
            if isinstance(outcome, HttpError):
                body.release()
                await refuse(outcome, scope, receive, send)
            elif outcome:
                await self._app(scope, body.replay, send)
        finally:
            body.release()

    async def _read(self, body: Body, receive: Receive, max_bytes: int) -> bool | HttpError:
        """Whether the body came to its end, or why it is refused; not if the client left."""
        clock = asyncio.get_running_loop().time
        start_s = clock()
        while body.num_pieces < MAX_BODY_PIECES:
            allowed_s = start_s + self._timeout_s + body.num_bytes / MIN_BODY_BYTES_PER_S - clock()
            try:
                async with asyncio.timeout(min(self._timeout_s, allowed_s)):
                    message = await receive()
            except TimeoutError:
                return TOO_SLOW
            if message["type"] == "http.disconnect":
                return False
            if not body.add(message.get("body", b"")):
                return TOO_MUCH
            if body.num_bytes > max_bytes:
                return too_large(max_bytes)
            if not message.get("more_body", False):
                return True
        return HttpError(413, "request_too_large", f"the request body comes in over {MAX_BODY_PIECES} pieces")


def too_large(max_bytes: int) -> HttpError:
    """For a body of more bytes."""
    why = "the most that this server takes, by its model's context or as its operator says"
    return HttpError(413, "request_too_large", f"the request body is larger than {max_bytes} bytes, {why}")


async def refuse(error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error and end the connection, throwing away what is still coming of the body."""
    response = error_response(error)
    if scope["http_version"] not in ("2", "3"):
        response.headers["connection"] = "close"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_discard(receive))  # beside the answer: a full queue of body messages could block it
        await response(scope, receive, send)


async def _discard(receive: Receive, timeout_s: float = 5.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    except TimeoutError:
        return
