"""Arguments as programming languages write them, turned into JSON as they come."""

from typing import Final

import msgspec

from aserve.text.formats.cursor import BLANKS, Markers, Steps
from aserve.text.formats.json_text import MAX_KEY_CHARS, escaped, is_json
from aserve.text.formats.reading import Reading


class BareArguments(msgspec.Struct, frozen=True):
    """f(a=1, b="x") and {a:1,b:<|"|>x<|"|>}, for example.

    begin: the bracket before them. quotes: around strings, in which a backslash escapes as in Python where
    `has_escapes`. Words that are no JSON, and names, become strings.
    """

    begin: str
    quotes: tuple[str, ...]
    has_escapes: bool = False

    def read(self, reading: Reading) -> Steps[bool]:
        """As the Protocol says."""
        if (yield from reading.cursor.literal(self.begin)) is None:
            return False
        reading.begin_call()
        return (yield from _Bare(self, reading).read())

    def markers(self) -> tuple[str, ...]:
        """As the Protocol says."""
        return self.quotes


ASSIGNS: Final = frozenset(":=")
_CLOSERS: Final = {"{": "}", "[": "]", "(": "]"}
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_HEX_DIGITS: Final = {"x": 2, "u": 4}


class _Bare:
    """One call's arguments on their way to JSON."""

    def __init__(self, part: BareArguments, reading: Reading) -> None:
        self._part = part
        self._cursor = reading.cursor
        self._write = reading.arguments
        self._closers = ["}"]
        self._separator = ""
        self._firsts = {quote[0] for quote in part.quotes}
        self._delimiters = {*BLANKS, *"{}[](),:=", *self._firsts}

    def read(self) -> Steps[bool]:
        """After the first bracket, to the last one. False where the text ends before it."""
        self._write("{")
        while self._closers:
            yield from self._cursor.blanks()
            char = yield from self._cursor.peek()
            if not char:
                return False
            if char in "}])":
                self._cursor.take(1)
                self._separator = ""  # one before a closing bracket means nothing
                self._write(self._closers.pop())
            elif char == ",":
                self._cursor.take(1)
                self._separator = ", "
            elif char in ASSIGNS:
                self._cursor.take(1)
                self._write(": ")
            elif char in _CLOSERS:
                self._cursor.take(1)
                self._closers.append(_CLOSERS[char])
                self._item("{" if char == "{" else "[")
            elif not (yield from self._scalar(char)):
                return False
        return True

    def _item(self, text: str) -> None:
        self._write(self._separator + text)
        self._separator = ""

    def _scalar(self, char: str) -> Steps[bool]:
        """A string or a word. False where the text ends in a string."""
        quote = (yield from self._cursor.literal(*self._part.quotes)) if char in self._firsts else None
        if quote is not None:
            self._item('"')
            if not (yield from self._string(quote)):
                return False
            self._write('"')
            return True
        word = yield from self._cursor.span(lambda each: each not in self._delimiters, MAX_KEY_CHARS)
        word = word or self._cursor.take(1)
        yield from self._cursor.blanks()
        is_key = (yield from self._cursor.peek()) in ASSIGNS
        word = word if is_key else _WORDS.get(word, word)
        self._item(word if not is_key and is_json(word) else f'"{escaped(word)}"')
        return True

    def _string(self, quote: str) -> Steps[bool]:
        markers = Markers(quote, "\\") if self._part.has_escapes else Markers(quote)
        while True:
            found = yield from self._cursor.until(markers, lambda text: self._write(escaped(text)))
            if found != "\\":
                return found is not None
            char = yield from self._cursor.peek()
            if not char:
                return False
            self._cursor.take(1)
            if char in _HEX_DIGITS:
                yield from self._code(char)
            else:
                known = _ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)
                self._write(escaped(known))

    def _code(self, kind: str) -> Steps[None]:
        """A character by its number, after \\x or \\u."""
        num_digits = _HEX_DIGITS[kind]
        digits = yield from self._cursor.span(lambda char: char in "0123456789abcdefABCDEF", num_digits)
        self._write(f"\\u{digits:0>4}" if len(digits) == num_digits else escaped(f"\\{kind}{digits}"))
