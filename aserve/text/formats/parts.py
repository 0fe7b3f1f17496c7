"""The parts that calls of tools are written in: what a format is made of. Each reads itself, from a `Reading`.

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>     JsonCall
    <|tool_call_begin|>functions.f:0<|..argument_begin|>{"a": 1}     Name, Literal, JsonArguments
    <function=f><parameter=a>1</parameter></function>                Name, TaggedArguments, Literal
    [f(a=1)]    call:f{a:1}                                          Name, BareArguments (bare.py)

A reader returns whether its part was there. Where it was not, nothing is lost: what it took is held by the cursor until
a call has begun, and a part that reads arguments ends where they do. What it has not taken is read by somebody else.
"""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from aserve.text.formats.cursor import Markers, Sink, Steps
from aserve.text.formats.json_text import MAX_KEY_CHARS, escaped, is_json, nested, string
from aserve.text.formats.reading import Reading

MAX_NAME_CHARS: Final = 256
NOT_IN_NAMES: Final = frozenset("<>[](){}\"'`,;=| \t\r\n\\")
NOT_IN_KEYS: Final = '<>"\n'
"""Of arguments with tags."""
_JSON_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "integer": (int,),
    "number": (int, float),
    "string": (),
}


class Part(Protocol):
    """One part of a call."""

    def read(self, reading: Reading) -> Steps[bool]:
        """Take it; whether it was there."""
        ...

    def markers(self) -> tuple[str, ...]:
        """Its own texts, which may be tokens."""
        ...


class Literal(msgspec.Struct, frozen=True):
    """A text that stands there, white space before it or not; or may stand there, where it `is_optional`.

    before, after: the white space around it that the family itself writes.
    """

    text: str
    is_optional: bool = False
    before: str = ""
    after: str = ""

    def read(self, reading: Reading) -> Steps[bool]:
        """As the Protocol says."""
        yield from reading.cursor.blanks()
        found = yield from reading.cursor.literal(self.text)
        return self.is_optional or found is not None

    def markers(self) -> tuple[str, ...]:
        """As the Protocol says."""
        return (self.text,)


class Name(msgspec.Struct, frozen=True):
    """The tool's name. prefix: what may stand before it and is none of it.

    follows: the characters of which one comes next, and is not taken. only_known: it has to be the name of a tool.
    has_id: what is written is the call's id as well, "functions.f:0", whose name is between the dot and the colon.
    """

    follows: str
    prefix: str = ""
    only_known: bool = False
    has_id: bool = False

    def read(self, reading: Reading) -> Steps[bool]:
        """As the Protocol says."""
        cursor = reading.cursor
        yield from cursor.blanks()
        written = yield from cursor.span(lambda char: char not in NOT_IN_NAMES, MAX_NAME_CHARS)
        follows = yield from cursor.peek()
        name = written
        if self.has_id:
            reading.call_id = written
            name = written.rpartition(":")[0] or written
        reading.name = name.removeprefix(self.prefix)
        is_known = not self.only_known or reading.name in reading.tools
        return bool(reading.name and follows and follows in self.follows and is_known)

    def markers(self) -> tuple[str, ...]:
        """As the Protocol says."""
        return ()


class CallId(msgspec.Struct, frozen=True):
    """The call's id after `begin`, if that stands there."""

    begin: str
    follows: str

    def read(self, reading: Reading) -> Steps[bool]:
        """As the Protocol says."""
        if (yield from reading.cursor.literal(self.begin)) is None:
            return True
        written = yield from reading.cursor.span(lambda char: char not in NOT_IN_NAMES, MAX_NAME_CHARS)
        follows = yield from reading.cursor.peek()
        reading.call_id = written or None
        return bool(follows) and follows in self.follows

    def markers(self) -> tuple[str, ...]:
        """As the Protocol says."""
        return (self.begin,)


class JsonArguments(msgspec.Struct, frozen=True):
    """The arguments are one JSON object, with which the call begins."""

    def read(self, reading: Reading) -> Steps[bool]:
        """As the Protocol says."""
        yield from reading.cursor.blanks()
        if (yield from reading.cursor.peek()) != "{":
            return False
        reading.begin_call()
        return (yield from nested(reading.cursor, reading.arguments))

    def markers(self) -> tuple[str, ...]:
        """As the Protocol says."""
        return ()


