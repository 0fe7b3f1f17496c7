"""What a family's format is, as a value: markers and parts. How it is read is parser.py's and channels.py's."""

from collections.abc import Iterator

import msgspec

from aserve.text.formats.parts import Part


class Thoughts(msgspec.Struct, frozen=True):
    """Thoughts stand between two markers; newlines at either side of them belong to the markers."""

    begin: str
    end: str


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """One way to write calls; white space may stand between anything.

    begins: the markers of which any one comes first. "" is none: the calls begin where the answer does, or after its
    thoughts, and their parts should heed known names only.
    opens: what follows the marker, and tells this way from another with the same. call: the parts of a call.
    line: the white space that the family writes behind the marker.
    separator: between two calls, "" where they follow each other; None where each has a marker of its own.
    ends: what follows the last call, one after the other. Models leave it out, so that it is not asked for.
    """

    begins: tuple[str, ...]
    call: tuple[Part, ...]
    opens: str = ""
    line: str = ""
    separator: str | None = None
    ends: tuple[str, ...] = ()


class Channels(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of several messages, each with a header: a channel, and perhaps a recipient, who is a tool.

        <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>final<|message|>CONTENT<|return|>
        <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>

    The first message's `start` and role are the prompt's. names: of the channels, of which `thoughts` is one. words:
    that a header may have besides. prefix: what is written before a tool's name.
    """

    start: str
    channel: str
    constrain: str
    message: str
    ends: tuple[str, ...]
    names: tuple[str, ...]
    thoughts: str
    words: tuple[str, ...]
    prefix: str


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How answers are read. What is not given is not looked for. channels: in place of thoughts and calls."""

    thoughts: Thoughts | None = None
    calls: tuple[Calls, ...] = ()
    channels: Channels | None = None

    def markers(self) -> Iterator[str]:
        """All texts that are no content: tokens that are special, and not shown, have to be shown to a parser."""
        if self.thoughts is not None:
            yield from (self.thoughts.begin, self.thoughts.end)
        for calls in self.calls:
            yield from (*calls.begins, calls.opens, calls.separator or "", *calls.ends)
            for part in calls.call:
                yield from part.markers()
        if (channels := self.channels) is not None:
            yield from (channels.start, channels.channel, channels.constrain, channels.message, *channels.ends)
