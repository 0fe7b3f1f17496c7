"""JSON that a model writes, passed on as it comes: where a value ends, and nothing else, is looked at.

Brackets are counted and strings are skipped; what stands between them is not judged. A value that is no JSON therefore
reaches the client as the model wrote it, and it ends where its brackets do.
"""

import json
from typing import Final

import msgspec

from aserve.text.formats.cursor import Cursor, Sink, Steps

OPENING: Final = frozenset("{[")
CLOSING: Final = frozenset("}]")
MAX_KEY_CHARS: Final = 1024


def nested(cursor: Cursor, sink: Sink) -> Steps[bool]:
    """An object or an array, the first of whose brackets comes next. False where the text ends in it."""
    brackets = _Brackets()
    while True:
        ahead = cursor.chars()
        end = brackets.end_in(ahead)
        if ahead:
            sink(cursor.take(end or len(ahead)))
        if end:
            return True
        if not (yield from cursor.more()):
            return False


class _Brackets:
    """How far the brackets of a value are closed."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end_in(self, text: str) -> int:
        """Where the value ends in the text that comes next; 0 if it does not."""
        at = 0
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
                continue
            char = text[at]
            at += 1
            if char == '"':
                self._in_string = True
            elif char in OPENING:
                self._depth += 1
            elif char in CLOSING:
                self._depth -= 1
                if self._depth == 0:
                    return at
        return 0

    def _string(self, text: str, at: int) -> int:
        """From inside of a string to its end, or to after a backslash."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        quote = text.find('"', at)
        backslash = text.find("\\", at, quote if quote >= 0 else len(text))
        if backslash >= 0:
            self._is_escaped = True
            return backslash + 1
        self._in_string = quote < 0
        return len(text) if quote < 0 else quote + 1


def string(cursor: Cursor, most: int | None = None) -> Steps[str | None]:
    """A string, whose first quote comes next: its value; None where it is malformed, has no end or over `most`."""
    pieces: list[str] = []
    num_chars, is_escaped = 0, False
    while True:
        ahead = cursor.chars()
        for end, char in enumerate(ahead, start=1):
            if is_escaped:
                is_escaped = False
            elif char == "\\":
                is_escaped = True
            elif char == '"' and num_chars + end > 1:
                pieces.append(cursor.take(end))
                return _value("".join(pieces))
            if most is not None and num_chars + end > most:
                cursor.take(end)
                return None
        if ahead:
            pieces.append(cursor.take(len(ahead)))
            num_chars += len(ahead)
        if not (yield from cursor.more()):
            return None


def _value(text: str) -> str | None:
    try:
        value = msgspec.json.decode(text, type=str, strict=True)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return value


def escaped(text: str) -> str:
    """As a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_json(text: str, kinds: tuple[type, ...] | None = None) -> bool:
    """Whether it is one JSON value, of one of these Python types if any are given."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return kinds is None or type(value) in kinds
