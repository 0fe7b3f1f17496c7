"""A checkpoint's own word for how its answers read: transformers' response_template, turned into a format of ours.

    "tool_calls": {"open_pattern": "<tool_call>\\s*<function=(?P<name>[^>]+)>", "content": "xml-inline", ...}
    -->  Calls(begins=("<tool_call>",), opens="<function=", call=(Name, Literal(">"), TaggedArguments(..), ...))

Its regular expressions come with the checkpoint and are for any text that a model may write, so that none of them is
run: one that is literals, white space and named runs of characters is translated, any other is told of, and what it is
for is not read by it. Source: transformers.utils.chat_parsing, version 1 of the template.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from aserve.core.rules import shown
from aserve.text.formats.bare import BareArguments
from aserve.text.formats.cursor import BLANKS
from aserve.text.formats.parts import JsonArguments, JsonCall, Literal, Name, Part, TaggedArguments
from aserve.text.formats.syntax import Calls, Thoughts

THOUGHT_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
MAX_PATTERN_CHARS: Final = 1024
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r"}
_RUN: Final = re.compile(r"\(\?P<(?P<group>\w+)>(?:\\w|\\S|\.|\[(?:[^\]\\]|\\.)+\])[+*]\??\)")
_BLANK: Final = re.compile(r"(?:\\s|\\n| )[*+]\??")
_OPTIONAL: Final = re.compile(r"\(\?:((?:[^()\\|]|\\[^\w])+)\)\?")
_END: Final = re.compile(r"\|(?:\$|\\Z)$")
"""An alternative that is the text's end: where that is, is known without."""


class Declared(NamedTuple):
    """What was read. problems: what was not, and why."""

    thoughts: Thoughts | None = None
    calls: tuple[Calls, ...] = ()
    problems: tuple[str, ...] = ()


class _Piece(NamedTuple):
    """Of a pattern. kind: text, blank, optional (a text that may be there) or run (of characters: its group's name)."""

    kind: str
    text: str = ""


class _Untranslatable(Exception):
    """Why a field is not read."""


