"""LineRunner: one line of a batch, run by the handler of the route that it names, as if it had come alone.

{"custom_id", "method", "url", "body"} --> handler --> {"id", "custom_id", "response": {...}, "error"}
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from aserve.core.errors import AserveError, InvalidRequestError, OverloadedError, UnavailableError
from aserve.edges import is_fault
from aserve.engine import Engine
from aserve.http.access import Record
from aserve.http.anthropic.errors import ANTHROPIC
from aserve.http.anthropic.messages import messages
from aserve.http.body import fields_of
from aserve.http.dialect import dialect_at
from aserve.http.endpoint import Exchange, Handler
from aserve.http.errors import ErrorResponse, echo, known_error
from aserve.http.openai.chat import chat_completions
from aserve.http.openai.completions import completions
from aserve.http.openai.responses.create import create_response
from aserve.http.openai.responses.keeping import Kept
from aserve.http.options import DEFAULTS, AppOptions
from aserve.http.pooling.embeddings import embeddings
from aserve.http.shapes import check_names, converted
from aserve.http.sse import StreamLimits

LOWEST_PRIORITY: Final = 2**31 - 1
WAIT_S: Final = 0.05
NOT_IN_LINES: Final = {"stream": "not streamed", "background": "not made in the background"}
"""Fields of bodies, with what a line's answer is."""
LINE_DEFAULTS: Final[Mapping[str, dict[str, Any]]] = {"/v1/responses": {"store": False}}
"""Fields of bodies that say nothing of them: a batch would drive all others out of the store."""


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
    """What a line asks for, whose body has the bounds of one that comes alone. Raises `InvalidRequestError`."""
    try:
        members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"it is not a JSON object: {error}") from None
    body = members.pop("body", None)
    given = fields_of([msgspec.json.encode(members)])
    if body is not None:
        given["body"] = fields_of([bytes(body)])
    line = converted(given, LineFields)
    check_names({name: value for name, value in given.items() if name != "body"}, line)
    if line.url not in urls:
        raise InvalidRequestError(f"url must be one of {', '.join(urls)}, got {echo(line.url)}", "url")
    for name, told in NOT_IN_LINES.items():
        if line.body.get(name):
            raise InvalidRequestError(f"body.{name}: a line's answer is {told}", "body")
    return line


def line_handlers(
    engine: Engine, limits: StreamLimits, kept: Kept, options: AppOptions = DEFAULTS
) -> dict[str, Handler]:
    """Of the routes that lines may name, by their urls. kept: where responses go that are to be stored."""
    return {
        "/v1/chat/completions": options.applied(chat_completions(engine, limits)),
        "/v1/completions": options.applied(completions(engine, limits)),
        "/v1/embeddings": embeddings(engine),
        "/v1/responses": options.noted(create_response(engine, limits, kept, options)),
        "/v1/messages": options.noted(messages(engine, limits)),
    }


class LineRunner:
    """handlers: by their urls. Lines have the lowest priority, and wait where there is no room."""

    def __init__(self, engine: Engine, handlers: Mapping[str, Handler]) -> None:
        self.urls = tuple(handlers)
        self._engine = engine
        self._handlers = handlers

    async def run(
        self, line: LineFields, tenant: str, is_stopped: Callable[[], bool] = lambda: False
    ) -> Answered | None:
        """Answer a line. None where it was stopped before there was room for it.

        Raises `UnavailableError` where the engine takes no more: the line is still to do.
        """
        request_id = secrets.token_hex(16)
        response = await self._answer(line, request_id, tenant, is_stopped)
        if response is None:
            return None
        body = msgspec.Raw(response.body)
        answer = {"status_code": response.status_code, "request_id": request_id, "body": body}
        told = {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": answer, "error": None}
        return Answered(msgspec.json.encode(told), is_error=response.status_code != 200)

    async def _answer(
        self, line: LineFields, request_id: str, tenant: str, is_stopped: Callable[[], bool]
    ) -> Response | None:
        fields = {**LINE_DEFAULTS.get(line.url, {}), **line.body}
        answers: list[Response] = []

        async def reply(response: Response) -> None:
            answers.append(response)

        with self._engine.tenants.answering_line(tenant):
            while not is_stopped():
                given = fields, False, request_id, tenant, reply, self._engine.workers, Record()
                try:
                    await self._handlers[line.url](Exchange(*given, default_priority=LOWEST_PRIORITY))
                    return answers[0]
                except OverloadedError:
                    await asyncio.sleep(WAIT_S)
                except UnavailableError:
                    raise
                except BaseException as error:
                    if not is_fault(error):
                        raise
                    dialect = dialect_at(line.url, (ANTHROPIC,))
                    return ErrorResponse(known_error(error, request_id), dialect, request_id)
        return None


def failed_line(custom_id: str | None, error: AserveError, code: str) -> bytes:
    """A line of an error file, of a line that was not run."""
    told = {"code": code, "message": error.message}
    body = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": custom_id, "response": None, "error": told}
    return msgspec.json.encode(body)
