import asyncio
import os
import socket

import pytest

from aserve.server.listener import Listener

TIMEOUT_S = 10.0


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)
        self.transport.close()


def connected(listener: Listener, path: str | None) -> socket.socket:
    """A client whose connection the kernel has taken, and the event loop has had no time for."""
    if path is not None:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(TIMEOUT_S)
        if reason := client.connect_ex(path):
            client.close()
            raise OSError(reason, os.strerror(reason))
        return client
    port = int(listener.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)


@pytest.mark.parametrize("on_path", [False, True])
async def test_who_has_connected_before_it_shuts_is_served(tmp_path, on_path: bool):
    path = str(tmp_path / "socket") if on_path else None
    listener = await Listener.open("127.0.0.1", 0, path, Echo)
    clients = [connected(listener, path) for _ in range(3)]
    await listener.shut()
    for client in clients:
        with client:
            client.sendall(b"hello")
            assert await asyncio.to_thread(client.recv, 10) == b"hello"
    with pytest.raises(OSError, match=r"refused|No such file"):
        connected(listener, path)
    listener.close()


async def test_a_path_is_removed_and_closing_twice_is_closing_once(tmp_path):
    path = tmp_path / "socket"
    listener = await Listener.open("127.0.0.1", 0, str(path), Echo)
    assert listener.url == f"unix:{path}"
    assert path.exists()
    await listener.shut()
    listener.close()
    await listener.shut()
    listener.close()
    assert not path.exists()


async def test_a_path_that_another_server_has_taken_meanwhile_is_left_to_it(tmp_path):
    path = str(tmp_path / "socket")
    draining = await Listener.open("127.0.0.1", 0, path, Echo)
    await draining.shut()
    successor = await Listener.open("127.0.0.1", 0, path, Echo)
    draining.close()
    connected(successor, path).close()
    os.unlink(path)  # by an operator
    third = await Listener.open("127.0.0.1", 0, path, Echo)
    await successor.shut()
    successor.close()
    connected(third, path).close()
    third.close()
    assert not (tmp_path / "socket").exists()
