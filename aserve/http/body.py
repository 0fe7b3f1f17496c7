"""Request bodies: bytes to one JSON object, and every way in which they can fail to be one.

Numbers are strict JSON (no NaN, no Infinity, nothing a float cannot hold); of equal keys the last wins. How long a body
may be and how long it may take is the middleware's business.

Decoding is one call that nothing interrupts, and a thread that is in it keeps the event loop waiting like any other. Of
text it takes 1 ms for 4 MiB; but 20 ms for a million numbers, and half a second for a million arrays or objects, which
the garbage collector goes through as they grow. So the values in a large body are counted first.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from aserve.core.errors import InvalidRequestError
from aserve.http.connection import ClientGone
from aserve.http.errors import HttpError

OFF_LOOP_BYTES: Final = 64 * 1024
"""Longer bodies are parsed in a thread."""
MAX_CONTAINERS: Final = 65_536
"""Arrays and objects in a body. A message is one, or three if its content is a list of parts; and a prompt is one."""
MAX_VALUES: Final = 2_097_152
"""Members of all of them together, and strings. The longest contexts are a million tokens."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A body's fields. is_large: going through them is work for a thread."""

    fields: dict[str, Any]
    is_large: bool


async def read_object(scope: Scope, receive: Receive) -> JsonObject:
    """The body as a JSON object.

    Raises `HttpError` (415) for what does not call itself JSON, `InvalidRequestError` for what is not JSON, and
    `ClientGone`.
    """
    _check_media_type(Headers(scope=scope))
    pieces = await _read(receive)
    is_large = sum(map(len, pieces)) > OFF_LOOP_BYTES
    value = await asyncio.to_thread(_decode_large, pieces) if is_large else _decode(b"".join(pieces))
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return JsonObject(value, is_large)


def _check_media_type(headers: Headers) -> None:
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, "unsupported_media_type", "the body must be application/json")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HttpError(415, "unsupported_media_type", "the body must not be compressed")


async def _read(receive: Receive) -> list[bytes]:
    pieces: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return pieces


def _decode_large(pieces: list[bytes]) -> Any:
    body = b"".join(pieces)
    pieces.clear()
    if _might_hold_too_much(body) and holds_more_than(body, MAX_CONTAINERS, MAX_VALUES):
        raise InvalidRequestError(f"the body has more than {MAX_CONTAINERS} arrays and objects, or {MAX_VALUES} values")
    return _decode(body)


def _might_hold_too_much(body: bytes) -> bool:
    """Whether a count is worth its time: bytes are counted one by one, and found many at a time."""
    has_many = any(_occurs_more_often(body, bracket, MAX_CONTAINERS // 2) for bracket in (b"[", b"{"))
    return has_many or (len(body) > 2 * MAX_VALUES and body.count(b",") > MAX_VALUES)


def _occurs_more_often(body: bytes, byte: bytes, num: int) -> bool:
    at = -1
    for _ in range(num + 1):
        at = body.find(byte, at + 1)
        if at < 0:
            return False
    return True


def holds_more_than(body: bytes, max_containers: int, max_values: int) -> bool:
    """Whether JSON has more arrays and objects, or more commas and strings, outside strings. Linear in its length."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that is left begins or ends a string
    num_containers = num_values = start = 0
    while num_containers <= max_containers and num_values <= max_values:
        opening = unescaped.find(b'"', start)
        end = len(unescaped) if opening < 0 else opening
        num_containers += unescaped.count(b"[", start, end) + unescaped.count(b"{", start, end)
        num_values += unescaped.count(b",", start, end)
        closing = unescaped.find(b'"', opening + 1)
        if opening < 0 or closing < 0:
            break
        num_values += 1
        start = closing + 1
    return num_containers > max_containers or num_values > max_values


def _decode(body: bytes) -> Any:
    if not body:
        raise InvalidRequestError("the body is empty; a JSON object is expected")
    try:
        return msgspec.json.decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(str(error)) from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
