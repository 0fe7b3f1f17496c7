"""What an answer says, as chat completions spell it: content, reasoning (under both of its names), tool_calls.

text --> the model's parser --> events --> the fields of a delta, or of a message
"""

from collections.abc import Mapping
from typing import Any, Final

from aserve.core.answer_events import AnswerEvent, Arguments, CallBegins, Content, Reasoning
from aserve.core.outputs import FinishReason
from aserve.http.reading import Reading

TOOL_CALLS: Final = "tool_calls"


class Speech:
    """One choice, as it is read.

    shows_reasoning: else it is left out.
    """

    def __init__(self, reading: Reading, *, shows_reasoning: bool = True) -> None:
        self._reading = reading
        self._parser = reading.parser()
        self._shows_reasoning = shows_reasoning
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
        calls = self._num_calls and finish_reason is FinishReason.STOP and not self._reading.is_named
        return TOOL_CALLS if calls else finish_reason.value

    def _add(self, event: AnswerEvent, fields: dict[str, Any], calls: dict[int, dict[str, Any]]) -> None:
        if isinstance(event, Content):
            fields["content"] = fields.get("content", "") + event.text
        elif isinstance(event, Reasoning) and self._shows_reasoning:
            text = fields.get("reasoning", "") + event.text
            fields |= {"reasoning": text, "reasoning_content": text}
        elif isinstance(event, CallBegins | Arguments) and (event.index == 0 or not self._reading.is_single):
            if isinstance(event, CallBegins):
                self._num_calls += 1
                calls[event.index] = {
                    "index": event.index,
                    "id": event.call_id or self._reading.new_id(),
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
