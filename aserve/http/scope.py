"""What a request's ASGI scope says, for the layers around the routes."""

from typing import Final

from starlette.types import Scope

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE", "QUERY"})
"""Those that HTTP knows. Another is a 501; one of these that a path does not take is a 405."""


def route_path(scope: Scope) -> str:
    """The path below where the application is mounted, percent-decoded, exactly as a router would see it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path
