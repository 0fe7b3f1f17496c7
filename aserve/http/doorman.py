"""The doorman: refuses a request for which there is no room before anything is made of it but its head.

    bytes --> server: plain? --- scope ---> Doorman: room? --- no ---> Refusal --> server: bytes
                    '- no                            '- yes, or not for me to say
                    '--------------------------------'--> HTTP/1.1, guard, routes

When far more is asked than can be done, most of a server's work is to say no, and whoever is being served pays for it.
The long way says the same, by the same rules and in the same order: head, key, size of the body, the tenant's limits,
room. What the doorman does not refuse goes that way, whole, as if it had not been looked at. A refusal is on the
tenant's account, in the access log and in the answer's headers as it would be there.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from starlette.types import Scope

from aserve.core.errors import OverloadedError, RateLimitError, RetryableError, UnavailableError
from aserve.engine import Engine
from aserve.http.access import CLIENT_LEFT, log_access
from aserve.http.app import DIALECTS, body_limit
from aserve.http.dialect import dialect_at, id_headers
from aserve.http.endpoint import limit_headers
from aserve.http.errors import ErrorResponse
from aserve.http.keys import Keyring, holder
from aserve.http.request_id import id_of

GENERATING_PATHS: Final = frozenset(
    {
        *(b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages"),
        *(b"/v1/embeddings", b"/pooling", b"/classify", b"/score", b"/v1/score"),
        *(b"/rerank", b"/v1/rerank", b"/v2/rerank"),
    }
)
"""What needs room in the engine, as it stands in a request's first line."""

_KINDS: Final[dict[str, type[RetryableError]]] = {kind.code: kind for kind in (OverloadedError, RateLimitError)}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer, without its framing. headers: as ASGI has them."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True, slots=True)
class Objection:
    """Whose request is not taken, and why."""

    tenant: str
    error: OverloadedError


class Doorman:
    """Of an application that `create_app` made of the same engine and keyring, served below no other path.

    max_body_bytes: as the application was told.
    """

    def __init__(self, engine: Engine, keyring: Keyring, max_body_bytes: int | None = None) -> None:
        self._engine = engine
        self._keyring = keyring
        self._is_together = False
        self._num_let_in = Counter[str]()
        self._refused: dict[str, OverloadedError] = {}
        self._max_body_bytes = body_limit(engine) if max_body_bytes is None else lambda: max_body_bytes

    def objection(self, scope: Scope, num_body_bytes: int) -> Objection | None:
        """Why a request is refused now. None: there is room for it, or it is not for the doorman to say.

        scope: ASGI's of a POST with which the guard's HeadCheck finds nothing wrong; method, paths and the headers that
        name who asks. Of the body, of so many bytes, none is needed.
        """
        if scope["raw_path"] not in GENERATING_PATHS or num_body_bytes > self._max_body_bytes():
            return None
        tenant = "" if self._keyring.is_open else holder(scope, self._keyring)
        if tenant is None:
            return None
        error = self._refused.get(tenant) or self._no_room(tenant)
        return None if error is None else Objection(tenant, error)

    @contextmanager
    def together(self) -> Iterator[None]:
        """While several are looked at, and nothing else happens: each that is let in takes a place from the others."""
        self._is_together = True
        try:
            yield
        finally:
            self._is_together = False
            self._num_let_in.clear()
            self._refused.clear()

    def _no_room(self, tenant: str) -> OverloadedError | None:
        try:
            self._engine.check_room(self._num_let_in[tenant], tenant=tenant)
        except OverloadedError as error:
            if self._is_together:
                self._refused[tenant] = error
            return error
        except UnavailableError:  # the engine has not begun, or has ended
            return None
        if self._is_together:
            self._num_let_in[tenant] += 1
        return None

    def refuse(self, scope: Scope, objection: Objection) -> Refusal:
        """The answer to a request that has come to its end."""
        start_s = time.perf_counter()
        tenants, tenant = self._engine.tenants, objection.tenant
        error: RetryableError = objection.error
        try:
            tenants.turned_away(tenant)
        except RateLimitError as limit:
            error = limit
        request_id = id_of(scope)
        dialect = dialect_at(scope["path"], DIALECTS)
        if dialect is None:
            plain = _refusal(error.code, error.message, error.retry_after_s)
        else:
            plain = _spelled(ErrorResponse(error, dialect, request_id))
        limits = limit_headers(tenants.allowances(tenant))
        headers = [
            *plain.headers,
            *[(name.encode(), value.encode()) for name, value in limits.items()],
            *[(name, request_id.encode()) for name in id_headers(dialect)],
        ]
        _log_line(scope, tenant, plain.status, request_id, round(time.perf_counter() - start_s, 6), error.code)
        return Refusal(plain.status, headers, plain.body)

    def left(self, scope: Scope, objection: Objection) -> None:
        """The client of a request that was to be refused has left before its end."""
        _log_line(scope, objection.tenant, CLIENT_LEFT, id_of(scope))


@lru_cache(maxsize=64)
def _refusal(code: str, message: str, retry_after_s: int) -> Refusal:
    """The answer to an error, as all who meet it get it: under a flood that is one and the same for long."""
    return _spelled(ErrorResponse(_KINDS[code](message, retry_after_s)))


def _spelled(response: ErrorResponse) -> Refusal:
    return Refusal(response.status_code, response.raw_headers, bytes(response.body))


def _log_line(
    scope: Scope, tenant: str, status: int, request_id: str, took_s: float | None = None, error: str | None = None
) -> None:
    log_access(
        logging.INFO,
        method=scope["method"],
        path=scope["path"],
        status=status,
        error=error,
        first_byte_s=took_s,
        total_s=took_s,
        tenant=tenant or None,
        request_id=request_id,
    )
