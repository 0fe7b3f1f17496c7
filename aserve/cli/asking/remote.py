"""A server that speaks OpenAI's API: aserve, vLLM, llama.cpp, OpenAI itself, whichever.

What it sends is not trusted to be what it should: all that is wrong with it becomes an `AskError` of one line.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx2
import msgspec

from aserve.cli.asking.source import Asked, AskError, Ended, Piece

CONNECT_S: Final = 10.0
MAX_SHOWN: Final = 300
MAX_LINE_BYTES: Final = 2**24
DONE: Final = b"[DONE]"


class _Delta(msgspec.Struct):
    """Of a chat's stream, or the message of a whole answer. reasoning, reasoning_content: two names of one thing."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    def pieces(self) -> list[Piece]:
        """What it adds to the answer."""
        said = self.delta or self.message or _Delta(content=self.text)
        thought = said.reasoning_content or said.reasoning
        found = [Piece(thought, is_thought=True)] if thought else []
        return [*found, Piece(said.content)] if said.content else found


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Remote:
    """A server's API. name: of the model that it is asked for; "" until `choose`.

    url: up to and with /v1, which may be left out where there is no path. timeout_s: how long it may be silent.
    """

    def __init__(self, url: str, *, api_key: str | None = None, name: str = "", timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/") if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"
        self.name = name
        self.api_key = api_key
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = httpx2.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
        self._http = httpx2.AsyncClient(headers=headers, timeout=timeout, follow_redirects=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def choose(self) -> Sequence[str]:
        """Take the first of the server's models; the names of all. Raises `AskError`."""
        where = f"{self.url}/models"
        try:
            response = await self._http.get(where)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise AskError(f"{where}: {_reason(error)}") from error
        if response.status_code != 200:
            hint = "; a URL goes up to /v1" if response.status_code == 404 else ""
            raise AskError(f"{where}: {_refusal(response, response.content)}{hint}")
        try:
            names = [model.id for model in msgspec.json.decode(response.content, type=_Models).data]
        except msgspec.DecodeError as error:
            raise AskError(f"{where}: this is no list of models ({error}): {_shown(response.content)}") from error
        if not names:
            raise AskError(f"{where}: the server has no model; name one with --model")
        self.name = names[0]
        return names

    async def ask(self, asked: Asked) -> AsyncGenerator[Piece | Ended]:
        """As a `Source`."""
        path, body = self._request(asked)
        try:
            async with self._http.stream("POST", f"{self.url}/{path}", json=body) as response:
                if response.status_code != 200:
                    raise AskError(f"the server answers {_refusal(response, await response.aread())}")
                if "text/event-stream" not in response.headers.get("content-type", ""):
                    for one in _whole(await response.aread()):
                        yield one
                    return
                async for each in _streamed(response):
                    yield each
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise AskError(f"{self.url}: {_reason(error)}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _request(self, asked: Asked) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}}
        body |= asked.fields
        if asked.schema is not None:
            schema = {"name": "answer", "schema": asked.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if asked.messages is None:
            return "completions", body | {"prompt": asked.prompt}
        return "chat/completions", body | {"messages": list(asked.messages)}


async def _streamed(response: httpx2.Response) -> AsyncGenerator[Piece | Ended]:
    """The pieces of a stream, and its end. Raises `AskError` for one that is cut, or no stream of an answer."""
    usage, reason, is_done = _Usage(), None, False
    async for line in _lines(response):
        if not line.startswith(b"data:"):
            continue  # empty, a comment, or a field that says nothing here
        data = line.removeprefix(b"data:").strip()
        if data == DONE:
            is_done = True
            break
        event = _event(data)
        usage = event.usage or usage
        for choice in event.choices[:1]:
            reason = choice.finish_reason or reason
            for piece in choice.pieces():
                yield piece
    if not is_done and reason is None:
        raise AskError("the stream ended before the answer did")
    yield Ended(usage.prompt_tokens, usage.completion_tokens, reason)


async def _lines(response: httpx2.Response) -> AsyncGenerator[bytes]:
    """Up to each line feed: others than the format's, such as U+2028, are part of a text."""
    rest = b""
    async for content in response.aiter_bytes():
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            raise AskError(f"the server sends what is no answer: a line of over {MAX_LINE_BYTES} bytes")
    yield rest


def _whole(content: bytes) -> list[Piece | Ended]:
    """An answer that is not streamed, although it was asked for so."""
    event = _event(content)
    if not event.choices:
        raise AskError(f"the server's answer has no choice: {_shown(content)}")
    usage = event.usage or _Usage()
    choice = event.choices[0]
    return [*choice.pieces(), Ended(usage.prompt_tokens, usage.completion_tokens, choice.finish_reason)]


def _event(data: bytes) -> _Event:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError as error:
        raise AskError(f"the server sends what is no answer ({error}): {_shown(data)}") from error
    if event.error is not None:
        raise AskError(f"the server ends the answer: {_message(event.error)}")
    return event


def _refusal(response: httpx2.Response, content: bytes) -> str:
    """A status, what the server says of it, and what would help."""
    told = _shown(content)
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    if isinstance(body, dict) and ("error" in body or "detail" in body or "message" in body):
        told = _message(body.get("error") or body.get("detail") or body.get("message"))
    hint = ""
    if response.status_code in (401, 403):
        hint = " (--api-key gives a key)"
    elif (after := response.headers.get("retry-after")) is not None:
        hint = f" (try again after {_shown(after.encode())} s)"
    return f"{response.status_code}: {told or response.reason_phrase}{hint}"


def _message(error: object) -> str:
    said = error.get("message", error) if isinstance(error, dict) else error
    return _shown(str(said).encode())


def _shown(content: bytes) -> str:
    """The beginning of what came, as one line that does no harm to a terminal."""
    text = content[:MAX_SHOWN].decode(errors="replace")
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _reason(error: Exception) -> str:
    if isinstance(error, httpx2.ConnectTimeout | httpx2.ConnectError):
        return f"cannot connect ({_shown(str(error).encode()) or type(error).__name__})"
    if isinstance(error, httpx2.TimeoutException):
        return "the server was silent for too long (--timeout)"
    if isinstance(error, httpx2.RemoteProtocolError):
        return f"the connection broke within the answer ({_shown(str(error).encode())})"
    return _shown(str(error).encode()) or type(error).__name__
