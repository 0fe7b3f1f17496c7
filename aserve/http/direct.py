"""DirectLine: from whoever has a piece of a response to its connection, without waiting and without a task's turn.

ASGI's `send` is a coroutine through every layer between an application and its server, and costs more than all else
that is done for a token. A server that can offers besides it to write at once. It puts a line where `direct_line` finds
it; the application says with which piece of the body it would begin to use it, and sends that as ever:

    application --- request(piece) ---> line <--- connect(...) --- server, if that very piece arrives
                --- send(piece) ---> layers ---> server

A layer that rewrites bodies (compression, say) makes another piece of it. Then the line stays dead, and everything goes
through `send`, as it does with any other server. Knows neither events nor HTTP's framing.
"""

from collections.abc import Callable
from typing import Final

from starlette.types import Scope

STATE_KEY: Final = "aserve.direct_line"
"""Where a line is, in the scope's "state"."""


class DirectLine:
    """A connection's, for the response under way.

    is_clear: whether `write` would write: the line is connected, the client is there and keeps up.
    write: writes a piece of the body, not b"", or returns False. To be called while no `send` waits.
    """

    __slots__ = ("_first", "is_clear", "write")

    def __init__(self) -> None:
        self._first: bytes | None = None
        self.is_clear: Callable[[], bool] = _never
        self.write: Callable[[bytes], bool] = _dead

    def request(self, first: bytes) -> None:
        """Ask for the line from when `first`, the next piece to be sent, has arrived."""
        self._first = first

    def is_requested_by(self, piece: bytes) -> bool:
        """Whether a piece that arrived is the one that was announced, and not one of equal or other content."""
        return piece is self._first

    def connect(self, is_clear: Callable[[], bool], write: Callable[[bytes], bool]) -> None:
        """Open the line, until `disconnect`."""
        self._first = None
        self.is_clear = is_clear
        self.write = write

    def disconnect(self) -> None:
        """The response is over, or another begins."""
        self._first = None
        self.is_clear = _never
        self.write = _dead


def direct_line(scope: Scope) -> DirectLine | None:
    """The line that the server offers for this request, if it does."""
    line = scope.get("state", {}).get(STATE_KEY)
    return line if isinstance(line, DirectLine) else None


def _never() -> bool:
    return False


def _dead(_piece: bytes) -> bool:
    return False
