"""StrictConnection: h11's parser, without what it mends or overlooks.

What two parsers read differently lets one request hide in another (request smuggling, RFC 9112, section 11.2). h11
joins folded lines, takes the length `3, 3` for 3, and waits for the 10^24 bytes that a chunk announces; Hypercorn takes
the method `get` for GET. Here each is an error like any other of h11's, and the end of the connection.

What comes behind a request that is the connection's last is thrown away (RFC 9112, section 9.6): to h11 it is an error,
for which that request would lose its answer.

It looks into h11's buffer, which has no public name; `trailing_data` is a copy, too dear for bodies of tiny chunks.
"""

import re
from typing import Any, Final

import h11

MAX_CHUNK_DIGITS: Final = 8
"""Of a chunk's size in hexadecimal: 4 GiB less a byte, far above the largest body."""

_HEAD_END: Final = re.compile(rb"\n\r?\n")
_FOLD_OR_LIST: Final = re.compile(rb"\n(?:[ \t]|content-length:[^\n]*,)", re.IGNORECASE)
"""In a head: a line that goes on in the next (obs-fold), and a list of lengths."""
_CHUNK_HEAD: Final = re.compile(rb"(?:\r?\n)?([0-9A-Fa-f]+)([^\n]*)\r\n")
"""The end of the chunk before, if it has not been read yet, and the line with the size and what extends it."""


class StrictConnection(h11.Connection):
    """A client's connection. Raises `h11.RemoteProtocolError`, with 501 for a method in lower case and else 400."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_chunked = False
        self._awaits_chunk = False  # the next line is a chunk's head

    def next_event(self) -> Any:
        """The next part of a message, as h11's."""
        if self.their_state is h11.MUST_CLOSE:
            self._receive_buffer._extract(len(self._receive_buffer))
        elif self.their_state is h11.IDLE:
            self._check_head()
        elif self._awaits_chunk:
            self._check_chunk()
        event = super().next_event()
        if isinstance(event, h11.Request):
            if event.method.upper() != event.method:
                self._refuse("methods are case-sensitive", 501)
            self._is_chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
            self._awaits_chunk = self._is_chunked
        elif isinstance(event, h11.Data):
            self._awaits_chunk = self._is_chunked and event.chunk_end
        elif isinstance(event, h11.EndOfMessage):
            self._awaits_chunk = False
        return event

    def _check_head(self) -> None:
        received = self._receive_buffer._data
        if received.startswith(b"\r\n"):
            self._receive_buffer._extract(2)  # an empty line before a request is to be overlooked (RFC 9112, 2.2)
        end = _HEAD_END.search(received)
        if _FOLD_OR_LIST.search(received, 0, end.start() + 1 if end else len(received)):
            self._refuse("a folded header, or a list of lengths")

    def _check_chunk(self) -> None:
        head = _CHUNK_HEAD.match(self._receive_buffer._data)
        if head is None:
            return
        self._awaits_chunk = False  # h11 reads it now, and says so only once some of the chunk has come
        if len(head[1]) > MAX_CHUNK_DIGITS or b"\r" in head[2]:
            self._refuse("a chunk longer than any body, or with a line break in its extension")

    def _refuse(self, why: str, status: int = 400) -> None:
        self._process_error(self.their_role)  # as h11 does before it raises
        raise h11.RemoteProtocolError(why, error_status_hint=status)
