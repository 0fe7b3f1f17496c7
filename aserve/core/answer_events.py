"""What an answer says, as a parser finds it in a model's text: content, reasoning, and calls of tools.

    Content "It is "    Reasoning "Let me see"    CallBegins(0, "get_weather")  Arguments(0, '{"city"') ...  CallEnds(0)

Texts of one kind that follow each other concatenate, and so do the arguments of one call: JSON, unless the model wrote
something else or was cut. Knows no API, each of which spells these events in its own way.
"""

from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Thoughts, without their markers."""

    text: str


class CallBegins(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool begins. index: 0 for the answer's first. call_id: where the model itself gave one."""

    index: int
    name: str
    call_id: str | None = None


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments."""

    index: int
    text: str


class CallEnds(msgspec.Struct, frozen=True, gc=False):
    """Nothing more of the call comes: it is whole, or was cut, or goes on in a way that is none of a call's."""

    index: int


AnswerEvent = Content | Reasoning | CallBegins | Arguments | CallEnds


class AnswerParser(Protocol):
    """Of one answer. All chunkings of a text give the same events, once texts that follow each other are joined."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """What is certain, now that `text` has come."""
        ...

    def finish(self) -> list[AnswerEvent]:
        """What was held back, once no more text comes. Nothing is fed after it."""
        ...
