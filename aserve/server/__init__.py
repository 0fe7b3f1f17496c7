"""The HTTP server around an application and its engine: sockets, connections, signals, the end of the process.

run            for a process that is about serving: signals, exit code
Server         the same without signals, for a running event loop
connection     one client: Hypercorn's HTTP/1.1 within limits of our own
logging_to     where a process of its own writes its log

Each name is imported when it is first used: whoever wants to know whether a port is free needs no HTTP.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aserve.server.connections import Limits
    from aserve.server.lifecycle import Server, ServerConfig, run
    from aserve.server.logs import logging_to

__all__ = ["Limits", "Server", "ServerConfig", "logging_to", "run"]

_HOMES = {"Limits": "connections", "logging_to": "logs"} | dict.fromkeys(("Server", "ServerConfig", "run"), "lifecycle")


def __getattr__(name: str) -> Any:
    """Import a name from its module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'aserve.server' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"aserve.server.{_HOMES[name]}"), name)