def declared(template: Any) -> Declared:
    """What a response_template says of thoughts and calls. template: as tokenizer_config.json has it."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or template.get("version", 1) != 1:
        return Declared(problems=("it is no response_template of version 1",))
    thoughts: Thoughts | None = None
    calls: tuple[Calls, ...] = ()
    problems: list[str] = []
    for name, field in fields.items():
        try:
            if not isinstance(field, Mapping):
                raise _Untranslatable("it is no object")
            if name in THOUGHT_FIELDS:
                thoughts = _thoughts(field)
            elif name == "tool_calls":
                calls = (_calls(field),)
            elif not (name == "content" and not field.keys() & {"open", "open_pattern"}):
                raise _Untranslatable("it is neither thoughts, nor tool_calls, nor content without a beginning")
        except _Untranslatable as error:
            problems.append(f"{name}: {error}")
    begins = [*([thoughts.begin] if thoughts else ()), *(begin for way in calls for begin in way.begins)]
    if any(a != b and a.startswith(b) for a in begins for b in begins) or len({*begins}) < len(begins):
        return Declared(problems=(*problems, f"one of {', '.join(map(repr, begins))} begins with another"))
    return Declared(thoughts, calls, tuple(problems))


def _thoughts(field: Mapping[str, Any]) -> Thoughts:
    [begin], [end] = _texts(field, "open"), _texts(field, "close")
    return Thoughts(begin.strip(BLANKS), end.strip(BLANKS))


def _texts(field: Mapping[str, Any], key: str) -> list[str]:
    """The one text that an anchor of thoughts is."""
    pieces = [piece for piece in _anchor(field, key) if piece.kind != "blank"]
    if len(pieces) != 1 or pieces[0].kind != "text" or not pieces[0].text.strip(BLANKS):
        raise _Untranslatable(f"{key} is no text")
    return [pieces[0].text]


def _calls(field: Mapping[str, Any]) -> Calls:
    opening, closing = _anchor(field, "open"), _anchor(field, "close", is_needed=False)
    while opening and opening[0].kind == "blank":
        opening = opening[1:]
    if not opening or opening[0].kind != "text" or any(piece.kind not in ("text", "blank") for piece in closing):
        raise _Untranslatable("it begins with no text, or ends with more than texts")
    ends = [piece.text.strip(BLANKS) for piece in closing if piece.text.strip(BLANKS)]
    begin, rest, opens = opening[0].text.strip(BLANKS), _spaced(opening[1:]), ""
    arguments, is_list = _content(field, has_name=any(piece.kind == "run" for _, piece in rest))
    if rest and rest[0][1].kind == "text":
        opens, rest = rest[0][1].text.strip(BLANKS), rest[1:]
    follows = _first_of(arguments)
    call = [arguments, *(Literal(end) for end in ends[:-1])]
    for is_spaced, piece in reversed(rest):
        if piece.kind == "run":
            if piece.text != "name":
                raise _Untranslatable(f"open_pattern has a group {shown(piece.text)}, which is not the call's name")
            call.insert(0, Name(follows=follows))
        else:
            call.insert(0, Literal(piece.text.strip(BLANKS), is_optional=piece.kind == "optional"))
            follows = piece.text[0] + (follows if piece.kind == "optional" else "") + (BLANKS if is_spaced else "")
    if is_list:
        return Calls(begins=(begin,), opens="[", call=tuple(call), separator=",", ends=("]", *ends))
    return Calls(begins=(begin,), opens=opens, call=tuple(call), ends=tuple(ends[-1:]))


def _spaced(pieces: list[_Piece]) -> list[tuple[bool, _Piece]]:
    """Pieces without white space, and whether it was before them."""
    return [
        (place > 0 and pieces[place - 1].kind == "blank", piece)
        for place, piece in enumerate(pieces)
        if piece.kind != "blank" and piece.text.strip(BLANKS)
    ]


def _first_of(arguments: Part) -> str:
    """The characters with which what follows a name may begin."""
    if isinstance(arguments, TaggedArguments):
        return arguments.key_begin[0] + "<" + BLANKS
    return "{" + BLANKS


def _content(field: Mapping[str, Any], *, has_name: bool) -> tuple[Part, bool]:
    """How arguments, or whole calls, are written, and whether as a list."""
    content, args = field.get("content", "text"), field.get("content_args", {})
    if not isinstance(args, Mapping):
        raise _Untranslatable("content_args is no object")
    function = _function(field.get("transform"))
    if content == "xml-inline" and function == ("{name}", "{content}") and has_name:
        return _tags(args), False
    if content != "json":
        raise _Untranslatable(f"content {shown(content)} with this transform")
    if function == ("{name}", "{content}") and has_name:
        delimiters = _delimiters(args.get("string_delims", []))
        if not delimiters and not args.get("unquoted_keys"):
            return JsonArguments(), False
        return BareArguments("{", delimiters or ('"',)), False
    keys = {"{content}": "arguments", ("{content.name}", "{content.arguments}"): "arguments"}
    keys |= {("{content.name}", "{content.parameters}"): "parameters"}
    if field.get("transform_each"):
        keys = {("{name}", "{arguments}"): "arguments", ("{name}", "{parameters}"): "parameters"}
    if has_name or function not in keys:
        raise _Untranslatable("its transform makes no call of what is there")
    return JsonCall(arguments_key=keys[function]), bool(field.get("transform_each"))


def _delimiters(given: Any) -> tuple[str, ...]:
    """What stands on both sides of a string."""
    try:
        pairs = msgspec.convert(given, list[tuple[str, str]])
    except msgspec.ValidationError:
        raise _Untranslatable("string_delims are no pairs of texts") from None
    if any(begin != end or not begin for begin, end in pairs):
        raise _Untranslatable("string_delims differ, or are empty")
    return tuple(begin for begin, _ in pairs)


def _function(transform: Any) -> Any:
    """What a transform makes of a call: the call, or its name and arguments."""
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if isinstance(function, Mapping) and function.keys() == {"name", "arguments"}:
        return function["name"], function["arguments"]
    return function if isinstance(function, str) else None


def _tags(args: Mapping[str, Any]) -> TaggedArguments:
    pieces = [piece for piece in _pieces(str(args.get("tag_pattern", ""))) if piece.kind != "blank"]
    kinds = [piece.text if piece.kind == "run" else piece.kind for piece in pieces]
    texts = [piece.text.strip(BLANKS) for piece in pieces if piece.kind == "text"]
    if kinds == ["text", "key", "text", "value", "text"]:
        return TaggedArguments(texts[0], texts[1], texts[2])
    if kinds == ["text", "key", "text", "text", "value", "text"]:
        return TaggedArguments(texts[0], texts[1], texts[3], texts[2])
    raise _Untranslatable("tag_pattern is not a tag around a key and a value")


def _anchor(field: Mapping[str, Any], key: str, *, is_needed: bool = True) -> list[_Piece]:
    given = field.get(key)
    if isinstance(given, list) and len(given) == 1:
        [given] = given
    if isinstance(given, str) and given:
        return [_Piece("text", given)]
    pattern = field.get(f"{key}_pattern")
    if isinstance(pattern, str):
        return list(_pieces(pattern))
    if given is None and not is_needed:
        return []
    raise _Untranslatable(f"{key} is no text")


def _pieces(pattern: str) -> Iterator[_Piece]:
    """A regular expression as a row of texts, white space and runs. Raises `_Untranslatable` for any other."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _Untranslatable(f"a pattern has over {MAX_PATTERN_CHARS} characters")
    pattern = _END.sub("", pattern)
    at, text = 0, ""
    while at < len(pattern):
        kind, found = _found(pattern, at)
        if found is None:
            char, at = _character(pattern, at)
            text += char
            continue
        if text:
            yield _Piece("text", text)
            text = ""
        inner = found[1] if kind != "blank" else ""
        yield _Piece(kind, re.sub(r"\\(.)", r"\1", inner) if kind == "optional" else inner)
        at = found.end()
    if text:
        yield _Piece("text", text)


def _found(pattern: str, at: int) -> tuple[str, re.Match[str] | None]:
    for kind, form in (("blank", _BLANK), ("run", _RUN), ("optional", _OPTIONAL)):
        if found := form.match(pattern, at):
            return kind, found
    return "", None


def _character(pattern: str, at: int) -> tuple[str, int]:
    """One that is itself, and where the next one is."""
    char, end = pattern[at], at + 1
    if char == "\\" and end < len(pattern):
        char, end = pattern[end], end + 1
        if char.isalnum() and char not in _ESCAPED:
            raise _Untranslatable(f"the pattern {shown(pattern)} is more than texts, white space and named runs")
        char = _ESCAPED.get(char, char)
    elif char in ".^$*+?{}[]()|\\":
        raise _Untranslatable(f"the pattern {shown(pattern)} is more than texts, white space and named runs")
    if pattern[end : end + 1] in {"*", "+", "?", "{"} - {""}:
        raise _Untranslatable(f"the pattern {shown(pattern)} repeats a character")
    return char, end
