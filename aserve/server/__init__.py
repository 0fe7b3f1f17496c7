"""The HTTP server around an application and its engine: sockets, connections, signals, the end of the process.

run            for a process that is about serving: signals, exit code
Server         the same without signals, for a running event loop
connection     one client: Hypercorn's HTTP/1.1 within limits of our own
"""

from aserve.server.connection import Limits
from aserve.server.lifecycle import Server, ServerConfig, run

__all__ = ["Limits", "Server", "ServerConfig", "run"]
