"""Request bodies: bytes to one JSON object, and every way in which they can fail to be one.

Numbers are strict JSON (no NaN, no Infinity, nothing a float cannot hold); of equal keys the last wins. How long a body
may be and how long it may take is the middleware's business.

Decoding is a call that nothing interrupts, and a thread that is in it keeps the event loop waiting like any other. What
it takes is not told by a body's length. Microseconds, on a core of a Xeon at 2.1 GHz:

    a mebibyte of text        500, and 2,500 where each character is an escape
    an integer                0.05        but 100 if it has 4,300 digits
    a string                  0.06 to 0.2
    an array or an object     0.5         the garbage collector goes through them as they grow
    a key of an object        0.35        most of it waiting for memory, in a large one
    a number that is none     8           where its exponent is large, or it has many digits

So they are counted first, which takes about as long as it takes to read the body, and a long list of numbers is decoded
piece by piece. To refuse a body as long as any may be takes under 50 ms (tests/http/test_cost_of_refusal.py).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from aserve.core.errors import InvalidRequestError
from aserve.http.connection import ClientGone
from aserve.http.errors import HttpError, echo
from aserve.workers import Workers

OFF_LOOP_BYTES: Final = 64 * 1024
"""Longer bodies are parsed in a thread."""
MAX_FIELDS: Final = 256
"""Of the object itself."""
LARGE_FIELDS: Final = frozenset({"prompt", "messages", "tokens", "input"})
ID_FIELDS: Final = LARGE_FIELDS - {"messages"}
"""Those that may be lists of token ids."""
MAX_FIELD_BYTES: Final = 2 * 1024 * 1024
"""Of any other field; a list of all the tokens of a vocabulary has as much."""
MAX_CONTAINERS: Final = 16_384
"""Arrays and objects in a body. A message is one, or three if its content is a list of parts; and a prompt is one."""
MAX_STRINGS: Final = 49_152
"""Strings, keys of objects among them. A message has four, or seven if its content is a list of parts."""
MAX_VALUES: Final = 1_114_112
"""Members of all arrays and objects together. The longest contexts are a million tokens, and there are other fields."""
MAX_OTHER_VALUES: Final = 393_216
"""Of those, in lists that are not of token ids: half as many again as the largest vocabularies have tokens."""
MAX_ESCAPES: Final = 1_048_576
"""Backslashes. A text whose every character is one escape has as many characters."""
MAX_REALS: Final = 4096
"""Fractions, exponents, `true` and `false`. A logit_bias of 1024 tokens has two each at most."""
LONG_DIGITS: Final = 40
MAX_LONG_DIGITS: Final = 4096
"""How many times LONG_DIGITS digits in a row there may be: no number that means anything has so many."""
MAX_DEPTH: Final = 64
HEAD_BYTES: Final = 4096
LONG_STRING_BYTES: Final = 512
"""To look for a string's end costs less than to copy one of so many bytes."""
PIECE_BYTES: Final = 128 * 1024
"""Of a list of numbers, decoded at a time."""

_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")
_NO_DIGITS: Final = bytes(byte for byte in range(256) if byte not in b"0123456789,.eE[]{}")
"""What is left tells numbers apart: in JSON one of these is between any two."""
_HALF_PAIR: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
"""A high surrogate in escapes without its other half."""
_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A body's fields. is_large: going through them is work for a thread."""

    fields: dict[str, Any]
    is_large: bool


Glance = Callable[[Mapping[str, bytes]], None]
"""Raises `InvalidRequestError` for what can be told to be refused from fields that are not decoded yet.

Of messages that are objects it is given the beginning alone.
"""


def at_nothing(members: Mapping[str, bytes]) -> None:
    """The glance that refuses nothing."""


async def read_object(scope: Scope, receive: Receive, workers: Workers, glance: Glance) -> JsonObject:
    """The body as a JSON object. A large one is parsed by a worker.

    Raises `HttpError` (415) for what does not call itself JSON, `InvalidRequestError` for what is not JSON or holds too
    much, and `ClientGone`.
    """
    _check_media_type(Headers(scope=scope))
    pieces = await _read(receive)
    if sum(map(len, pieces)) > OFF_LOOP_BYTES:
        return JsonObject(await workers.run(fields_of, pieces, glance), is_large=True)
    return JsonObject(fields_of(pieces, glance), is_large=False)


def _check_media_type(headers: Headers) -> None:
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, "unsupported_media_type", "the body must be application/json")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HttpError(415, "unsupported_media_type", "the body must not be compressed")


async def _read(receive: Receive) -> list[bytes]:
    pieces: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return pieces


def fields_of(pieces: list[bytes], glance: Glance = at_nothing) -> dict[str, Any]:
    """A body's, which is taken out of the list. Raises `InvalidRequestError` for what is not JSON or holds too much."""
    body = b"".join(pieces)
    pieces.clear()
    if not body:
        raise InvalidRequestError("the body is empty; a JSON object is expected")
    try:
        if b"\\" in body:  # which is found sooner than counted
            _limit(body.count(b"\\"), MAX_ESCAPES, "escapes; in UTF-8 few characters need one")
        marks = check_amount(outside_strings(body))
        fields = _decode_object(body, glance, marks.count(b","))
    except msgspec.ValidationError:
        raise _no_value(body) from None
    except msgspec.MsgspecError as error:
        half = _HALF_PAIR.search(body) if "truncated" in str(error) else None
        why = str(error) if half is None else f"the body has half of a surrogate pair, {half[0].decode()}"
        raise InvalidRequestError(why) from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    if is_deeper_than(marks, MAX_DEPTH):
        raise InvalidRequestError(f"the body is nested more than {MAX_DEPTH} levels deep")
    return fields


