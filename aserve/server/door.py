"""Door: where a connection's requests are refused before they are parsed, in front of the HTTP/1.1 protocol.

    inbox -> answer() -> None    not plain, or not refused: all of it is the protocol's
                      -> b""     will be refused when the rest of its body is here: hold it
                      -> bytes   refused: the whole answer; the connection goes on, and the inbox is empty

Knows what is plain (plain.py) and how an answer is framed. Whether there is room is the doorman's to say.
"""

import logging
from typing import Final

from hypercorn.config import Config

from aserve.core.faults import log_fault
from aserve.edges import is_fault
from aserve.http.doorman import Doorman, Objection, Refusal
from aserve.server.plain import PlainRequest, plain_request

_log = logging.getLogger(__name__)

HOLD_S: Final = 1.0
"""How long the rest of a body is waited for. Then the application's patience begins, which ends with an answer."""
MAX_HELD_BYTES: Final = 64 * 1024
"""A longer request is the application's, which counts what all bodies together hold."""


class Door:
    """One connection's. config: what headers every answer has. Without a doorman it lets everybody in."""

    def __init__(self, doorman: Doorman | None, config: Config) -> None:
        self._doorman = doorman
        self._config = config
        self._held: tuple[PlainRequest, Objection] | None = None

    @property
    def is_holding(self) -> bool:
        """Whether a request is being held."""
        return self._held is not None

    def answer(self, received: bytearray) -> bytes | None:
        """What is said to a request of which so much has been received, see above."""
        if self._doorman is None:
            return None
        if self._held is not None and len(received) < self._held[0].num_bytes:
            return b""
        try:
            return self._answer(self._doorman, received)
        except BaseException as error:  # an edge: the long way is there for what this one cannot
            if not is_fault(error):
                raise
            log_fault(_log, "refusing", error)
            return None

    def _answer(self, doorman: Doorman, received: bytearray) -> bytes | None:
        request = plain_request(received)
        if request is None or not len(received) <= request.num_bytes <= MAX_HELD_BYTES:
            return None
        objection = doorman.objection(request.scope, request.num_body_bytes)
        if objection is None:
            return None
        if len(received) < request.num_bytes:
            self._held = request, objection
            return b""
        self._held = None
        return self._framed(doorman.refuse(request.scope, objection))

    def forget(self) -> None:
        """What was held is the protocol's from now on."""
        self._held = None

    def leave(self) -> None:
        """The client leaves: what is held will not be answered."""
        if self._held is not None and self._doorman is not None:
            request, objection = self._held
            self._held = None
            self._doorman.left(request.scope, objection)

    def _framed(self, refusal: Refusal) -> bytes:
        headers = [*refusal.headers, *self._config.response_headers("h11")]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return b"HTTP/1.1 %d \r\n%b\r\n%b" % (refusal.status, lines, refusal.body)
