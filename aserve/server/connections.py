"""Connections: the open ones of a server, which of them are idle, and how all of them end."""

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.worker_context import WorkerContext
from starlette.types import ASGIApp

from aserve.http.doorman import Doorman
from aserve.server.door import Doors
from aserve.server.http1 import hypercorn_config

CROWDED: Final = 0.75
"""The share of the connections that there may be from which on they are many."""
FIRST_BYTES_S: Final = 0.2
"""What a drain leaves a client who has just connected, and whose request is on its way, for its first bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a connection may take over each thing, in seconds, and how many there may be.

    head_timeout_s: to send a request's head, from its first byte.
    keep_alive_s: to begin the first or the next request. Longer than the idle timeout of the usual proxies in front
    (60 s). While connections are many, `head_timeout_s` if that is shorter.
    send_timeout_s: to take enough of what is written to it.
    linger_s: to go away after the server has ended the connection.
    leave_s: for the application to end once the client has left; it is cancelled then.
    """

    head_timeout_s: float = 5.0
    keep_alive_s: float = 75.0
    send_timeout_s: float = 30.0
    linger_s: float = 2.0
    leave_s: float = 10.0
    max_connections: int = 1000


class Member(Protocol):
    """A connection, as it is known here. is_silent: nothing has been read from it yet."""

    is_silent: bool

    def close(self) -> None:
        """End as soon as what was written has been taken."""
        ...

    def abort(self, *, cancel: bool = False) -> None:
        """End now; with `cancel`, do not wait for the application either."""
        ...


class Connections:
    """The open connections of a server.

    app: called for each request. tasks: owns what the connections run. doorman: may refuse requests before that.
    """

    def __init__(self, app: ASGIApp, limits: Limits, tasks: asyncio.TaskGroup, doorman: Doorman | None = None) -> None:
        self.app = ASGIWrapper(app)
        self.limits = limits
        self.tasks = tasks
        self.config = hypercorn_config()
        self.doors = Doors(doorman, self.config)
        self.context = WorkerContext(max_requests=None)
        self._open: set[Member] = set()
        self._idle: dict[Member, None] = {}  # in the order in which they became idle
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_busy(self) -> int:
        """Connections with a request that has not been answered to its end."""
        return len(self._open) - len(self._idle)

    @property
    def idle_timeout_s(self) -> float:
        """How long a connection may be idle: less where others may need its place."""
        limits = self.limits
        is_crowded = len(self._open) > CROWDED * limits.max_connections
        return min(limits.head_timeout_s, limits.keep_alive_s) if is_crowded else limits.keep_alive_s

    def admit(self, connection: Member) -> bool:
        """Take a new connection in, ending the one that has been idle longest if there are too many."""
        if len(self._open) >= self.limits.max_connections:
            if not self._idle:
                return False
            next(iter(self._idle)).close()
        self._open.add(connection)
        return True

    def mark(self, connection: Member, *, idle: bool) -> None:
        """Note that a connection waits for its next request, or no longer does."""
        self._idle.pop(connection, None)
        if idle and connection in self._open:
            self._idle[connection] = None
        self._changed.set()

    def touch(self, connection: Member) -> None:
        """Note that a connection was not idle until now, if it is."""
        if connection in self._idle:
            del self._idle[connection]
            self._idle[connection] = None

    def forget(self, connection: Member) -> None:
        """Note that a connection is gone, and all that it ran has ended."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._changed.set()

    async def announce_end(self) -> None:
        """From now on whoever asks whether the server is ready hears that it is not."""
        await self.context.terminate.set()

    async def drain(self) -> None:
        """From now on end each connection after its answer. Returns when no request is open."""
        await self.context.terminated.set()
        self.doors.look()
        if any(connection.is_silent for connection in self._idle):
            await asyncio.sleep(FIRST_BYTES_S)
        while self.num_busy > 0:
            await self._change()

    async def close(self) -> None:
        """End all connections as soon as what was written to them has been taken. Returns when all are gone."""
        for connection in list(self._open):
            connection.close()
        while self._open:
            await self._change()

    def abort(self) -> None:
        """End all connections at once, and cancel what they run."""
        for connection in list(self._open):
            connection.abort(cancel=True)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
