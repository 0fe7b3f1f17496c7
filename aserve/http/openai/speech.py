"""What an answer says, as chat completions spell it: content, reasoning (under both of its names), tool_calls.

text --> the model's parser --> events --> the fields of a delta, or of a message
"""

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from aserve.core.answer_events import AnswerEvent, AnswerParser, Arguments, CallBegins, Content, Reasoning
from aserve.core.errors import InvalidRequestError
from aserve.core.outputs import FinishReason
from aserve.core.params import SamplingParams
from aserve.core.structured import StructuredOutputs
from aserve.engine import Engine
from aserve.http.openai.tools import ToolUse

TOOL_CALLS: Final = "tool_calls"
_ALPHANUMERIC: Final = string.ascii_letters + string.digits


def call_id() -> str:
    """A new one, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """One that Mistral's templates take: nine letters or digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class Speech:
    """One choice, as it is read.

    shows_reasoning: else it is left out. is_single: calls after the first are left out. is_named: the call was asked
    for by its name, which is no reason for an answer to end.
    """

    def __init__(
        self,
        parser: AnswerParser,
        new_id: Callable[[], str],
        *,
        shows_reasoning: bool = True,
        is_single: bool = False,
        is_named: bool = False,
    ) -> None:
        self._parser = parser
        self._new_id = new_id
        self._shows_reasoning = shows_reasoning
        self._is_single = is_single
        self._is_named = is_named
        self._num_calls = 0

    def delta(self, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        """The fields that more text comes to; all that is left at the end."""
        events = self._parser.feed(text)
        if finish_reason is not None:
            events += self._parser.finish()
        fields: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            self._add(event, fields, calls)
        if calls:
            fields["tool_calls"] = list(calls.values())
        return fields

    def reason(self, finish_reason: FinishReason) -> str:
        """Why the choice ended, in the API's words, after its last delta."""
        calls = self._num_calls and finish_reason is FinishReason.STOP and not self._is_named
        return TOOL_CALLS if calls else finish_reason.value

    def _add(self, event: AnswerEvent, fields: dict[str, Any], calls: dict[int, dict[str, Any]]) -> None:
        if isinstance(event, Content):
            fields["content"] = fields.get("content", "") + event.text
        elif isinstance(event, Reasoning) and self._shows_reasoning:
            text = fields.get("reasoning", "") + event.text
            fields |= {"reasoning": text, "reasoning_content": text}
        elif isinstance(event, CallBegins | Arguments) and (event.index == 0 or not self._is_single):
            if isinstance(event, CallBegins):
                self._num_calls += 1
                calls[event.index] = {
                    "index": event.index,
                    "id": event.call_id or self._new_id(),
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
            else:
                call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text


def message_of(fields: Mapping[str, Any], *, has_thoughts: bool) -> dict[str, Any]:
    """A whole message, of one delta. has_thoughts: reasoning is null where there is none, and not left out."""
    calls = [
        {"id": call["id"], "type": call["type"], "function": call["function"]} for call in fields.get("tool_calls", ())
    ]
    made: dict[str, Any] = {"content": fields.get("content", None if calls else "")}
    if has_thoughts:
        made |= {name: fields.get(name) for name in ("reasoning", "reasoning_content")}
    return made | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a request's answers are read. new_parser: None where they are content and nothing else.

    markers: texts that have to reach the parser. structure: what is enforced of calls.
    """

    new_parser: Callable[[], AnswerParser] | None = None
    markers: frozenset[str] = frozenset()
    structure: StructuredOutputs | None = None
    has_thoughts: bool = False
    new_id: Callable[[], str] = call_id
    is_single: bool = False
    is_named: bool = False

    def speech(self, *, shows_reasoning: bool) -> Speech:
        """Of one more choice."""
        assert self.new_parser is not None, "there is nothing to read"
        return Speech(
            self.new_parser(),
            self.new_id,
            shows_reasoning=shows_reasoning,
            is_single=self.is_single,
            is_named=self.is_named,
        )


CONTENT: Final = Reading()
"""All that there is."""


def reading_of(engine: Engine, use: ToolUse | None, prompt: Sequence[int]) -> Reading:
    """How answers to a prompt are read. use: the tools that they may call."""
    info, texts = engine.info, engine.texts
    is_bare = use is not None and use.is_required and not texts.can_enforce_calls
    format = texts.format(with_calls=use is not None, is_bare=is_bare)
    if format is None:
        return CONTENT
    structure = None
    if use is not None and use.is_enforced:
        call_format = None if is_bare else info.call_format
        in_thought = texts.begins_thought(format, prompt)
        structure = use.structure(call_format, info.thought_format, in_thought=in_thought)
    return Reading(
        new_parser=texts.parsers(format, {} if use is None else use.schemas, prompt),
        markers=frozenset(filter(None, format.markers())),
        structure=structure,
        has_thoughts=format.thoughts is not None or format.channels is not None,
        new_id=short_call_id if info.call_format == "mistral" else call_id,
        is_single=use is not None and use.is_single,
        is_named=use is not None and use.is_named,
    )


def enforced(params: SamplingParams, use: ToolUse | None, reading: Reading) -> SamplingParams:
    """With what is enforced of calls. Raises `InvalidRequestError` where another structure is asked for as well.

    Where a call may be made, and need not be, another structure is that of all answers: none is a call.
    """
    if reading.structure is None or (params.structured is not None and use is not None and not use.is_required):
        return params
    if params.structured is not None:
        raise InvalidRequestError("tool_choice asks for a call, and another field for another structure", "tool_choice")
    return msgspec.structs.replace(params, structured=reading.structure)
