"""Request bodies: bytes to one JSON object, and every way in which they can fail to be one.

Numbers are strict JSON (no NaN, no Infinity, nothing a float cannot hold); of equal keys the last wins. How long a body
may be and how long it may take is the middleware's business.
"""

import asyncio
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from aserve.core.errors import InvalidRequestError
from aserve.http.connection import ClientGone
from aserve.http.errors import HttpError

OFF_LOOP_BYTES: Final = 64 * 1024
"""Longer bodies are parsed in a thread."""


async def read_object(scope: Scope, receive: Receive) -> dict[str, Any]:
    """The body as a JSON object.

    Raises `HttpError` (415) for what does not call itself JSON, `InvalidRequestError` for what is not JSON, and
    `ClientGone`.
    """
    _check_media_type(Headers(scope=scope))
    body = await _read(receive)
    value = await asyncio.to_thread(_decode, body) if len(body) > OFF_LOOP_BYTES else _decode(body)
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def _check_media_type(headers: Headers) -> None:
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, "unsupported_media_type", "the body must be application/json")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HttpError(415, "unsupported_media_type", "the body must not be compressed")


async def _read(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


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
