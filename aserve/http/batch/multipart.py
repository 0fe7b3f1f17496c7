"""A body of multipart/form-data (RFC 7578), which is in memory whole, as its parts. Linear in its length."""

import re
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from aserve.core.errors import InvalidRequestError
from aserve.http.errors import echo

MAX_PARTS: Final = 16
MAX_HEAD_BYTES: Final = 8192
"""Of a part's headers."""
MAX_FILENAME_CHARS: Final = 512
_BOUNDARY: Final = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PARAMETER: Final = re.compile(r";\s*(?:([^\s;=\"]+)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s;\"]*))\s*)?(?=;|\Z)")
_QUOTED_PAIR: Final = re.compile(r"\\([\"\\])")
_FOLD: Final = re.compile(r"\r\n(?=[ \t])")


class Part(msgspec.Struct, frozen=True):
    """filename: None of a field that is no file."""

    filename: str | None
    content: bytes


def parts_of(content_type: str, body: bytes) -> dict[str, Part]:
    """The parts by name. Raises `InvalidRequestError` for what is no such body."""
    kind, parameters = _header(content_type, "the header Content-Type")
    if kind != "multipart/form-data":
        raise InvalidRequestError(f"the body must be multipart/form-data, got {echo(kind)}")
    boundary = parameters.get("boundary")
    if boundary is None or not _BOUNDARY.fullmatch(boundary):
        told = "none is given" if boundary is None else f"got {echo(boundary)}"
        raise InvalidRequestError(f"the header Content-Type must name a boundary, as RFC 2046 has it: {told}")
    return dict(map(_part, _pieces(body, b"--" + boundary.encode())))


def _pieces(body: bytes, marker: bytes) -> list[bytes]:
    """What is between the boundaries. What is before the first and behind the last means nothing."""
    line = b"\r\n" + marker
    start = 0 if body.startswith(marker) else body.find(line) + len(b"\r\n")
    if not body.startswith(marker, start):
        raise InvalidRequestError("the body has not the boundary that its header Content-Type names")
    start += len(marker)
    pieces: list[bytes] = []
    while not body.startswith(b"--", start):
        end = body.find(line, start)
        if end < 0:
            raise InvalidRequestError("the body does not end with its boundary")
        if len(pieces) == MAX_PARTS:
            raise InvalidRequestError(f"the body has more than {MAX_PARTS} parts")
        pieces.append(body[start:end])
        start = end + len(line)
    return pieces


def _part(piece: bytes) -> tuple[str, Part]:
    length = piece.find(b"\r\n\r\n")
    if not 0 <= length <= MAX_HEAD_BYTES:
        told = "without an end" if length < 0 else f"of over {MAX_HEAD_BYTES} bytes"
        raise InvalidRequestError(f"a part of the body has headers {told}")
    given = _disposition(piece[:length].decode(errors="replace"))
    if "name" not in given:
        raise InvalidRequestError("a part of the body has no name: its header Content-Disposition must have one")
    name, filename = given["name"], given.get("filename")
    if "filename*" in given:
        filename = _extended(given["filename*"])
    if filename is not None and len(filename) > MAX_FILENAME_CHARS:
        told = f"its filename has {len(filename)} characters, and at most {MAX_FILENAME_CHARS} are allowed"
        raise InvalidRequestError(f"{echo(name)[1:-1]}: {told}", echo(name)[1:-1])
    return name, Part(filename, piece[length + len(b"\r\n\r\n") :])


def _disposition(head: str) -> dict[str, str]:
    """The parameters of a part's Content-Disposition: other headers have such, too, that mean something else."""
    for header in _FOLD.sub("", head).split("\r\n"):
        field, _, value = header.partition(":")
        if field.strip().lower() == "content-disposition":
            return _header(value, "the header Content-Disposition of a part")[1]
    return {}


def _header(text: str, where: str) -> tuple[str, dict[str, str]]:
    """A header's value and its parameters, whose names are in lower case (RFC 2045: tokens, or quoted strings)."""
    value = text.partition(";")[0]
    place = len(value)
    parameters: dict[str, str] = {}
    while place < len(text):
        parameter = _PARAMETER.match(text, place)
        if parameter is None:
            raise InvalidRequestError(f"{where} cannot be read: {echo(text[place:])}")
        name, quoted, token = parameter.groups()
        if name is not None:
            parameters[name.lower()] = token if quoted is None else _QUOTED_PAIR.sub(r"\1", quoted)
        place = parameter.end()
    return value.strip().lower(), parameters


def _extended(value: str) -> str:
    """The value of a parameter whose name ends in *, as RFC 8187 has it: UTF-8''a%20b."""
    charset, _, rest = value.partition("'")
    _, mark, text = rest.partition("'")
    if not mark or charset.lower() not in ("utf-8", "iso-8859-1"):
        raise InvalidRequestError(f"filename* must be UTF-8'' and a name with %-escapes, got {echo(value)}")
    return unquote_to_bytes(text).decode(charset, errors="replace")
