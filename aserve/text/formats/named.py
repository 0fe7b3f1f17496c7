"""Formats by their names: those of families, and what checkpoints declare of their own."""

import hashlib
from typing import Any, Final, NamedTuple

import msgspec

from aserve.text.formats.families import CALLS, THOUGHTS
from aserve.text.formats.parts import Literal, Name, Part
from aserve.text.formats.response_template import declared
from aserve.text.formats.syntax import Calls, Thoughts

_CALLS: Final = dict(CALLS)
_THOUGHTS: Final = dict(THOUGHTS)
"""A name that is added is made of what it names, so that to add it again changes nothing."""


class OwnFormats(NamedTuple):
    """The names of what a checkpoint declares. problems: what of it is not read, and why."""

    calls: str | None
    thoughts: str | None
    problems: tuple[str, ...]


def calls_named(name: str | None) -> tuple[Calls, ...]:
    """How calls are written; () where nothing has that name."""
    return _CALLS.get(name or "", ())


def thoughts_named(name: str | None) -> Thoughts | None:
    """How thoughts are written; None where nothing has that name."""
    return _THOUGHTS.get(name or "")


def own_formats(response_template: Any) -> OwnFormats:
    """By a tokenizer's response_template, None where it has none. What a family writes too has that family's name."""
    if response_template is None:
        return OwnFormats(None, None, ())
    thoughts, calls, problems = declared(response_template)
    return OwnFormats(_calls_name(calls), None if thoughts is None else _thoughts_name(thoughts), problems)


def _calls_name(ways: tuple[Calls, ...]) -> str | None:
    if not ways:
        return None
    known = (name for name, (first, *_) in CALLS.items() if _bare(first) == _bare(ways[0]))
    return next(known, None) or _added(_CALLS, ways)


def _thoughts_name(thoughts: Thoughts) -> str:
    return next((name for name, known in THOUGHTS.items() if known == thoughts), None) or _added(_THOUGHTS, thoughts)


def _added(formats: dict[str, Any], format: Any) -> str:
    name = f"response_template:{hashlib.sha256(repr(format).encode()).hexdigest()[:8]}"
    formats[name] = format
    return name


def _bare(calls: Calls) -> Calls:
    """Without white space, of which a response_template does not tell what a model writes, and what looks ahead."""
    return msgspec.structs.replace(calls, line="", call=tuple(map(_bare_part, calls.call)))


def _bare_part(part: Part) -> Part:
    if isinstance(part, Name):
        return msgspec.structs.replace(part, follows="")
    if isinstance(part, Literal):
        return msgspec.structs.replace(part, before="", after="")
    if hasattr(part, "around"):
        return msgspec.structs.replace(part, around="")  # type: ignore[type-var]  # a part that is a struct
    return part