def _no_value(body: bytes) -> InvalidRequestError:
    """Of JSON that is no object, or has a number that there is not."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return InvalidRequestError("the body must be a JSON object")
    for name, value in fields.items():
        try:
            msgspec.json.decode(value)
        except msgspec.ValidationError:
            return InvalidRequestError(f"{echo(name)} has a number that is out of range", echo(name)[1:-1])
    return InvalidRequestError("the body has a number that is out of range")


def outside_strings(body: bytes) -> bytes:
    """JSON with its strings empty. Raises `InvalidRequestError` where they are too many."""
    unescaped = b"".join(map(_unescaped, _slices(body))) if b"\\" in body else body
    pieces = _between_strings(unescaped) if _has_long_strings(unescaped) else []
    if not pieces:
        pieces = unescaped.split(b'"', 2 * MAX_STRINGS + 2)[::2]
    _limit(len(pieces) - 1, MAX_STRINGS, "strings and keys")
    return b'""'.join(pieces)


def _has_long_strings(body: bytes) -> bool:
    """Whether to look for their ends costs less than to copy them, by the beginning of a long body."""
    return len(body) > PIECE_BYTES and body.count(b'"', 0, PIECE_BYTES) * LONG_STRING_BYTES < PIECE_BYTES


def _between_strings(body: bytes) -> list[bytes]:
    """What is outside of strings, without a copy of what is inside; nothing where they are shorter than they began."""
    pieces, start = list[bytes](), 0
    while (begin := body.find(b'"', start)) >= 0:
        pieces.append(body[start:begin])
        start = body.find(b'"', begin + 1) + 1
        if start == 0:  # a string without an end
            return pieces
        if len(pieces) * LONG_STRING_BYTES > len(body):
            return []
    return [*pieces, body[start:]]


def _slices(body: bytes) -> Iterator[bytes]:
    """The body in pieces that end in no backslash that escapes the next character."""
    start = 0
    while start < len(body):
        piece = body[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1:
            piece = body[start : start + PIECE_BYTES + 1]
        yield piece
        start += len(piece)


def _unescaped(piece: bytes) -> bytes:
    """Every quote that is left begins or ends a string."""
    return piece.replace(b"\\\\", b"").replace(b'\\"', b"")


def check_amount(outside: bytes) -> bytes:
    """Raise `InvalidRequestError` where decoding it takes too long. outside: JSON with its strings empty.

    Returns its commas and brackets, with what tells fractions, exponents and names.
    """
    numbers = outside.translate(_ZEROS, _NO_DIGITS)
    marks = numbers.translate(None, b"0")
    _limit(marks.count(b","), MAX_VALUES, "values")
    _limit(marks.count(b"[") + marks.count(b"{"), MAX_CONTAINERS, "arrays and objects")
    _limit(sum(map(marks.count, (b".", b"e", b"E"))), MAX_REALS, "fractions, exponents, true and false")
    _limit(numbers.count(b"0" * LONG_DIGITS), MAX_LONG_DIGITS, f"times {LONG_DIGITS} digits in a row")
    return marks


def is_deeper_than(marks: bytes, max_depth: int) -> bool:
    """Whether arrays and objects are nested in more levels. marks: of well-formed JSON, by `check_amount`."""
    brackets = marks.translate(_BRACKETS, _NO_BRACKETS)
    for _ in range(max_depth):
        brackets = brackets.replace(b"[]", b"")  # all that hold no others
    return bool(brackets)


def _limit(num: int, max_num: int, what: str) -> None:
    if num > max_num:
        raise InvalidRequestError(f"the body has more than {max_num} {what}")


def _decode_object(body: bytes, glance: Glance, num_values: int) -> dict[str, Any]:
    raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if len(raw) > MAX_FIELDS:
        raise InvalidRequestError(f"the body has more than {MAX_FIELDS} fields")
    if len(body) <= OFF_LOOP_BYTES:
        return dict(msgspec.json.decode(body))
    for name, value in raw.items():
        if name not in LARGE_FIELDS and len(memoryview(value)) > MAX_FIELD_BYTES:
            raise InvalidRequestError(f"{echo(name)} is longer than {MAX_FIELD_BYTES} bytes", echo(name)[1:-1])
    members = {name: _glanced(name, memoryview(value)) for name, value in raw.items()}
    num_listed = sum(value.count(b",") for name, value in members.items() if name in ID_FIELDS and _is_of_ids(value))
    _limit(num_values - num_listed, MAX_OTHER_VALUES, "values besides token ids")
    glance(members)
    return {name: _decode(members[name], value) for name, value in raw.items()}


def _glanced(name: str, value: memoryview) -> bytes:
    """What a glance is given. Of messages that are objects the beginning, which costs no copy of them all."""
    head = bytes(value[:HEAD_BYTES])
    return head if name == "messages" and b"{" in head else bytes(value)


def _decode(value: bytes, raw: msgspec.Raw) -> Any:
    if not is_flat(value):
        return msgspec.json.decode(raw)
    items: list[Any] = []
    for piece in _pieces(value):
        items.extend(msgspec.json.decode(piece))
    return items


def _is_of_ids(value: bytes) -> bool:
    """Whether it is an array of no strings and no objects."""
    return value[:1] == b"[" and b'"' not in value and b"{" not in value


def is_flat(value: bytes) -> bool:
    """Whether it is an array of no strings, arrays or objects."""
    return _is_of_ids(value) and value.find(b"[", 1) < 0


def _pieces(array: bytes) -> Iterator[bytes]:
    """A flat array as several."""
    start, end = 1, len(array) - 1
    while end - start > PIECE_BYTES and (comma := array.find(b",", start + PIECE_BYTES, end)) >= 0:
        yield b"[%b]" % array[start:comma]
        start = comma + 1
    yield b"[%b]" % array[start:end]
