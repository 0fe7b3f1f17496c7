"""The soak's clients: friends and foes of a server, and what each of their requests came to, in a word."""

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

import httpx
from soak_server import ADAPTERS, POISON

CHAT: Final = "/v1/chat/completions"
NUM_CLIENTS: Final = 12
TIMEOUT_S: Final = 180.0
"""Of a client: over what the whole machine may stand still."""
KEY: Final = "sk-soak"
QUESTIONS: Final = ("What is aserve?", "Tell me a story about a fox.", "What is 12 plus 7?", "What is paged attention?")
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 12},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_on_the_sea": {"type": "boolean"},
    },
    "required": ["capital", "inhabitants", "is_on_the_sea"],
    "additionalProperties": False,
}
TOOL: Final = {"type": "function", "function": {"name": "describe", "parameters": SCHEMA}}
SAME: Final = "as ever"
"""The outcome of an answer that is whole and the same as the first one to the same question."""
POISONED: Final = "engine_error"
"""The outcome that a poisoned request has to have."""
BAD_BODIES: Final = (
    b"",
    b"{",
    b"[]",
    b'{"messages": 5}',
    b'{"messages": [{"role": "root", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e400}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 1000000}',
    b'{"messages": [{"role": "user", "content": "' + b"a" * 300_000 + b'"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"-1": 5}}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": [' + b",".join([b'"s"'] * 5000) + b"]}",
)


class Clients:
    """Ask until time is up. outcomes: how often each kind of request came to what, as "kind: outcome"."""

    def __init__(self, url: str, until_s: float) -> None:
        self._url = url
        self._until_s = until_s
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, headers=headers)
        self._answers: dict[str, str] = {}
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        """All clients, until time is up."""
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self._client(random.Random(number)))
        await self._http.aclose()

    async def _client(self, chance: random.Random) -> None:
        kinds: list[tuple[str, Callable[[random.Random], Awaitable[str]]]] = [
            *[("stream", self._whole_stream)] * 4,
            *[("answer", self._answer)] * 3,
            *[("adapter", self._adapter)] * 2,
            *[("structured", self._structured)] * 2,
            ("tools", self._tools),
            ("repetitive", self._repetitive),
            *[("cut", self._cut_stream)] * 3,
            *[("bad", self._bad)] * 2,
            ("silent", self._silent_reader),
            ("poisoned", self._poisoned),
        ]
        while time.monotonic() < self._until_s:
            kind, ask = chance.choice(kinds)
            try:
                outcome = await ask(chance)
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            self.outcomes[f"{kind}: {outcome}"] += 1

    # Good requests, whole or as a stream at random.

    async def _answer(self, chance: random.Random) -> str:
        return await self._told(_body(chance), chance, is_stream=False)

    async def _whole_stream(self, chance: random.Random) -> str:
        return await self._told(_body(chance), chance, is_stream=True)

    async def _adapter(self, chance: random.Random) -> str:
        return await self._told(_body(chance) | {"model": chance.choice(ADAPTERS)}, chance)

    async def _structured(self, chance: random.Random) -> str:
        format = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
        return await self._told(_body(chance) | {"response_format": format, "max_tokens": 120}, chance)

    async def _tools(self, chance: random.Random) -> str:
        body = _body(chance) | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 160}
        return await self._told(body, chance)

    async def _repetitive(self, chance: random.Random) -> str:
        """Long answers of the likeliest tokens, which soon say the same again: drafts are found."""
        return await self._told(_body(chance) | {"max_tokens": 200, "ignore_eos": True}, chance)

    async def _poisoned(self, chance: random.Random) -> str:
        """Steps fail at its prompt, or within its answer."""
        seed = POISON + chance.choice((0, 40))
        return await self._told(_body(chance) | {"seed": seed, "ignore_eos": True}, chance)

    async def _told(self, body: dict[str, Any], chance: random.Random, *, is_stream: bool | None = None) -> str:
        """What comes of a request that is to be answered to its end."""
        is_stream = chance.random() < 0.5 if is_stream is None else is_stream
        tell = self._of_stream if is_stream else self._of_whole
        is_text, told = await tell(body | {"stream": is_stream})
        if not is_text:
            return told
        return SAME if self._answers.setdefault(json.dumps(body), told) == told else "DIFFERENT"

    async def _of_whole(self, body: dict[str, Any]) -> tuple[bool, str]:
        """(True, what was said), or (False, why not)."""
        response = await self._http.post(CHAT, json=body)
        told = response.json()
        if response.status_code != 200:
            return False, str(told["error"]["code"] or response.status_code)
        choice = told["choices"][0]
        return True, _said(choice["message"]) + choice["finish_reason"]

    async def _of_stream(self, body: dict[str, Any]) -> tuple[bool, str]:
        """Likewise."""
        parts: dict[str, Any] = {"content": "", "tool_calls": []}
        reason, is_done = "", False
        async with self._http.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                return False, str(error["code"] or response.status_code)
            async for line in response.aiter_lines():
                is_done = is_done or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return False, str(event["error"]["code"])
                for choice in event["choices"]:
                    _add(parts, choice["delta"])
                    reason = choice["finish_reason"] or reason
        return (True, _said(parts) + reason) if is_done else (False, "truncated")

    # Requests that are not answered to their end.

    async def _cut_stream(self, chance: random.Random) -> str:
        body = _body(chance) | {"max_tokens": 400, "ignore_eos": True, "stream": True}
        num_events = chance.randrange(20)
        async with self._http.stream("POST", CHAT, json=body) as response:
            async for line in response.aiter_lines():
                num_events -= 1
                if line.startswith('data: {"error"'):
                    return str(json.loads(line[6:])["error"]["code"])
                if num_events < 0:
                    break
        return str(response.status_code)

    async def _bad(self, chance: random.Random) -> str:
        content = chance.choice(BAD_BODIES)
        response = await self._http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
        return str(response.status_code)

    async def _silent_reader(self, chance: random.Random) -> str:
        """Asks for a long stream, reads nothing of it, and leaves."""
        body = json.dumps(_body(chance) | {"max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
        host, port = self._url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(sock, (host, int(port)))
            head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            head += f"Authorization: Bearer {KEY}\r\n"
            await loop.sock_sendall(sock, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await asyncio.sleep(chance.uniform(0.0, 3.0))
        finally:
            sock.close()
        return "left"


def _body(chance: random.Random) -> dict[str, Any]:
    """A question, to be answered by the likeliest tokens."""
    messages = [{"role": "user", "content": chance.choice(QUESTIONS)}]
    return {"messages": messages, "temperature": 0, "max_tokens": 48}


def _add(parts: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to the message that it is a part of."""
    parts["content"] += delta.get("content") or ""
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(parts["tool_calls"]):
            parts["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
        parts["tool_calls"][call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")


def _said(message: dict[str, Any]) -> str:
    """What a message says, but for the ids of its calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return json.dumps([message["content"] or "", calls], sort_keys=True)
