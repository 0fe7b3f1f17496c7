"""Reading: one answer being read, which is what the parts of a format work on: its text, and what has been found in it.

Whatever may turn out to be no call is held (`Cursor.hold`) until the call begins; then it has been part of the call.
"""

from collections.abc import Collection, Mapping
from typing import Any

from aserve.core.answer_events import AnswerEvent, Arguments, CallBegins, CallEnds, Content, Reasoning
from aserve.text.formats.cursor import Cursor

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters of each tool that may be called: a JSON Schema by name."""


class Reading:
    """name, call_id: of the call that is being read. is_blank: whether nothing has been found yet."""

    def __init__(self, schemas: Schemas) -> None:
        self.cursor = Cursor()
        self.name = ""
        self.call_id: str | None = None
        self.num_calls = 0
        self.is_blank = True
        self._schemas = schemas
        self._events: list[AnswerEvent] = []
        self._in_call = False

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._in_call

    @property
    def tools(self) -> Collection[str]:
        """The names of the tools that may be called."""
        return self._schemas.keys()

    def parameter_schema(self, key: str) -> Any:
        """What is known of a parameter of this call; None where that is nothing."""
        properties = self._schemas.get(self.name, {}).get("properties")
        return properties.get(key) if isinstance(properties, Mapping) else None

    def content(self, text: str) -> None:
        """Text for the user."""
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        """Thoughts."""
        self._add(Reasoning, text)

    def begin_call(self) -> None:
        """A call of `name`: what is held is part of it."""
        self.cursor.release()
        self._events.append(CallBegins(self.num_calls, self.name, self.call_id))
        self.num_calls += 1
        self._in_call = True
        self.is_blank = False

    def arguments(self, text: str) -> None:
        """More arguments of the call."""
        index = self.num_calls - 1
        last = self._events[-1] if self._events else None
        if isinstance(last, Arguments) and last.index == index:
            self._events[-1] = Arguments(index, last.text + text)
        elif text:
            self._events.append(Arguments(index, text))

    def end_call(self) -> bool:
        """Nothing more of a call comes, if one had begun; whether it had."""
        had_begun, self._in_call = self._in_call, False
        if had_begun:
            self._events.append(CallEnds(self.num_calls - 1))
        self.name, self.call_id = "", None
        return had_begun

    def events(self) -> list[AnswerEvent]:
        """What has been found since the last time."""
        events, self._events = self._events, []
        return events

    def _add(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if not text:
            return
        self.is_blank = False
        last = self._events[-1] if self._events else None
        if type(last) is kind:
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))