class JsonCall(msgspec.Struct, frozen=True):
    """The whole call is one JSON object: name, and arguments or parameters; perhaps an id, or a type.

    It begins when both are known, so that an object of another kind is content to its end. An id that comes later is
    passed over. only_known: as in `Name`. arguments_key: the family's own word for them.
    around: the white space that it writes on both sides.
    Arguments that were written as a string, JSON in JSON, are that string's value.
    """

    only_known: bool = False
    arguments_key: str = "arguments"
    around: str = ""

    def read(self, reading: Reading) -> Steps[bool]:
        """As the Protocol says."""
        cursor = reading.cursor
        yield from cursor.blanks()
        if (yield from cursor.literal("{")) is None:
            return False
        seen: set[str] = set()
        early: list[str] = []  # arguments that came before the name
        while True:
            if not (yield from self._member(reading, seen, early)):
                return False
            if reading.in_call:
                cursor.hold("")
            yield from cursor.blanks()
            separator = yield from cursor.literal(",", "}")
            if separator == "}" and "name" in seen and not reading.in_call:
                reading.begin_call()
                reading.arguments("{}")
            if separator != ",":
                return separator is not None and reading.in_call

    def _member(self, reading: Reading, seen: set[str], early: list[str]) -> Steps[bool]:
        """One key and its value; whether it may be part of a call, and comes up for the first time."""
        cursor = reading.cursor
        yield from cursor.blanks()
        key = (yield from string(cursor, MAX_KEY_CHARS)) if (yield from cursor.peek()) == '"' else None
        key = "arguments" if key == "parameters" else key
        if key not in {"name", "arguments", "id", "type"} or key in seen:
            return False
        seen.add(key)
        yield from cursor.blanks()
        if (yield from cursor.literal(":")) is None:
            return False
        yield from cursor.blanks()
        if key == "arguments":
            return (yield from self._arguments(reading, early))
        value = (yield from string(cursor, MAX_NAME_CHARS)) if (yield from cursor.peek()) == '"' else None
        if value is None:
            return False
        if key == "id":
            reading.call_id = value
        if key != "name":
            return key == "id" or value == "function"
        reading.name = value
        if not value or (self.only_known and value not in reading.tools):
            return False
        if early:
            reading.begin_call()
            reading.arguments("".join(early))
        return True

    def _arguments(self, reading: Reading, early: list[str]) -> Steps[bool]:
        cursor = reading.cursor
        first = yield from cursor.peek()
        value = (yield from string(cursor)) if first == '"' else None
        if first != "{" and value is None:
            return False
        if reading.name:
            reading.begin_call()
        sink: Sink = reading.arguments if reading.name else early.append
        if value is None:
            return (yield from nested(cursor, sink))
        sink(value)
        return True

    def markers(self) -> tuple[str, ...]:
        """As the Protocol says."""
        return ()


class TaggedArguments(msgspec.Struct, frozen=True):
    """Each argument has a tag of its own, and a text for a value, whose type the tool's schema tells.

    key_begin, key_end: around its name. value_begin: what follows, white space before it or not. value_end: its end.
    A newline at either end of a value belongs to the tags. has_types: after a name stands whether it is a string:
    key_end is '" string="', and 'true">' or 'false">' follow. around: the white space that the family
    writes around values.

    A value is a string as it comes, where the schema says that it is one. Else it is known at its end: JSON as it is
    written, where the schema allows it, and if not a string.
    """

    key_begin: str
    key_end: str
    value_end: str
    value_begin: str = ""
    has_types: bool = False
    around: str = ""

    def read(self, reading: Reading) -> Steps[bool]:
        """As the Protocol says. With its name the call begins, for it may have no arguments."""
        cursor = reading.cursor
        reading.begin_call()
        separator, is_junk = "{", False
        while True:
            cursor.hold("")
            yield from cursor.blanks()
            if (yield from cursor.literal(self.key_begin)) is None:
                break
            key = yield from cursor.span(lambda char: char not in NOT_IN_KEYS, MAX_KEY_CHARS)
            is_string = yield from self._opening(reading, key)
            if is_string is None:
                is_junk = True
                break
            cursor.release()
            reading.arguments(f'{separator}"{escaped(key)}": ')
            separator = ", "
            if not (yield from self._value(reading, key, is_string=is_string)):
                return False
        if (yield from cursor.peek()) or is_junk:  # else it was cut, and its arguments are left open
            reading.arguments("{}" if separator == "{" else "}")
        return not is_junk

    def _opening(self, reading: Reading, key: str) -> Steps[bool | None]:
        """After a key: whether its value is a string. None where there is none."""
        cursor = reading.cursor
        if (yield from cursor.literal(self.key_end)) is None:
            return None
        if self.value_begin:
            yield from cursor.blanks()
            if (yield from cursor.literal(self.value_begin)) is None:
                return None
        if self.has_types:
            told = yield from cursor.literal('true">', 'false">')
            return None if told is None else told == 'true">'
        return _kinds(reading.parameter_schema(key)) == ()

    def _value(self, reading: Reading, key: str, *, is_string: bool) -> Steps[bool]:
        cursor = reading.cursor
        ends = Markers(self.value_end, "\n" + self.value_end)
        yield from cursor.literal("\n")
        if is_string:
            reading.arguments('"')
            if (yield from cursor.until(ends, lambda text: reading.arguments(escaped(text)))) is None:
                return False
            reading.arguments('"')
            return True
        pieces: list[str] = []
        end = yield from cursor.until(ends, pieces.append)
        value = "".join(pieces)
        kinds = None if self.has_types else _kinds(reading.parameter_schema(key))
        reading.arguments(value.strip() if end is None or is_json(value, kinds) else f'"{escaped(value)}"')
        return end is not None

    def markers(self) -> tuple[str, ...]:
        """As the Protocol says."""
        return (self.key_begin, self.key_end, self.value_begin, self.value_end)


def _kinds(schema: Any) -> tuple[type, ...] | None:
    """The Python types of JSON values that a schema allows besides strings, which always are; None for any."""
    if not isinstance(schema, dict) or "type" not in schema:
        return None
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not all(isinstance(name, str) and name in _JSON_KINDS for name in named):
        return None
    return tuple(kind for name in named for kind in _JSON_KINDS[name])
