"""Reading an answer of messages in channels, as gpt-oss writes them (the harmony format).

Thoughts are one channel's messages, calls are those to a tool, and all others are content. Text outside of a message,
and a header that is none, is content too.
"""

from typing import Final

from aserve.text.formats.cursor import BLANKS, Cursor, Markers, Sink, Steps
from aserve.text.formats.reading import Reading
from aserve.text.formats.syntax import Channels

MAX_WORDS: Final = 8
"""Of a header."""
MAX_WORD_CHARS: Final = 256
RECIPIENT: Final = "to="


def read_channels(reading: Reading, channels: Channels) -> Steps[None]:
    """The whole answer."""
    cursor = reading.cursor
    outside = Markers(channels.start, channels.channel)
    inside = Markers(channels.start, channels.channel, *channels.ends)
    cursor.hold("")
    marker: str | None = ""
    while marker is not None:
        header = yield from _header(cursor, channels, marker)
        if header is None:
            reading.content(cursor.release())
            marker = yield from cursor.until(outside, reading.content)
        else:
            cursor.release()
            marker = yield from cursor.until(inside, _sink(reading, channels, *header))
            reading.end_call()
            if marker in channels.ends:
                marker = yield from _between(reading, outside)
        cursor.hold(marker or "")


def _between(reading: Reading, outside: Markers) -> Steps[str | None]:
    """After a message's end: what follows is content, unless it is white space. The marker of the next."""
    cursor = reading.cursor
    cursor.hold("")
    yield from cursor.blanks()
    blank = cursor.release()

    def sink(text: str) -> None:
        nonlocal blank
        reading.content(blank + text)
        blank = ""

    return (yield from cursor.until(outside, sink))


def _sink(reading: Reading, channels: Channels, channel: str, recipient: str) -> Sink:
    """Where a message's text belongs."""
    if recipient and reading.tools:
        reading.name = recipient.removeprefix(channels.prefix)
        reading.begin_call()
        return reading.arguments
    return reading.reasoning if channel == channels.thoughts else reading.content


def _header(cursor: Cursor, channels: Channels, marker: str) -> Steps[tuple[str, str] | None]:
    """Up to a message's text: its channel and its recipient; None where it is none. marker: what was taken of it."""
    channel = recipient = ""
    found: str | None = marker
    for index in range(MAX_WORDS):
        if found != channels.channel:
            yield from cursor.blanks()
            found = yield from cursor.literal(channels.message, channels.channel, channels.constrain, RECIPIENT)
        if found == channels.message:
            return channel, recipient
        if found is None and not marker and index == 0:
            return None
        word = yield from cursor.span(lambda char: char not in BLANKS and char != "<", MAX_WORD_CHARS)
        if found == RECIPIENT:
            recipient = word
        elif found == channels.channel:
            channel = word
        if not word or (found != RECIPIENT and word not in (*channels.names, *channels.words)):
            return None
        found = None
    return None
