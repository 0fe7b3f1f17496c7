"""Plain requests: heads that leave no doubt about what they say, found without a parser's state.

Whatever is unusual, or not whole, is not plain, and is left to the parser: folded headers or repeated lengths, chunks,
`Expect`, `Upgrade`, a target in absolute form, control bytes, anything but ASCII. So of a plain request it cannot be in
dispute where it ends, or what it asks for.
"""

import re
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

MAX_HEAD_BYTES: Final = 8 * 1024

_POST: Final = re.compile(rb"POST (/[!-~]*) HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*\r\n)+)\r\n")
_LENGTH: Final = re.compile(rb"[0-9]{1,9}")
_NOT_PLAIN: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"te", b"trailer"})


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A POST that keeps the connection alive. scope: as in ASGI, as far as what is asked; nothing of the connection."""

    scope: Scope
    num_head_bytes: int
    num_body_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of head and body."""
        return self.num_head_bytes + self.num_body_bytes


def plain_request(received: bytes | bytearray) -> PlainRequest | None:
    """The request whose head is at the beginning of `received`, if it is plain; its body need not have come."""
    head = _POST.match(received, 0, MAX_HEAD_BYTES)
    if head is None:
        return None
    headers = []
    for line in head[2].split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        headers.append((name.lower(), value.strip(b" \t")))
    names = [name for name, _ in headers]
    lengths = [value for name, value in headers if name == b"content-length"]
    if names.count(b"host") != 1 or len(lengths) != 1 or _LENGTH.fullmatch(lengths[0]) is None:
        return None
    if not _NOT_PLAIN.isdisjoint(names):
        return None
    if any(name == b"connection" and value.lower() != b"keep-alive" for name, value in headers):
        return None
    raw_path, _, query_string = head[1].partition(b"?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": raw_path.decode("ascii"),
        "raw_path": raw_path,
        "query_string": query_string,
        "root_path": "",
        "headers": headers,
    }
    return PlainRequest(scope, head.end(), int(lengths[0]))
