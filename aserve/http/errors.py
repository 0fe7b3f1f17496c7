"""Errors on the wire: OpenAI's `{"error": {"message", "type", "param", "code"}}`, or what the path's dialect says.

Messages are printable ASCII of at most 300 characters, so that nothing that a client sent can forge a log line or come
back multiplied. What we did not foresee is a 500 that names a fault; the log says under that name what it was.
"""

import http
import logging
from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from aserve.core.errors import (
    AserveError,
    InsufficientMemoryError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    QueueTimeoutError,
    RateLimitError,
    RetryableError,
    UnavailableError,
)
from aserve.core.faults import report
from aserve.http.access import record_of
from aserve.http.dialect import Dialect, dialect_of
from aserve.http.request_id import SCOPE_KEY

MAX_MESSAGE_CHARS: Final = 300
MAX_ECHO_CHARS: Final = 80

STATUS: Final[Mapping[type[AserveError], int]] = {
    InvalidRequestError: 400,
    ModelNotFoundError: 404,
    OverloadedError: 429,
    RateLimitError: 429,
    QueueTimeoutError: 503,
    InsufficientMemoryError: 503,
    UnavailableError: 503,
}
"""By class, subclasses included; every other AserveError is a 500."""

_log = logging.getLogger(__name__)


class HttpError(AserveError):
    """A request that HTTP itself refuses: no such route, too large, no key. headers: sent along, such as Allow."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class ErrorResponse(Response):
    """The whole answer for an error: status, body, and Retry-After where trying again may help.

    dialect, request_id: of the request, where they are known already; else the request's scope tells.
    """

    def __init__(self, error: AserveError, dialect: Dialect | None = None, request_id: str | None = None) -> None:
        headers = dict(error.headers) if isinstance(error, HttpError) else {}
        if isinstance(error, RetryableError):
            headers["Retry-After"] = str(error.retry_after_s)
        super().__init__(headers=headers, media_type="application/json")
        self._error = error
        self._spell(dialect, request_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it in the path's dialect, and note it in the request's record."""
        record_of(scope).error = self._error
        if (dialect := dialect_of(scope)) is not None:
            self._spell(dialect, scope.get(SCOPE_KEY))
        await super().__call__(scope, receive, send)

    def _spell(self, dialect: Dialect | None, request_id: str | None) -> None:
        error = self._error
        self.status_code = status_of(error) if dialect is None else dialect.status(error)
        self.body = error_body(error) if dialect is None else dialect.body(error, request_id)
        self.headers["content-length"] = str(len(self.body))


def error_response(error: BaseException, request_id: str | None = None) -> ErrorResponse:
    """The answer for anything that was raised.

    request_id: whose it is, for the log line of an error that nobody foresaw.
    """
    return ErrorResponse(known_error(error, request_id))


def error_body(error: BaseException) -> bytes:
    """The JSON object of an error; also what is sent when a stream has begun and can have no status any more."""
    known = known_error(error)
    param = "model" if isinstance(known, ModelNotFoundError) else getattr(known, "param", None)
    fields = {"message": printable(known.message), "type": _type(status_of(known)), "param": param, "code": known.code}
    return msgspec.json.encode({"error": fields})


def status_of(error: AserveError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for all that an endpoint or the router raises."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        error = HTTPException(405, headers={"Allow": ", ".join(_methods_of_path(request.scope))})
    return error_response(error, request.scope.get(SCOPE_KEY))


def printable(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """`text` in printable ASCII, the rest escaped, cut to `max_chars` characters."""
    escaped = text[:max_chars].encode("unicode_escape").decode("ascii").replace("\\\\", "\\")
    return escaped if len(escaped) <= max_chars and len(text) <= max_chars else f"{escaped[: max_chars - 3]}..."


def echo(value: object) -> str:
    """What a client sent, quoted, short enough to be sent back."""
    return printable(repr(value[:MAX_ECHO_CHARS]) if isinstance(value, str) else str(value), MAX_ECHO_CHARS)


def known_error(error: BaseException, request_id: str | None = None) -> AserveError:
    """The error as one of ours; one that nobody foresaw is logged here, and told without detail."""
    if isinstance(error, HTTPException):
        return _of_starlette(error)
    return report(_log, "answering", error, request_id)


def _of_starlette(error: HTTPException) -> HttpError:
    if error.status_code == 404:
        return HttpError(404, "unknown_route", "there is nothing at this path")
    if error.status_code == 405:
        return HttpError(405, "method_not_allowed", "this path does not take this method", error.headers)
    status = http.HTTPStatus(error.status_code)
    return HttpError(status, status.name.lower(), status.phrase.lower(), error.headers)


def _methods_of_path(scope: Scope) -> list[str]:
    """All that the routes of a path take. Starlette names the methods of the first of them alone."""
    routes = [route for route in scope["app"].routes if isinstance(route, Route)]
    path = next((route.path for route in routes if route.matches(scope)[0] is not Match.NONE), None)
    return sorted({method for route in routes if route.path == path for method in route.methods or ()})


def _type(status: int) -> str:
    if status >= 500 and status not in (501, 505):  # a method or version that nobody serves is the client's doing
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"
