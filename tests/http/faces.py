"""The faces that generate, seen alike: how each is asked, and what its whole answer and its stream come to.

Both come to a `Said`: a list of choices, as an SDK would hold them, and the token counts. Ids and times are taken out.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tests.http import responses
from tests.http.anthropic import streams
from tests.http.events import events_of
from tests.http.test_tools import HI, PARAMETERS, TOOLS, put_together

Said = dict[str, Any]
MAX_TOKENS = 2000
"""More than any script has."""


@dataclass(frozen=True)
class Asked:
    """What can be asked of every face; n and seed of those that have them.

    is_terse: thoughts are left out, or sealed, as the face has it. is_scored: with logprobs, where it has them.
    """

    max_tokens: int = MAX_TOKENS
    seed: int = 0
    n: int = 1
    stop: str | None = None
    has_tools: bool = False
    is_terse: bool = False
    is_scored: bool = False


@dataclass(frozen=True)
class Face:
    """body: of a request. whole, streamed: what an answer's JSON, or its stream's text, comes to. has_choices: n and
    seeds. end: what the last event of a stream has in it.
    """

    name: str
    url: str
    body: Callable[[Asked], dict[str, Any]]
    whole: Callable[[dict[str, Any]], Said]
    streamed: Callable[[str], Said]
    has_choices: bool
    end: str

    def stream_body(self, asked: Asked) -> dict[str, Any]:
        """Of a request for a stream, which ends with the token counts."""
        options = {"stream_options": {"include_usage": True}} if self.has_choices else {}
        return {**self.body(asked), "stream": True, **options}


def _given(**fields: Any) -> dict[str, Any]:
    """Those that say something."""
    return {name: value for name, value in fields.items() if value is not None}


# Chat


def _chat_body(asked: Asked) -> dict[str, Any]:
    return _given(
        messages=HI,
        max_tokens=asked.max_tokens,
        seed=asked.seed,
        n=asked.n,
        stop=asked.stop,
        tools=TOOLS if asked.has_tools else None,
        include_reasoning=False if asked.is_terse else None,
        logprobs=asked.is_scored or None,
        top_logprobs=2 if asked.is_scored else None,
    )


def _chat_whole(body: dict[str, Any]) -> Said:
    return {"choices": [_chat_choice(choice, choice["message"]) for choice in body["choices"]], "usage": body["usage"]}


def _chat_choice(choice: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """Fields that are null, or an empty content, are not there."""
    message = {name: value for name, value in message.items() if value not in (None, "")}
    for call in message.get("tool_calls", ()):
        assert len(call.pop("id")) > 8
    return {"message": message, **{name: choice[name] for name in ("finish_reason", "stop_reason", "logprobs")}}


def _by_index(chunks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The chunks of each choice."""
    found: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        found.setdefault(choice["index"], []).append(chunk)
    return [found[index] for index in range(len(found))]


def _chat_streamed(text: str) -> Said:
    *chunks, last = events_of(text)
    choices = []
    for own in _by_index(chunks):
        parts = [chunk["choices"][0]["logprobs"] for chunk in own]
        scored = [part["content"] for part in parts if part is not None]
        logprobs = {"content": list(chain(*scored))} if scored else None
        ends = own[-1]["choices"][0]
        choices.append(_chat_choice({**ends, "logprobs": logprobs}, put_together(own)[0]))
    return {"choices": choices, "usage": last["usage"]}


# Completions


def _text_body(asked: Asked) -> dict[str, Any]:
    scored = 2 if asked.is_scored else None
    return _given(
        prompt="hi", max_tokens=asked.max_tokens, seed=asked.seed, n=asked.n, stop=asked.stop, logprobs=scored
    )


def _text_choice(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: choice[name] for name in ("text", "finish_reason", "stop_reason", "logprobs")}


def _text_whole(body: dict[str, Any]) -> Said:
    return {"choices": list(map(_text_choice, body["choices"])), "usage": body["usage"]}


def _text_streamed(text: str) -> Said:
    *chunks, last = events_of(text)
    choices = []
    for own in _by_index(chunks):
        parts = [chunk["choices"][0] for chunk in own]
        scored = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        logprobs = {name: list(chain(*(part[name] for part in scored))) for name in scored[0]} if scored else None
        choices.append(_text_choice({**parts[-1], "text": "".join(p["text"] for p in parts), "logprobs": logprobs}))
    return {"choices": choices, "usage": last["usage"]}


# Responses


def _response_body(asked: Asked) -> dict[str, Any]:
    include = ["message.output_text.logprobs"] * asked.is_scored + ["reasoning.encrypted_content"] * asked.is_terse
    return _given(
        input="hi",
        max_output_tokens=asked.max_tokens,
        seed=asked.seed,
        stop=asked.stop,
        tools=responses.TOOLS if asked.has_tools else None,
        include=include,
        store=False,
    )


def _response_whole(body: dict[str, Any]) -> Said:
    return {"choices": [responses.without_ids(body)], "usage": body["usage"]}


def _response_streamed(text: str) -> Said:
    events = responses.events_of(text)
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert responses.put_together(events) == last["output"]
    return _response_whole(last)


# Messages


def _message_body(asked: Asked) -> dict[str, Any]:
    tools = [{"name": "weather", "input_schema": PARAMETERS}] if asked.has_tools else None
    return _given(
        messages=HI,
        max_tokens=asked.max_tokens,
        stop_sequences=asked.stop and [asked.stop],
        tools=tools,
        thinking={"type": "adaptive", "display": "omitted"} if asked.is_terse else None,
    )


def _message_whole(body: dict[str, Any]) -> Said:
    message = json.loads(json.dumps(body))
    assert message.pop("id").startswith("msg_")
    for block in message["content"]:
        assert block["type"] != "tool_use" or len(block.pop("id")) > 8
    return {"choices": [message], "usage": message["usage"]}


def _message_streamed(text: str) -> Said:
    return _message_whole(streams.put_together(streams.named_events(text)))


CHAT = Face("chat", "/v1/chat/completions", _chat_body, _chat_whole, _chat_streamed, True, "[DONE]")
TEXT = Face("text", "/v1/completions", _text_body, _text_whole, _text_streamed, True, "[DONE]")
RESPONSES = Face("responses", "/v1/responses", _response_body, _response_whole, _response_streamed, False, "response.")
MESSAGES = Face("messages", "/v1/messages", _message_body, _message_whole, _message_streamed, False, "message_stop")
FACES = (CHAT, TEXT, RESPONSES, MESSAGES)
