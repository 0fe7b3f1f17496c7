"""A client that costs next to nothing: raw sockets, one epoll, requests as prepared bytes, answers as found bytes.

For measuring a server that shares its machine with whoever asks. An answer needs a Content-Length. Linux only.
"""

import re
import select
import socket
import time
from collections.abc import Callable
from typing import Final

READ_BYTES: Final = 65536
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)
_CLOSE: Final = re.compile(rb"\r\nconnection: *close\r\n", re.IGNORECASE)

Told = Callable[[int, bytes, float], None]
"""Is told of an answer: its status (0 where the connection ended without one), head and body, and seconds it took."""


class Wire:
    """A connection that is kept alive, with one request at a time."""

    __slots__ = ("_received", "_sent_s", "_told", "socket")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._sent_s = 0.0
        self._told: Told | None = None

    def send(self, request: bytes, told: Told) -> None:
        """Ask. The request is short enough for the socket's buffer."""
        self._told = told
        self._sent_s = time.perf_counter()
        self.socket.sendall(request)

    def read(self) -> bool | None:
        """Take what has come. None: more will; else the answer was told of, and whether the connection stays."""
        try:
            data = self.socket.recv(READ_BYTES)
        except OSError:
            data = b""
        received = self._received = self._received + data
        if not data:
            self._tell(0, received)
            return False
        head_end = received.find(b"\r\n\r\n")
        if head_end < 0:
            return None
        head = received[: head_end + 2]
        length = _LENGTH.search(head)
        if length is None:
            self._tell(0, received)
            return False
        if len(received) < head_end + 4 + int(length[1]):
            return None
        self._received = b""
        self._tell(int(received[9:12]), received)
        return _CLOSE.search(head) is None

    def _tell(self, status: int, answer: bytes) -> None:
        told, self._told = self._told, None
        if told is not None:
            told(status, answer, time.perf_counter() - self._sent_s)


class Wires:
    """As many connections to a port of this machine as there are requests at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._poll = select.epoll()
        self._all: dict[int, Wire] = {}
        self._idle: list[Wire] = []

    @property
    def num_busy(self) -> int:
        """Requests without an answer."""
        return len(self._all) - len(self._idle)

    def send(self, request: bytes, told: Told) -> None:
        """Ask on a connection that has nothing to do."""
        if self._idle:
            wire = self._idle.pop()
        else:
            wire = Wire(self._port)
            self._all[wire.socket.fileno()] = wire
            self._poll.register(wire.socket.fileno(), select.EPOLLIN)
        wire.send(request, told)

    def wait(self, timeout_s: float) -> None:
        """Tell of the answers that have come, after waiting for the first for at most so long."""
        for number, _ in self._poll.poll(max(0.0, timeout_s)):
            wire = self._all[number]
            stays = wire.read()
            if stays:
                self._idle.append(wire)
            elif stays is not None:
                self._forget(number, wire)

    def close(self) -> None:
        """End all connections."""
        for number, wire in tuple(self._all.items()):
            self._forget(number, wire)
        self._poll.close()

    def _forget(self, number: int, wire: Wire) -> None:
        del self._all[number]
        if wire in self._idle:
            self._idle.remove(wire)
        self._poll.unregister(number)
        wire.socket.close()
