"""What an answer says, as chat completions spell it: content, reasoning (under both of its names), tool_calls.

text --> the model's parser --> events --> the fields of a delta, or of a message
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aserve.core.answer_events import AnswerEvent, Arguments, CallBegins, Content, Reasoning
from aserve.core.outputs import FinishReason
from aserve.http.openai.tokens import Tokens
from aserve.http.reading import Reading

TOOL_CALLS: Final = "tool_calls"


class Speech:
    """One choice, as it is read.

    shows_reasoning: else it is left out. tokens: where those of thoughts are counted. num_reasoning_tokens: those of
    thoughts that have ended, without their markers.
    """

    def __init__(self, reading: Reading, *, shows_reasoning: bool = True, tokens: Tokens | None = None) -> None:
        self.num_reasoning_tokens = 0
        self._reading = reading
        self._parser = reading.parser()
        self._shows_reasoning = shows_reasoning
        self._num_calls = 0
        self._tokens = tokens
        self._part: tuple[type[AnswerEvent], list[str]] = (Content, [])  # what is being said

    def delta(self, text: str, finish_reason: FinishReason | None, token_ids: Sequence[int] = ()) -> dict[str, Any]:
        """The fields that more text comes to; all that is left at the end."""
        if self._tokens is not None:
            self._tokens.add(token_ids, ())
        events = self._parser.feed(text)
        if finish_reason is not None:
            events += self._parser.finish()
        fields: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            self._add(event, fields, calls)
        if calls:
            fields["tool_calls"] = list(calls.values())
        if finish_reason is not None:
            self._end_part()
        return fields

    def reason(self, finish_reason: FinishReason) -> str:
        """Why the choice ended, in the API's words, after its last delta."""
        calls = self._num_calls and finish_reason is FinishReason.STOP and not self._reading.is_named
        return TOOL_CALLS if calls else finish_reason.value

    def _add(self, event: AnswerEvent, fields: dict[str, Any], calls: dict[int, dict[str, Any]]) -> None:
        if isinstance(event, Content | Reasoning):
            if not isinstance(event, self._part[0]):
                self._end_part()
                self._part = (type(event), [])
            self._part[1].append(event.text)
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

    def _end_part(self) -> None:
        """Count the tokens of a thought, as responses do."""
        kind, texts = self._part
        if self._tokens is not None:
            num_tokens, _ = self._tokens.take("".join(texts))
            self.num_reasoning_tokens += num_tokens if kind is Reasoning else 0


def message_of(fields: Mapping[str, Any], *, has_thoughts: bool) -> dict[str, Any]:
    """A whole message, of one delta. has_thoughts: reasoning is null where there is none, and not left out."""
    calls = [
        {"id": call["id"], "type": call["type"], "function": call["function"]} for call in fields.get("tool_calls", ())
    ]
    made: dict[str, Any] = {"content": fields.get("content", None if calls else "")}
    if has_thoughts:
        made |= {name: fields.get(name) for name in ("reasoning", "reasoning_content")}
    return made | ({"tool_calls": calls} if calls else {})
