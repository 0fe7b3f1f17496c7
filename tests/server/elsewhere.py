"""`python elsewhere.py SYSTEM [words of aserve]`: aserve on Linux, without what macOS or Windows do not have.

What is taken away: modules that cannot be imported there, functions and names that Python has on some systems only, and
/proc. It stands in for those systems as far as aserve asks for what they lack; it is none of them.
"""

import asyncio
import io
import os
import select
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

ABSENT = {"macos": {"triton"}, "windows": {"triton", "uvloop", "resource", "fcntl", "termios", "readline"}}
NAMES: dict[str, list[tuple[Any, str]]] = {
    "macos": [(select, "epoll"), (os, "sched_getaffinity")],
    "windows": [
        *((select, name) for name in ("epoll", "poll")),
        *((os, name) for name in ("sysconf", "sched_getaffinity", "getuid", "geteuid", "fork", "fchmod")),
        *((signal, name) for name in ("SIGHUP", "SIGUSR1", "SIGKILL", "pthread_sigmask")),
        *((socket, name) for name in ("AF_UNIX", "SO_REUSEPORT")),
    ],
}


class Absent(MetaPathFinder):
    """Finds nothing of some names, whoever would have found them."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def without_proc() -> None:
    """Files below /proc are not there."""
    opened = io.open

    def open_elsewhere(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike) and os.fspath(file).startswith("/proc/"):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(file))
        return opened(file, *args, **kwargs)

    io.open = open_elsewhere


def become(system: str) -> None:
    """Take away what `system` does not have."""
    for name in ABSENT[system]:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Absent(ABSENT[system]))
    if system == "windows":
        unsupported = asyncio.AbstractEventLoop.add_signal_handler
        asyncio.SelectorEventLoop.add_signal_handler = unsupported
        asyncio.SelectorEventLoop.remove_signal_handler = asyncio.AbstractEventLoop.remove_signal_handler
        socket.socketpair = partial(socket.socketpair, socket.AF_UNIX)  # Windows makes them by TCP; the loop has one
    selectors.DefaultSelector = selectors.SelectSelector if system == "windows" else selectors.PollSelector
    for module, name in NAMES[system]:
        if hasattr(module, name):
            delattr(module, name)
    without_proc()


if __name__ == "__main__":
    become(sys.argv[1])
    from aserve.cli import main

    sys.exit(main(sys.argv[2:]))
