"""The listening socket of a server: where clients connect, and how that ends without one of them being lost."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from aserve.server.sockets import listen, listen_unix, url_of

BACKLOG: Final = 2048
"""Connections that the kernel keeps for the server to accept."""

MakeProtocol = Callable[[], asyncio.Protocol]


class Listener:
    """Accepts connections on a socket, each with a protocol of its own, until it is closed.

    listener = await Listener.open("127.0.0.1", 8000, None, make_protocol)
    ...
    await listener.shut()
    """

    def __init__(
        self, sock: socket.socket, server: asyncio.Server, make_protocol: MakeProtocol, tls: Mapping[str, Any]
    ) -> None:
        self.url = url_of(sock, is_secure=bool(tls))
        self._tls = tls
        self._path = sock.getsockname() if self.url.startswith("unix:") else None
        self._inode = None if self._path is None else _inode_of(self._path)
        self._sock = sock
        self._server = server
        self._make_protocol = make_protocol

    @staticmethod
    async def open(
        host: str,
        port: int,
        path: str | None,
        make_protocol: MakeProtocol,
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = 5.0,
    ) -> "Listener":
        """Listen on a port, or on a path in the file system if one is given. Raises `ConfigError` if it cannot be.

        tls: what connections are encrypted by. One whose handshake takes longer is ended.
        """
        loop = asyncio.get_running_loop()
        secure: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": handshake_timeout_s}
        if path is None:
            sock = listen(host, port, BACKLOG)
            server = await loop.create_server(make_protocol, sock=sock, backlog=BACKLOG, **secure)
        else:
            sock = listen_unix(path, BACKLOG)
            server = await loop.create_unix_server(make_protocol, sock=sock, backlog=BACKLOG, **secure)
        return Listener(sock, server, make_protocol, secure)

    async def shut(self) -> None:
        """Take no more connections but those that have been made by now.

        To a client it is connected as soon as the kernel says so, and it sends its request. Connections that nobody
        has accepted by then would be reset when the socket is closed: they are accepted here. Returns when each has
        been encrypted, or given up, where that is asked for. A path is removed.
        """
        self._remove_path()
        made = self._not_yet_accepted()
        self._server.close()
        await asyncio.gather(*map(self._take, made))

    def close(self) -> None:
        """Take no more connections; may be called again. A path is removed."""
        self._remove_path()
        self._server.close()

    def _remove_path(self) -> None:
        """Once, and while the socket is open: afterwards what is there may be another server's, even by its inode."""
        path, self._path = self._path, None
        if path is not None and _inode_of(path) == self._inode:
            with suppress(OSError):  # whoever comes next takes its place
                os.unlink(path)

    async def _take(self, sock: socket.socket) -> None:
        with suppress(OSError):  # its client has left, or speaks no TLS, or is too slow
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(self._make_protocol, sock, **self._tls)

    def _not_yet_accepted(self) -> list[socket.socket]:
        made: list[socket.socket] = []
        with suppress(OSError):  # BlockingIOError: these were all; any other: there can be no more
            while self._server.is_serving():
                made.append(self._sock.accept()[0])
        return made


def _inode_of(path: str) -> tuple[int, int] | None:
    """What is there, by device and number; None for nothing."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
