"""The HTTP server around an application and its engine: sockets, connections, signals, the end of the process.

run            for a process that is about serving: signals, exit code
Server         the same without signals, for a running event loop
connection     one client: Hypercorn's HTTP/1.1 within limits of our own
logging_to     where a process of its own writes its log
"""

from aserve.server.connections import Limits
from aserve.server.lifecycle import Server, ServerConfig, run
from aserve.server.logs import logging_to

__all__ = ["Limits", "Server", "ServerConfig", "logging_to", "run"]
