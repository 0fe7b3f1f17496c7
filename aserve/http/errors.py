"""Errors on the wire: every one is OpenAI's `{"error": {"message", "type", "param", "code"}}`, whatever raised it.

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


def error_response(error: BaseException, request_id: str | None = None) -> Response:
    """The whole answer for an error: status, body, and Retry-After where trying again may help.

    request_id: whose it is, for the log line of an error that nobody foresaw.
    """
    known = _known(error, request_id)
    headers = dict(known.headers) if isinstance(known, HttpError) else {}
    if isinstance(known, RetryableError):
        headers["Retry-After"] = str(known.retry_after_s)
    return Response(error_body(known), status_of(known), headers, media_type="application/json")


def error_body(error: BaseException, request_id: str | None = None) -> bytes:
    """The JSON object of an error; also what is sent when a stream has begun and can have no status any more."""
    known = _known(error, request_id)
    param = "model" if isinstance(known, ModelNotFoundError) else getattr(known, "param", None)
    fields = {"message": printable(known.message), "type": _type(status_of(known)), "param": param, "code": known.code}
    return msgspec.json.encode({"error": fields})


def status_of(error: AserveError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


async def handle_error(_request: Request, error: Exception) -> Response:
    """Starlette's exception handler for all that an endpoint or the router raises."""
    return error_response(error)


def printable(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """`text` in printable ASCII, the rest escaped, cut to `max_chars` characters."""
    escaped = text[:max_chars].encode("unicode_escape").decode("ascii").replace("\\\\", "\\")
    return escaped if len(escaped) <= max_chars and len(text) <= max_chars else f"{escaped[: max_chars - 3]}..."


def echo(value: object) -> str:
    """What a client sent, quoted, short enough to be sent back."""
    return printable(repr(value[:MAX_ECHO_CHARS]) if isinstance(value, str) else str(value), MAX_ECHO_CHARS)


def _known(error: BaseException, request_id: str | None) -> AserveError:
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


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"
