"""Dialects: how an API that is not OpenAI's tells errors and names requests, on its own paths.

The outermost layer notes a request's dialect in its scope, so that whoever refuses it, the guard too, is understood.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

from aserve.core.errors import AserveError
from aserve.http.scope import route_path

DIALECT_KEY: Final = "aserve.dialect"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Of all paths from `root` down. status, body: of an error that ends the request of an id, where it has one.

    id_header: the one that tells the id, besides X-Request-Id.
    """

    root: str
    status: Callable[[AserveError], int]
    body: Callable[[AserveError, str | None], bytes]
    id_header: bytes


def dialect_at(path: str, dialects: Iterable[Dialect]) -> Dialect | None:
    """The one that is spoken at a path; None is OpenAI's."""
    return next((each for each in dialects if path == each.root or path.startswith(f"{each.root}/")), None)


def note_dialect(scope: Scope, dialects: Iterable[Dialect]) -> None:
    """Tell those who answer a request which it is."""
    if (dialect := dialect_at(route_path(scope), dialects)) is not None:
        scope[DIALECT_KEY] = dialect


def dialect_of(scope: Scope) -> Dialect | None:
    """What was noted."""
    dialect: Dialect | None = scope.get(DIALECT_KEY)
    return dialect


def id_headers(dialect: Dialect | None) -> tuple[bytes, ...]:
    """Those that tell an answer's request id."""
    return (b"x-request-id",) if dialect is None else (b"x-request-id", dialect.id_header)
