"""A body of multipart/form-data (RFC 7578), which is in memory whole, as its parts. Linear in its length."""

import re
from typing import Final

import msgspec

from aserve.core.errors import InvalidRequestError

MAX_PARTS: Final = 16
_BOUNDARY: Final = re.compile(
    r'multipart/form-data;\s*boundary="?([0-9A-Za-z\'()+_,./:=? -]{1,70})"?\s*', re.IGNORECASE
)
_PARAMETER: Final = re.compile(rb'\b(name|filename)="([^"\r\n]{0,512})"')


class Part(msgspec.Struct, frozen=True):
    """filename: None of a field that is no file."""

    filename: str | None
    content: bytes


def parts_of(content_type: str, body: bytes) -> dict[str, Part]:
    """The parts by name. Raises `InvalidRequestError` for what is no such body."""
    found = _BOUNDARY.fullmatch(content_type)
    if found is None:
        raise InvalidRequestError("the body must be multipart/form-data")
    marker = b"--" + found[1].encode()
    if not body.startswith(marker):
        raise InvalidRequestError("the body does not begin with its boundary")
    pieces = body[len(marker) :].split(b"\r\n" + marker, MAX_PARTS + 1)
    if len(pieces) > MAX_PARTS + 1:
        raise InvalidRequestError(f"the body has more than {MAX_PARTS} parts")
    if not pieces[-1].startswith(b"--"):
        raise InvalidRequestError("the body does not end with its boundary")
    return dict(_part(piece) for piece in pieces[:-1])


def _part(piece: bytes) -> tuple[str, Part]:
    head, mark, content = piece.partition(b"\r\n\r\n")
    given = {name: value.decode(errors="replace") for name, value in _PARAMETER.findall(head)}
    if not mark or b"name" not in given:
        raise InvalidRequestError("a part of the body has no name")
    return given[b"name"], Part(given.get(b"filename"), content)
