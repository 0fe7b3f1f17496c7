"""Doors: where requests are refused before they are parsed, in front of each connection's HTTP/1.1 protocol.

    inbox -> takes(): it may be refused --- 32 ms, with others --> answer() -> bytes  refused; the connection goes on,
               |                                                                      and is read from in the lobby
               '-- no: the protocol's at once                               -> b""    not whole: hold it
                                                                            -> None   let it in

To look at five together costs little more than to look at one: what a step has thrown out of the processor's caches is
fetched once, and a thread that computes is interrupted once (lobby.py). And who asks again at once is slowed down.

Knows what is plain (plain.py) and how an answer is framed. Whether there is room is the doorman's to say.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import lru_cache
from math import inf
from typing import Final, TypeVar

from hypercorn.config import Config

from aserve.core.faults import log_fault
from aserve.edges import aside, is_fault
from aserve.http.doorman import Doorman, Objection, Refusal
from aserve.server.lobby import Guest, Lobby
from aserve.server.plain import PlainRequest, plain_request

T = TypeVar("T")
_log = logging.getLogger(__name__)

PLACE: Final = "refusing"
"""Where a fault was, in the log."""
READ_S: Final = 0.008
"""Between two times that the lobby is read from: so long waits whoever is to be let in, a probe of health, say."""
LOOK_EVERY: Final = 4
"""How many times it is read from until they who may be refused are looked at, all together."""
BUSY_S: Final = 0.1
"""For how long after a refusal that is so."""
HOLD_S: Final = 1.0
"""How long the rest of a body is waited for. Then the application's patience begins, which ends with an answer."""
MAX_HELD_BYTES: Final = 64 * 1024
"""A longer request is the application's, which counts what all bodies together hold."""


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


@lru_cache(maxsize=8)
def _stamp(config: Config, _second: int) -> bytes:
    """What every answer of that second has: the date."""
    return _lines(config.response_headers("h11"))


class Doors:
    """All connections' doors. config: what headers every answer has. Without a doorman they let everybody in."""

    def __init__(self, doorman: Doorman | None, config: Config) -> None:
        self.doorman = doorman
        self._config = config
        self._refused_s = -inf
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._num_ticks = -1  # the first one looks
        self.lobby = Lobby()

    def new(self, look: Callable[[], None]) -> "Door":
        """A connection's. look: to be called when it is time to ask for the answer to what stands before it."""
        return Door(self, look)

    def wait(self, look: Callable[[], None]) -> None:
        """Call it together with others."""
        self._waiting.append(look)
        self.look_later()

    def enter_lobby(self, descriptor: int, guest: Guest) -> None:
        """Read from a connection together with others, until nobody is refused any more."""
        self.lobby.enter(descriptor, guest)
        self.look_later()

    def look_later(self) -> None:
        """Call all that will wait in a while, and read in the lobby then."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(READ_S, self._tick)

    def are_busy(self) -> bool:
        """Whether somebody was refused just now, so that it is not worth it to look at one alone."""
        return time.monotonic() - self._refused_s < BUSY_S

    def framed(self, refusal: Refusal) -> bytes:
        """A refusal as HTTP/1.1."""
        self._refused_s = time.monotonic()
        stamp = _stamp(self._config, int(time.time()))
        return b"HTTP/1.1 %d \r\n%b%b\r\n%b" % (refusal.status, _lines(refusal.headers), stamp, refusal.body)

    def look(self) -> None:
        """Read in the lobby, and call all that wait. Where one of them fails, the others are called all the same."""
        self.lobby.read()
        waiting, self._waiting = self._waiting, []
        with ExitStack() as together:
            aside(_log, PLACE, None, self._bring_together, together)
            for look in waiting:
                aside(_log, PLACE, None, look)

    def _bring_together(self, together: ExitStack) -> None:
        if self.doorman is not None:
            together.enter_context(self.doorman.together())

    def _tick(self) -> None:
        self._timer = None
        self._num_ticks += 1
        try:
            if self._num_ticks % LOOK_EVERY:
                self.lobby.read()
            else:
                self.look()
        finally:  # whatever one connection raises: nobody else would read from the others
            if not self.are_busy():
                self.lobby.empty()
            if self.lobby or self._waiting:
                self.look_later()
            else:
                self._num_ticks = -1


class Door:
    """One connection's. Whatever goes wrong here is told in the log, and the request let in."""

    def __init__(self, doors: Doors, look: Callable[[], None]) -> None:
        self._doors = doors
        self._look = look
        self._held: tuple[PlainRequest, Objection] | None = None
        self.stands = False
        """Whether a request stands here."""

    @property
    def is_holding(self) -> bool:
        """Whether the rest of a request is waited for, which will then be refused."""
        return self._held is not None

    def takes(self, received: bytearray, *, begins: bool) -> bool:
        """Whether what has been received stands here now; then `look` will be called.

        begins: whether it is the beginning of a request, and all that the connection has to answer.
        """
        if self._doors.doorman is None or len(received) > MAX_HELD_BYTES:
            self.open()
        elif self._held is not None:
            if len(received) >= self._held[0].num_bytes:
                self._doors.wait(self._look)
        elif begins and not self.stands and received.startswith(b"POST "):
            self.stands = self._doors.are_busy() or _aside(self._found, received) is not None
            if self.stands:
                self._doors.wait(self._look)
        return self.stands

    def answer(self, received: bytearray) -> bytes | None:
        """What is said to the request that stands here, see above."""
        if self._held is not None and len(received) < self._held[0].num_bytes:
            return b""
        return _aside(self._answer, received)

    def open(self) -> None:
        """Nothing stands here any more."""
        self.stands = False
        self._held = None

    def leave(self, received: bytearray) -> None:
        """The client leaves, and what stands here will not be answered."""
        found = self._held or (_aside(self._found, received) if self.stands else None)
        self.open()
        if found is not None and self._doors.doorman is not None:
            aside(_log, PLACE, None, self._doors.doorman.left, found[0].scope, found[1])

    def _found(self, received: bytearray) -> tuple[PlainRequest, Objection] | None:
        """The plain request that has been received, whole or not, if it is to be refused."""
        request = plain_request(received)
        doorman = self._doors.doorman
        if doorman is None or request is None or not len(received) <= request.num_bytes <= MAX_HELD_BYTES:
            return None
        objection = doorman.objection(request.scope, request.num_body_bytes)
        return None if objection is None else (request, objection)

    def _answer(self, received: bytearray) -> bytes | None:
        found = self._found(received)
        if found is None or self._doors.doorman is None:
            return None
        request, objection = found
        if len(received) < request.num_bytes:
            self._held = found
            return b""
        framed = self._doors.framed(self._doors.doorman.refuse(request.scope, objection))
        self.open()
        return framed


def _aside(call: Callable[[bytearray], T | None], received: bytearray) -> T | None:
    """Look at what has been received; None where that fails: the long way is there for it."""
    try:
        return call(received)
    except BaseException as error:
        if not is_fault(error):
            raise
        log_fault(_log, PLACE, error)
        return None
