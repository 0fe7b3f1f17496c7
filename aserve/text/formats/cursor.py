"""Cursor: a text that comes in chunks, read by generators that yield where they need more of it.

    feed("<tool_"), run --> the reader yields: "<tool_" may begin a marker    feed("call>"), run --> it reads on

What is read never depends on how the text was cut: a reader looks at what comes next, waits while that is undecided,
and takes it once it is decided. Only as many characters wait in the cursor as the longest marker has, so that reading
is linear.
"""

from collections.abc import Callable, Generator
from typing import Final, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader, which ends with a T."""
Sink = Callable[[str], None]
"""Takes pieces of a text in their order."""

BLANKS: Final = " \t\r\n"


class Markers:
    """Texts to look for, none of which begins with another."""

    def __init__(self, *texts: str) -> None:
        assert all(a == b or not a.startswith(b) for a in texts for b in texts), f"one begins another: {texts}"
        self._texts = tuple(dict.fromkeys(texts))
        self.firsts = frozenset(text[0] for text in texts)
        self._longest = max(map(len, texts), default=0)

    def find(self, text: str, start: int) -> tuple[int, str | None]:
        """The first place where a marker stands, and that; or may yet stand at the text's end, and None."""
        place, found = len(text), None
        for marker in self._texts:
            at = text.find(marker, start, place + len(marker) - 1)
            if at >= 0:
                place, found = at, marker
        for at in range(max(start, len(text) - self._longest + 1), place):
            if text[at] in self.firsts and self._may_begin(text[at:]):
                return at, None
        return place, found

    def _may_begin(self, tail: str) -> bool:
        return any(marker.startswith(tail) for marker in self._texts)


class Cursor:
    """held: what was taken since `hold`, which may turn out to be content; None while nothing is held."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held: list[str] | None = None
        self._ended = False
        self._passing: tuple[Markers, Sink] | None = None  # while `until` waits, with nothing before it

    def passes(self, text: str) -> bool:
        """Whether more text was taken at once: no marker that is waited for can begin in it."""
        if self._passing is None or not self._passing[0].firsts.isdisjoint(text):
            return False
        self._passing[1](text)
        return True

    def feed(self, text: str) -> None:
        """More text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def hold(self, text: str) -> None:
        """From now on keep what is taken. text: what was taken before, and belongs to it."""
        self._held = [text]

    def release(self) -> str:
        """What was taken since `hold`, which is over."""
        held, self._held = "".join(self._held or ()), None
        return held

    def take(self, num_chars: int) -> str:
        """So many characters, which are there."""
        taken = self._text[self._at : self._at + num_chars]
        self._at += num_chars
        if self._held is not None:
            self._held.append(taken)
        return taken

    def more(self) -> Steps[bool]:
        """Wait until there is more than now. False at the end."""
        num_chars = len(self._text) - self._at
        while len(self._text) - self._at == num_chars:
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, which is not taken; "" at the end."""
        if self._at == len(self._text):
            yield from self.more()
        return self._text[self._at : self._at + 1]

    def literal(self, *texts: str) -> Steps[str | None]:
        """The one of these texts that comes next, which is taken; or None, and nothing is. None begins with another."""
        while True:
            ahead = self._text[self._at : self._at + max(map(len, texts))]
            for text in texts:
                if ahead.startswith(text):
                    return self.take(len(text))
            if not any(text.startswith(ahead) for text in texts) or not (yield from self.more()):
                return None

    def span(self, is_part: Callable[[str], bool], most: int) -> Steps[str]:
        """The characters that come next and are part of something, `most` of them at most."""
        pieces: list[str] = []
        while most > 0:
            end = start = self._at
            while end < len(self._text) and end - start < most and is_part(self._text[end]):
                end += 1
            if end > start:
                pieces.append(self.take(end - start))
                most -= end - start
            if self._at < len(self._text) or not (yield from self.more()):
                break
        return "".join(pieces)

    def blanks(self, sink: Sink | None = None) -> Steps[None]:
        """Take white space."""
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] in BLANKS:
                end += 1
            if end > self._at:
                blank = self.take(end - self._at)
                if sink is not None:
                    sink(blank)
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def until(self, markers: Markers, sink: Sink) -> Steps[str | None]:
        """Give `sink` the text before the first marker, as it comes. The marker, taken; None where the text ends."""
        while True:
            place, marker = markers.find(self._text, self._at)
            if place > self._at:
                sink(self.take(place - self._at))
            if marker is not None:
                return self.take(len(marker))
            if self._held is None and self._at == len(self._text):
                self._passing = markers, sink
            has_more = yield from self.more()
            self._passing = None
            if not has_more:
                if self._at < len(self._text):  # the beginning of a marker, which has no end
                    sink(self.take(1))
                    continue
                return None

    def chars(self) -> str:
        """What has come and is not taken."""
        return self._text[self._at :]
