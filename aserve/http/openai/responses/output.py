"""Output: what a model writes, as the items of a response and as the events that tell of them.

    text --> the model's parser --> Content | Reasoning | CallBegins ... --> message, reasoning, function_call

All events of an item stand between its output_item.added and its output_item.done. A whole answer is one that came at
once: whatever pieces a text comes in, its items are the same, but for their ids.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from aserve.core.answer_events import AnswerEvent, AnswerParser, Arguments, CallBegins, CallEnds, Content, Reasoning
from aserve.core.outputs import FinishReason
from aserve.core.plan import TokenScores
from aserve.http.openai.responses.items import Item, output_item_id, sealed
from aserve.http.openai.tokens import Tokens
from aserve.http.reading import Reading

Event = dict[str, Any]
"""Of a stream, without its sequence_number."""
Spell = Callable[[Sequence[TokenScores]], list[dict[str, Any]]]
"""Scores as logprobs."""

MESSAGE: Final = "message"
REASONING: Final = "reasoning"
CALL: Final = "function_call"
DELTAS: Final = {
    MESSAGE: "response.output_text",
    REASONING: "response.reasoning_text",
    CALL: "response.function_call_arguments",
}
"""What the events of an item's text are called, before .delta and .done."""


class Output:
    """The items of one response. num_reasoning_tokens: those of thoughts, without their markers.

    tokens: where not all that is said is content. response_id: of the response. spell: None where logprobs are not
    asked for. seals: reasoning items have encrypted_content. names: of functions in namespaces, by what the model calls
    them: (namespace, name).
    """

    def __init__(
        self,
        reading: Reading,
        tokens: Tokens | None = None,
        *,
        response_id: str,
        names: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        spell: Spell | None = None,
        seals: bool = False,
    ) -> None:
        self.items: list[Item] = []
        self.num_reasoning_tokens = 0
        self._response_id = response_id
        self._reading = reading
        self._parser: AnswerParser | None = None if reading.new_parser is None else reading.parser()
        self._tokens = tokens
        self._names = names
        self._spell = spell
        self._seals = seals
        self._open: Item | None = None  # as it was added
        self._texts: list[str] = []  # of the open one
        self._scores: list[TokenScores] = []  # where all that is said is content
        self._events: list[Event] = []

    def feed(self, text: str, token_ids: Sequence[int] = (), scores: Sequence[TokenScores] = ()) -> list[Event]:
        """What more text comes to."""
        if self._parser is None:
            self._scores.extend(scores)
            if text or scores:
                self._say(MESSAGE, text, scores)
            return self._told()
        if self._tokens is not None:
            self._tokens.add(token_ids, scores)
        self._take(self._parser.feed(text))
        return self._told()

    def end(self, finish_reason: FinishReason | None) -> list[Event]:
        """What is left at the end. finish_reason: None where it failed."""
        status = "completed" if finish_reason is FinishReason.STOP else "incomplete"
        if self._parser is not None:
            self._take(self._parser.finish(), status)
            self._parser = None
        if not self.items and self._open is None and finish_reason is FinishReason.STOP:
            self._begin(MESSAGE)
        self._close(status)
        return self._told()

    def _told(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take(self, events: Sequence[AnswerEvent], status: str = "completed") -> None:
        """status: of a call that ends with them."""
        for event in events:
            if isinstance(event, Content):
                self._say(MESSAGE, event.text)
            elif isinstance(event, Reasoning):
                self._say(REASONING, event.text)
            elif event.index == 0 or not self._reading.is_single:
                self._call(event, status)

    def _call(self, event: CallBegins | Arguments | CallEnds, status: str) -> None:
        if isinstance(event, CallBegins):
            self._close()
            namespace, name = self._names.get(event.name, (None, event.name))
            within = {} if namespace is None else {"namespace": namespace}
            self._begin(CALL, call_id=event.call_id or self._reading.new_id(), name=name, **within)
        elif isinstance(event, Arguments):
            self._say(CALL, event.text)
        else:
            self._close(status)

    def _say(self, kind: str, text: str, scores: Sequence[TokenScores] = ()) -> None:
        if self._open is None or self._open["type"] != kind:
            self._close()
            self._begin(kind)
        self._texts.append(text)
        event = {"type": f"{DELTAS[kind]}.delta", **self._place(kind), "delta": text}
        if kind == MESSAGE:
            event["logprobs"] = self._spelled(scores)
        self._events.append(event)

    def _begin(self, kind: str, **fields: str) -> None:
        id = output_item_id(kind, self._response_id, len(self.items))
        self._open = {"id": id, "type": kind, "status": "in_progress", **fields}
        self._texts = []
        self._tell("response.output_item.added", item=self._shown("in_progress", None, []))
        if kind != CALL:
            self._tell_part("added", "", [])

    def _close(self, status: str = "completed") -> None:
        """End the item that is open, if one is."""
        if self._open is None:
            return
        kind, text = self._open["type"], "".join(self._texts)
        scores = self._scores
        if self._tokens is not None and kind != CALL:
            num_tokens, scores = self._tokens.take(text)
            self.num_reasoning_tokens += num_tokens if kind == REASONING else 0
        logprobs = self._spelled(scores) if kind == MESSAGE else []
        said: Event = {"arguments" if kind == CALL else "text": text}
        if kind == MESSAGE:
            said["logprobs"] = logprobs
        self._events.append({"type": f"{DELTAS[kind]}.done", **self._place(kind), **said})
        if kind != CALL:
            self._tell_part("done", text, logprobs)
        item = self._shown(status, text, logprobs)
        self._tell("response.output_item.done", item=item)
        self.items.append(item)
        self._open = None

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "output_index": len(self.items), **fields})

    def _tell_part(self, what: str, text: str, logprobs: list[dict[str, Any]]) -> None:
        assert self._open is not None, "parts are those of an open item"
        kind = self._open["type"]
        part = _part(kind, text, logprobs)
        self._events.append({"type": f"response.content_part.{what}", **self._place(kind), "part": part})

    def _place(self, kind: str) -> Event:
        assert self._open is not None, "what is said has its place in an open item"
        place: Event = {"item_id": self._open["id"], "output_index": len(self.items)}
        return place if kind == CALL else {**place, "content_index": 0}

    def _shown(self, status: str, text: str | None, logprobs: list[dict[str, Any]]) -> Item:
        """The open item. text: None where its part has not begun."""
        assert self._open is not None, "only an open item changes"
        item, kind = {**self._open, "status": status}, self._open["type"]
        if kind == CALL:
            return item | {"arguments": text or ""}
        content = [] if text is None else [_part(kind, text, logprobs)]
        if kind == MESSAGE:
            return item | {"role": "assistant", "content": content}
        seal = sealed(text) if self._seals and text else None
        return item | {"summary": [], "content": content, "encrypted_content": seal}

    def _spelled(self, scores: Sequence[TokenScores]) -> list[dict[str, Any]]:
        return [] if self._spell is None else self._spell(scores)


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
