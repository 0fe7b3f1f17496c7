"""partial_object: what there is of a JSON object whose end is missing."""

import re
from typing import Any, Final

import msgspec

_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*(?P<end>")?|[{}\[\],:]|[^\s"{}\[\],:]+', re.DOTALL)
"""A string, perhaps without its end, a mark, or a number or word. Linear: which it is, its first character tells, and
from there on each alternative goes forward only and cannot fail."""
_CLOSERS: Final = {"{": "}", "[": "]"}


def partial_object(text: str) -> dict[str, Any]:
    """The object, without the values that are cut; {} of what is no object.

    `{"city": "Rome", "days": [1, 2` -> {"city": "Rome", "days": [1]}: of a number at the end nobody knows more.
    """
    for candidate in (text, _closed(text)):
        try:
            return msgspec.json.decode(candidate, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            continue
    return {}


def _closed(text: str) -> str:
    """The text up to where its last whole value ends, and what closes it."""
    closers: list[str] = []
    cut = 0
    is_value = False
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark.startswith('"') and not token["end"]:
            break
        if mark in _CLOSERS:
            closers.append(_CLOSERS[mark])
            cut, is_value = token.end(), mark == "["
        elif mark in "}]":
            if closers[-1:] != [mark]:
                break
            closers.pop()
            cut, is_value = token.end(), False
        elif mark == ",":
            cut, is_value = token.start(), closers[-1:] == ["]"]
        elif mark == ":":
            is_value = True
        elif is_value and mark.startswith('"'):
            cut, is_value = token.end(), False
    return text[:cut] + "".join(reversed(closers))
