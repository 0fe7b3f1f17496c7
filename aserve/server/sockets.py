"""Listening sockets, and how many connections the process can hold. Knows nothing of HTTP."""

import errno
import os
import socket
import ssl
import stat
from typing import Final

from aserve.core.errors import ConfigError

SEND_BUFFER_BYTES: Final = 64 * 1024
"""What the kernel buffers for a connection (it doubles the number). Less of it shows sooner that a reader stalls."""
MAX_CONNECTIONS: Final = 10_000
_SPARE_FILES: Final = 64
"""Descriptors kept for everything that is not a connection: weights, threads' pipes, logs."""


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Names resolve to IPv4. Raises `ConfigError` if it cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise ConfigError(f"cannot listen on {_address(host, port)}: {_reason(error)}") from None
    # What is set here is inherited by every connection.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token goes out when it is there
    return sock


def listen_unix(path: str, backlog: int) -> socket.socket:
    """A listening socket in the file system, in the place of one that nobody listens on. Raises `ConfigError`."""
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError(f"cannot listen on {path}: this system has no Unix sockets in Python")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(path)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {_reason(error)}") from None
    return sock


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """What a server's connections are encrypted by; None without a certificate. Both files are PEM.

    Raises `ConfigError` where they cannot be read, or do not belong together.
    """
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile is given, and --ssl-certfile, which it belongs to, is not")
        return None
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if path is not None and not os.path.isfile(path):
            raise ConfigError(f"{flag}: {path} is no file")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"--ssl-certfile {certfile}, --ssl-keyfile {keyfile or certfile}: {reason}") from None
    return context


def _no_password() -> str:
    """For a key that is encrypted: OpenSSL would ask whoever sits at the terminal."""
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


def url_of(sock: socket.socket, *, is_secure: bool = False) -> str:
    """Where a listening socket is reached."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{'https' if is_secure else 'http'}://{_address(host, port)}"


def connection_limit() -> int:
    """How many connections fit in this process's limit of open files, after raising it as far as is allowed."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _SPARE_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - max(_SPARE_FILES, soft // 5)))


def _remove_stale(path: str) -> None:
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the address is in use (is another server running there?)"
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
