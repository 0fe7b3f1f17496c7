"""Errors as the Messages API tells them: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from aserve.core.errors import AserveError, ContextLengthError, InvalidRequestError, OverloadedError
from aserve.http.dialect import Dialect
from aserve.http.errors import printable, status_of

OVERLOADED: Final = 529
"""Anthropic's own status: too much is waiting, which is nobody's limit."""
TOO_LONG: Final = "prompt is too long: "
"""By which words clients know that they have to send less."""
TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    OVERLOADED: "overloaded_error",
}
"""By status; others are the client's below 500, and ours from there on."""


class UnthreadedError(InvalidRequestError):
    """A request asks for a conversation that the server holds. details: tell SDKs to send all of it instead."""

    details: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

    def __init__(self) -> None:
        super().__init__("thread is not supported: send the whole conversation as messages", "thread")


def status(error: AserveError) -> int:
    """The HTTP status of an error."""
    return OVERLOADED if isinstance(error, OverloadedError) else status_of(error)


def error_object(error: AserveError, request_id: str | None) -> dict[str, Any]:
    """What is told of it, as an object: the whole body, or the data of a stream's last event."""
    code = status(error)
    kind = TYPES.get(code, "api_error" if code >= 500 else "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": printable(_told(error))}
    if isinstance(error, UnthreadedError):
        told["details"] = error.details
    return {"type": "error", "error": told, "request_id": request_id}


def _told(error: AserveError) -> str:
    """With the name of the field, which has no other place here."""
    if isinstance(error, ContextLengthError):
        return f"{TOO_LONG}{error.message}"
    param = getattr(error, "param", None)
    return error.message if param is None or param in error.message else f"{param}: {error.message}"


def _body(error: AserveError, request_id: str | None) -> bytes:
    return msgspec.json.encode(error_object(error, request_id))


ANTHROPIC: Final = Dialect(root="/v1/messages", status=status, body=_body, id_header=b"request-id")
