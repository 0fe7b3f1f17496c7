"""A world with a server's connections and doors in front of its application, and an engine that has room for two.

Bytes come and go over transports that are no sockets. One client is served, another waits, and whoever asks meanwhile
is refused: at the door, or where that fails the long way, which says the same.
"""

import asyncio
import json
import os
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from aserve.http import Doorman, Keyring
from aserve.scheduler.scheduler import Scheduler
from aserve.server.connection import Connection
from aserve.server.connections import Connections, Limits
from tests.faults.world import TEXT, WHOSE, Answer, World, in_time

POST: Final = b"POST %b HTTP/1.1\r\nhost: aserve\r\ncontent-type: application/json\r\nx-request-id: %b\r\n"
TAKEN: Final = ("running", "waiting")
"""The second of them asks for a stream."""
REFUSED: Final = ("refused", "refused with it", "in parts", "twice")


class Wire(asyncio.Transport):
    """A connection's transport that keeps what is written."""

    def __init__(self) -> None:
        self._silent = os.eventfd(0, os.EFD_NONBLOCK)  # to be watched in the lobby, where it never has anything to say
        socket = SimpleNamespace(family=0, fileno=lambda: self._silent)
        super().__init__({"socket": socket, "peername": "", "sockname": ""})
        self.written = bytearray()
        self.answered = asyncio.Event()
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """To the client."""
        self.written += data
        if parsed(self.written) is not None:
            self.answered.set()

    def is_closing(self) -> bool:
        """Whether the server has had enough."""
        return self._is_closing

    def close(self) -> None:
        """The server has."""
        if not self._is_closing:
            os.close(self._silent)
        self._is_closing = True
        self.answered.set()

    abort = write_eof = close

    def get_write_buffer_size(self) -> int:
        """All is taken at once."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def pause_reading(self) -> None:
        """Clients say little."""

    resume_reading = pause_reading


def parsed(written: bytes | bytearray) -> Answer | None:
    """The answer that has been written; None while it is not whole."""
    head, is_over, body = bytes(written).partition(b"\r\n\r\n")
    if not is_over:
        return None
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if b"chunked" in lines.get(b"transfer-encoding", b""):
        pieces, rest = bytearray(), body
        while b"\r\n" in rest:
            size, _, rest = rest.partition(b"\r\n")
            if int(size, 16) == 0:
                return Answer(int(head.split()[1]), pieces, is_whole=True)
            pieces, rest = pieces + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        return None
    is_whole = len(body) >= int(lines.get(b"content-length", b"0"))
    return Answer(int(head.split()[1]), bytearray(body), is_whole=True) if is_whole else None


class DoorWorld(World):
    """Who is served and who waits are let go when everybody else has been answered."""

    right_statuses = (200, 0, 429)

    def __init__(self, *, failing_steps: tuple[int, ...] = ()) -> None:
        super().__init__(failing_steps=failing_steps)
        keyring = Keyring(tenants=self.engine.tenants)
        self.doorman = Doorman(self.engine, keyring)
        self._wires: list[Wire] = []
        self._tasks = asyncio.TaskGroup()
        self.connections = Connections(self.app, Limits(), self._tasks, self.doorman)
        doors = self.connections.doors
        wait = doors.wait  # in which they are looked at together, and each of them on its own account
        doors.wait = lambda look: wait(partial(copy_context().run, look))

    async def __aenter__(self) -> "DoorWorld":
        await super().__aenter__()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.connections.abort()
        for wire in self._wires:
            wire.close()
        await self._tasks.__aexit__(None, None, None)
        await super().__aexit__()

    def new_scheduler(self, **more: Any) -> Scheduler:
        """With room for one who runs and one who waits."""
        return super().new_scheduler(max_num_queued_reqs=1, **{**more, "max_num_seqs": 1})

    async def answers(self) -> dict[str, Answer]:
        """Of those who are taken, those who are refused, and one who leaves before the end of its body.

        Where a connection is lost, its client comes once more: else there would be room for those who are refused.
        """
        self.runner.hold()
        taken, again = [], []
        for num, name in enumerate(TAKEN):
            taken.append(asyncio.create_task(self._told(name)))
            await in_time([asyncio.create_task(self._until_taken(num + 1, taken[-1]))])
            if taken[-1].done():
                again.append(asyncio.create_task(self._told(name)))
                await in_time([asyncio.create_task(self._until_taken(num + 1, again[-1]))])
        refused = [asyncio.create_task(self._told(name)) for name in REFUSED]
        leaver = asyncio.create_task(self._come_and_leave("leaver"))
        await in_time([*refused, leaver])
        self.runner.let_land()
        await in_time([*taken, *again])
        names = (*TAKEN, *REFUSED, "leaver")
        return dict(zip(names, [task.result() for task in (*taken, *refused, leaver)], strict=True))

    async def _until_taken(self, num: int, asked: asyncio.Task[Answer]) -> None:
        """Until so many are in the engine, or the last of them has its answer, which is then an error."""
        while not asked.done():
            counts = self.engine.statistics()
            if counts.num_running + counts.num_waiting >= num and counts.num_running:
                return
            await asyncio.sleep(0)

    def _connect(self, name: str) -> tuple[Connection, Wire]:
        WHOSE.set(name)
        connection, wire = Connection(self.connections), Wire()
        self._wires.append(wire)
        _called(connection.connection_made, wire)
        return connection, wire

    async def _told(self, name: str) -> Answer:
        connection, wire = self._connect(name)
        request = _request(name)
        if name == "in parts":
            _called(connection.data_received, request[:-4])
            await asyncio.sleep(0.03)  # the door looks at what stands before it
            request = request[-4:]
        for _ in range(2 if name == "twice" else 1):
            if wire.is_closing():
                break
            wire.written.clear()
            wire.answered.clear()
            _called(connection.data_received, request)
            await wire.answered.wait()
        answer = parsed(wire.written) or Answer(body=wire.written)
        _called(connection.connection_lost, None)
        return answer

    async def _come_and_leave(self, name: str) -> Answer:
        connection, wire = self._connect(name)
        _called(connection.data_received, _request(name)[:-4])
        await asyncio.sleep(0.03)
        _called(connection.eof_received)
        _called(connection.connection_lost, None)
        await asyncio.sleep(0)
        return Answer(body=wire.written)


def _called(call: Callable[..., object], *arguments: object) -> None:
    """By the event loop, in no task, as what a socket brings."""
    asyncio.get_running_loop().call_soon(call, *arguments)


def _request(name: str) -> bytes:
    """Bytes of a request, by name."""
    asked = {"prompt": "ab", "max_tokens": 3, "temperature": 0, "stream": name in TAKEN[1:]}
    body = json.dumps(asked).encode()
    head = POST % (TEXT.encode(), name.replace(" ", "-").encode())
    return head + b"content-length: %d\r\n\r\n" % len(body) + body
