"""What travels between the ingress and a replica: a whole request one way, and the pieces of its answer the other.

    Carried --> replica --> Head, bytes, bytes, ..., Tail

All are values that any serializer takes. The ingress has read the request's body under the guard's limits, so that it
can be sent again to another replica. Bytes are the answer's body as it comes, whole events of a stream at a time.
"""

from typing import Any, Final

import msgspec
from starlette.types import Scope

from aserve.http.idempotency import HEADER
from aserve.http.request_id import SCOPE_KEY

Headers = tuple[tuple[bytes, bytes], ...]
_KEPT_HERE: Final = frozenset({HEADER})
"""Headers that the ingress has seen to."""


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """One request. path, raw_path, root_path, query_string, headers: as ASGI has them. request_id: its name."""

    method: str
    path: str
    raw_path: bytes = b""
    root_path: str = ""
    query_string: bytes = b""
    headers: Headers = ()
    http_version: str = "1.1"
    scheme: str = "http"
    client: tuple[str, int] | None = None
    body: bytes = b""
    request_id: str = ""

    def scope(self, state: dict[str, Any]) -> Scope:
        """ASGI's, for an application in another process. state: what that process offers."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": self.http_version,
            "method": self.method,
            "scheme": self.scheme,
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query_string,
            "root_path": self.root_path,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            "state": state,
        }


class Head(msgspec.Struct, frozen=True):
    """How an answer begins. replica: who gives it."""

    status: int
    headers: Headers
    replica: str


class Tail(msgspec.Struct, frozen=True):
    """How it ends. error: the code of what went wrong after it had begun; the stream itself tells the client."""

    error: str | None = None


class Whole(msgspec.Struct, frozen=True):
    """An answer that was waited for."""

    status: int
    headers: Headers
    replica: str
    body: bytes


Item = Head | bytes | Tail


def carried_of(scope: Scope, body: bytes) -> Carried:
    """The request of a scope, as it goes on."""
    client = scope.get("client")
    return Carried(
        method=scope["method"],
        path=scope["path"],
        raw_path=scope.get("raw_path") or scope["path"].encode(),
        root_path=scope.get("root_path", ""),
        query_string=scope.get("query_string", b""),
        headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"] if name not in _KEPT_HERE),
        http_version=scope.get("http_version", "1.1"),
        scheme=scope.get("scheme", "http"),
        client=None if client is None else (str(client[0]), int(client[1])),
        body=body,
        request_id=scope.get(SCOPE_KEY, ""),
    )
