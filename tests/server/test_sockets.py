import resource
import socket
from collections.abc import Generator

import pytest

from aserve.core.errors import ConfigError
from aserve.server.sockets import MAX_CONNECTIONS, SEND_BUFFER_BYTES, connection_limit, listen, listen_unix, url_of


@pytest.fixture
def files() -> Generator[tuple[int, int]]:
    """The limits of open files, put back after the test."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_port_0_is_a_free_port():
    with listen("127.0.0.1", 0, 1) as one, listen("127.0.0.1", 0, 1) as other:
        assert url_of(one) != url_of(other)


def test_an_ipv6_address_is_bracketed():
    with listen("::1", 0, 1) as sock:
        assert url_of(sock).startswith("http://[::1]:")


@pytest.mark.parametrize(
    ("host", "reason"), [("203.0.113.1", "cannot assign"), ("no host", "cannot listen on no host:1")]
)
def test_an_address_that_cannot_be_had_is_one_line(host: str, reason: str):
    with pytest.raises(ConfigError, match=reason) as caught:
        listen(host, 1, 1)
    assert "\n" not in caught.value.message


def test_a_path_that_nobody_listens_on_is_taken_over(tmp_path):
    path = str(tmp_path / "socket")
    listen_unix(path, 1).close()
    with listen_unix(path, 1) as sock:
        assert url_of(sock) == f"unix:{path}"
        with pytest.raises(ConfigError, match="in use"):
            listen_unix(path, 1)


def test_a_file_is_not_taken_over(tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="in use"):
        listen_unix(str(path), 1)
    assert path.read_text() == "precious"


def test_connections_inherit_what_streaming_needs():
    with listen("127.0.0.1", 0, 1) as sock, socket.create_connection(sock.getsockname()):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES


def test_connections_leave_files_for_everything_else(files: tuple[int, int]):
    _, hard = files
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    limit = connection_limit()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft > 256 or hard == 256
    assert 1 <= limit <= min(MAX_CONNECTIONS, soft - 64)
