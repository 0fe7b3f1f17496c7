"""LineRunner: one line of a batch, run by the handler of the route that it names, as if it had come alone.

{"custom_id", "method", "url", "body"} --> handler --> {"id", "custom_id", "response": {...}, "error"}
"""

import asyncio
import secrets
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from aserve.core.errors import AserveError, InvalidRequestError, OverloadedError, RateLimitError, UnavailableError
from aserve.edges import is_fault
from aserve.engine import Engine
from aserve.http.access import Record
from aserve.http.endpoint import Exchange, Handler
from aserve.http.errors import echo, error_response
from aserve.http.shapes import check_names, converted

LOWEST_PRIORITY: Final = 2**31 - 1
WAIT_S: Final = 0.05


class LineFields(msgspec.Struct, frozen=True, kw_only=True):
    """A line."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class Answered(msgspec.Struct, frozen=True):
    """A line of an output file, and whether it tells of an error."""

    content: bytes
    is_error: bool


def line_of(raw: bytes, urls: Collection[str]) -> LineFields:
    """What a line asks for. Raises `InvalidRequestError`."""
    try:
        given = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"it is not a JSON object: {error}") from None
    line = converted(given, LineFields)
    check_names({name: value for name, value in given.items() if name != "body"}, line)
    if line.url not in urls:
        raise InvalidRequestError(f"url must be one of {', '.join(urls)}, got {echo(line.url)}", "url")
    if line.body.get("stream"):
        raise InvalidRequestError("body.stream: a line's answer is not streamed", "body")
    return line


class LineRunner:
    """handlers: by their urls. Others come first: lines wait while a request does, and have the lowest priority."""

    def __init__(self, engine: Engine, handlers: Mapping[str, Handler]) -> None:
        self._engine = engine
        self._handlers = handlers

    async def run(self, line: LineFields, tenant: str) -> Answered:
        """Answer a line. Raises `UnavailableError` where the engine takes no more: the line is still to do."""
        request_id = secrets.token_hex(16)
        fields = {"priority": LOWEST_PRIORITY, **line.body}
        response = await self._answer(line, fields, request_id, tenant)
        body = msgspec.Raw(response.body)
        answer = {"status_code": response.status_code, "request_id": request_id, "body": body}
        told = {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": answer, "error": None}
        return Answered(msgspec.json.encode(told), is_error=response.status_code != 200)

    async def _answer(self, line: LineFields, fields: dict[str, Any], request_id: str, tenant: str) -> Response:
        answers: list[Response] = []

        async def reply(response: Response) -> None:
            answers.append(response)

        while True:
            exchange = Exchange(fields, False, request_id, tenant, reply, self._engine.workers, Record())
            try:
                with self._engine.tenants.entered(tenant):
                    await self._handlers[line.url](exchange)
                return answers[0]
            except (OverloadedError, RateLimitError):
                await asyncio.sleep(WAIT_S)
            except UnavailableError:
                raise
            except BaseException as error:
                if not is_fault(error):
                    raise
                return error_response(error, request_id)


def failed_line(custom_id: str | None, error: AserveError, code: str) -> bytes:
    """A line of an error file, of a line that was not run."""
    told = {"code": code, "message": error.message}
    body = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": custom_id, "response": None, "error": told}
    return msgspec.json.encode(body)
