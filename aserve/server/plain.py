"""Plain requests: heads that leave no doubt about what they say, found without a parser's state.

Whatever is unusual, or not whole, is not plain, and is left to the parser: folded headers or repeated lengths, chunks,
`Expect`, `Upgrade`, a target in absolute form, control bytes, anything but ASCII. So of a plain request it cannot be in
dispute where it ends, or what it asks for. The guard finds nothing wrong with its head either.
"""

import re
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

from aserve.http.middleware import HOST, MAX_HEADERS

MAX_HEAD_BYTES: Final = 8 * 1024
MAX_KNOWN_HEADS: Final = 256
"""Plain ones that name nobody: those who come again and again send the same, but for the length."""
END_OF_HEAD: Final = b"\r\n\r\n"

_known: dict[bytes, "PlainRequest"] = {}
"""By their heads. No head with a key is kept."""

_POST: Final = re.compile(
    rb"POST (/[!-~]*) HTTP/1\.1(?=\r\n)((?:\r\n[!#$%%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*){1,%d}+)\r\n\r\n" % MAX_HEADERS
)
_TELLING: Final = re.compile(
    rb"\r\n(host|content-length|connection|authorization|x-api-key|x-request-id|transfer-encoding|expect|upgrade|te|trailer)"
    rb":([^\r]*)",
    re.IGNORECASE,
)
_PLAIN: Final = {
    b"host": HOST,
    b"content-length": re.compile(rb"[0-9]{1,9}"),
    b"connection": re.compile(rb"keep-alive", re.IGNORECASE),
}
"""Headers that may be there once, with such a value. Others of `_TELLING` may not, but for `_WHO`."""
_WHO: Final = frozenset({b"authorization", b"x-api-key", b"x-request-id"})


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A POST that keeps the connection alive.

    scope: as in ASGI, as far as what is asked, and who asks: of the headers those alone. Not to be written to.
    """

    scope: Scope
    num_head_bytes: int
    num_body_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of head and body."""
        return self.num_head_bytes + self.num_body_bytes


def plain_request(received: bytes | bytearray) -> PlainRequest | None:
    """The request whose head is at the beginning of `received`, if it is plain; its body need not have come."""
    end = received.find(END_OF_HEAD, 0, MAX_HEAD_BYTES)
    if end < 0:
        return None
    head = bytes(received[: end + len(END_OF_HEAD)])
    return _known.get(head) or _parsed(head)


def _parsed(received: bytes) -> PlainRequest | None:
    head = _POST.fullmatch(received)
    if head is None:
        return None
    once: dict[bytes, bytes] = {}
    who: list[tuple[bytes, bytes]] = []
    for name, value in _TELLING.findall(head[2]):
        name, value = name.lower(), value.strip(b" \t")
        if name in _WHO:
            who.append((name, value))
        elif name in once or name not in _PLAIN or _PLAIN[name].fullmatch(value) is None:
            return None
        else:
            once[name] = value
    if b"host" not in once or b"content-length" not in once:
        return None
    path = head[1]
    scope = {"type": "http", "method": "POST", "path": path.decode("ascii"), "raw_path": path, "headers": who}
    request = PlainRequest(scope, len(received), int(once[b"content-length"]))
    if not who:
        if len(_known) == MAX_KNOWN_HEADS:
            _known.clear()
        _known[received] = request
    return request
