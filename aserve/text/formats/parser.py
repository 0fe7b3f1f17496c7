"""The parser of all formats but channels: content, thoughts and calls, told apart by their markers as text comes.

    content --> marker of thoughts --> thoughts --> their end --> content ...
            '-> marker of calls, held --> a call begins --> its arguments as they come --> its end --> content ...
                                      '-> it is no call: what was held is content

What is held: the beginning of a possible marker; what follows the marker of calls, until a call has begun; white space
that stands between content and a call or thoughts, and belongs to neither; an argument whose type is told by its end.
Everything else is let out as it comes. The law (tests/text/formats/test_law.py): any chunking gives the same events.
"""

from typing import Final

from aserve.core.answer_events import AnswerEvent, AnswerParser
from aserve.text.formats.channels import read_channels
from aserve.text.formats.cursor import Markers, Steps
from aserve.text.formats.reading import Reading, Schemas
from aserve.text.formats.syntax import AnswerFormat, Calls, Thoughts

PIECE_CHARS: Final = 512
"""Of a longer text, read one after the other: what is looked for in it is looked for again at each marker."""
ENDLESS: Final = 2**62


def parser_of(format: AnswerFormat, schemas: Schemas, *, in_thought: bool = False) -> AnswerParser:
    """A parser of one answer. schemas: of the tools that may be called. in_thought: the prompt has begun a thought."""
    reading = Reading(schemas)
    if format.channels is not None:
        return Parser(reading, read_channels(reading, format.channels))
    return Parser(reading, _Tagged(reading, format).read(in_thought=in_thought))


class Parser:
    """An `AnswerParser` that runs a reader."""

    def __init__(self, reading: Reading, reader: Steps[None]) -> None:
        self._reading = reading
        self._reader = reader
        self._go_on()

    def feed(self, text: str) -> list[AnswerEvent]:
        """As the Protocol says."""
        if self._reading.cursor.passes(text):
            return self._reading.events()
        for start in range(0, len(text), PIECE_CHARS):
            self._reading.cursor.feed(text[start : start + PIECE_CHARS])
            self._go_on()
        return self._reading.events()

    def finish(self) -> list[AnswerEvent]:
        """As the Protocol says."""
        self._reading.cursor.end()
        self._go_on()
        return self._reading.events()

    def _go_on(self) -> None:
        next(self._reader, None)


class _Tagged:
    """Reads one answer."""

    def __init__(self, reading: Reading, format: AnswerFormat) -> None:
        self._reading = reading
        self._cursor = reading.cursor
        self._ways: dict[str, list[Calls]] = {}
        for calls in format.calls:
            for begin in calls.begins:
                self._ways.setdefault(begin, []).append(calls)
        self._may_be_bare = "" in self._ways
        thoughts = format.thoughts or Thoughts("", "")
        self._thoughts_begin = thoughts.begin
        self._thoughts_end = Markers(*filter(None, [thoughts.end]))
        self._markers = Markers(*filter(None, [thoughts.begin, *self._ways]))
        self._blank = ""  # since the last call

    def read(self, *, in_thought: bool) -> Steps[None]:
        """The whole answer."""
        if in_thought:
            yield from self._thought()
        while (yield from self._next()):
            pass

    def _next(self) -> Steps[bool]:
        """Content, and the thoughts or calls after it. False at the end."""
        cursor, reading = self._cursor, self._reading
        cursor.hold(self._blank)
        self._blank = ""
        yield from cursor.blanks()
        if self._may_be_bare:
            self._may_be_bare = False
            if (yield from self._calls("")):
                return True
        blank, self._blank = self._blank + cursor.release(), ""

        def sink(text: str) -> None:
            nonlocal blank
            self._may_be_bare = False
            reading.content(blank + text)
            blank = ""

        marker = yield from cursor.until(self._markers, sink)
        if marker is None:
            if reading.is_blank:
                reading.content(blank)
            return False
        if marker == self._thoughts_begin:
            yield from self._thought()
            return True
        cursor.hold(blank + marker)
        yield from self._calls(marker)
        return True

    def _thought(self) -> Steps[None]:
        num_newlines = 0  # that may stand before the end

        def sink(text: str) -> None:
            nonlocal num_newlines
            stripped = text.rstrip("\n")
            if stripped:
                self._reading.reasoning("\n" * num_newlines + stripped)
                num_newlines = 0
            num_newlines += len(text) - len(stripped)

        yield from self._newlines()
        if (yield from self._cursor.until(self._thoughts_end, sink)) is not None:
            yield from self._newlines()
            self._may_be_bare = "" in self._ways and self._reading.num_calls == 0

    def _newlines(self) -> Steps[None]:
        yield from self._cursor.span(lambda char: char == "\n", ENDLESS)

    def _calls(self, marker: str) -> Steps[bool]:
        """After a marker, which is held: calls, and content where what is held is none. Whether there was a call."""
        cursor, num_calls = self._cursor, self._reading.num_calls
        yield from cursor.blanks()
        opens = [way.opens for way in self._ways[marker] if way.opens]
        opened = ((yield from cursor.literal(*opens)) if opens else None) or ""
        way = next((way for way in self._ways[marker] if way.opens == opened), None)
        while way is not None and (yield from self._call(way)) and not (yield from self._ends(way)):
            if way.separator is None or (way.separator and (yield from cursor.literal(way.separator)) is None):
                break
        held = cursor.release()
        if held.strip():
            self._reading.content(held)
        else:
            self._blank = held
        return self._reading.num_calls > num_calls

    def _call(self, way: Calls) -> Steps[bool]:
        """One call; whether it is whole."""
        for part in way.call:
            if self._reading.in_call:
                self._cursor.hold("")
            if not (yield from part.read(self._reading)):
                self._reading.end_call()
                return False
        self._reading.end_call()
        self._cursor.hold("")
        return True

    def _ends(self, way: Calls) -> Steps[bool]:
        """What follows the last call; whether any of it does."""
        has_ended = False
        for end in way.ends:
            yield from self._cursor.blanks()
            if (yield from self._cursor.literal(end)) is not None:
                self._cursor.hold("")
                has_ended = True
        yield from self._cursor.blanks()
        return has_ended
