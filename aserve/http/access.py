"""The access log: a line for each request when it is over. Plain ASGI, beneath RequestIds and around the guard.

    RequestIds( AccessLog( guard( routes ) ) )        the innards note what only they know in the request's Record

A line says who asked for what, how it ended and what it took, and nothing of what was said. Every word in it is from a
closed set (methods, the application's own paths, error codes) or a number, but for the request's id, which is the
client's or random, and the tenant, whom the operator named: no client can forge a line, or have a secret written down.

What is whole and well is INFO, what failed WARNING, with the error's code and the id under which the log has the rest;
health probes and scrapes, which come all the time, are DEBUG, and so are the files that a page consists of.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve.core.errors import AserveError
from aserve.core.faults import report
from aserve.edges import aside, is_fault
from aserve.http.request_id import SCOPE_KEY
from aserve.http.scope import METHODS, route_path

RECORD_KEY: Final = "aserve.record"
TENANT_KEY: Final = "aserve.tenant"
CLIENT_LEFT: Final = 499
"""nginx's status of a request whose client left before it was answered."""
UNKNOWN: Final = "-"

_log = logging.getLogger(__name__)
_lines = logging.getLogger("aserve.access")


class Record:
    """One request, as those who work on it tell of it.

    usage: gives its token counts so far, as the API tells them. error: the one it ended with. was_aborted: somebody
    ended its answer by its id. path: of its route, known when it is over. began_s: when it came, on `clock`.
    """

    __slots__ = ("_clock", "began_s", "error", "first_byte_s", "is_whole", "path", "status", "usage", "was_aborted")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.began_s = clock()
        self.status: int | None = None
        self.first_byte_s: float | None = None
        self.is_whole = False
        self.usage: Callable[[], Mapping[str, Any]] | None = None
        self.error: AserveError | None = None
        self.was_aborted = False
        self.path = UNKNOWN

    def age_s(self) -> float:
        """How long ago it came, in seconds."""
        return self._clock() - self.began_s


def record_of(scope: Scope) -> Record:
    """A request's record; one that nobody reads where no access log is kept."""
    record = scope.get(RECORD_KEY)
    return record if isinstance(record, Record) else Record()


class AccessLog:
    """Writes the lines. What comes through it as nobody foresaw goes on as an `InternalError`, which the line names.

    paths: of the application's routes, as Starlette spells them. quiet_paths: those of them whose lines are DEBUG.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Iterable[str],
        quiet_paths: Iterable[str],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        all_paths = list(paths)
        self._paths = frozenset(path for path in all_paths if "{" not in path)
        self._patterns = {path: compile_path(path)[0] for path in all_paths if "{" in path}
        self._quiet_paths = frozenset(quiet_paths)
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and watch."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[RECORD_KEY] = Record(self._clock)

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                record.first_byte_s = round(record.age_s(), 6)
            elif not message.get("more_body", False):
                record.is_whole = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except BaseException as error:
            if isinstance(error, OSError) or not is_fault(error):  # ASGI 2.4 says by an OSError that the client left
                raise
            record.error = report(_log, "answering", error, scope.get(SCOPE_KEY))
            raise record.error from error
        finally:
            aside(_log, "writing the access line", scope.get(SCOPE_KEY), self._write, scope, record)

    def _write(self, scope: Scope, record: Record) -> None:
        total_s = round(record.age_s(), 6)
        path = record.path = self._known_path(scope)
        status = record.status or (CLIENT_LEFT if record.error is None else 500)
        if path in self._quiet_paths and status in (200, 304, 503):
            level = logging.DEBUG
        else:
            level = logging.WARNING if status >= 500 or (status < 400 and record.error is not None) else logging.INFO
        if not _lines.isEnabledFor(level):  # before anything is counted
            return
        usage = {} if record.usage is None else record.usage()
        log_access(
            level,
            method=scope["method"] if scope["method"] in METHODS else UNKNOWN,
            path=path,
            status=status,
            cut=True if record.status is not None and not record.is_whole else None,
            error=None if record.error is None else record.error.code,
            fault=getattr(record.error, "fault_id", None),
            first_byte_s=record.first_byte_s,
            total_s=total_s,
            prompt_tokens=usage.get("prompt_tokens"),
            generated_tokens=usage.get("completion_tokens"),
            tenant=scope.get(TENANT_KEY),
            request_id=scope.get(SCOPE_KEY),
        )

    def _known_path(self, scope: Scope) -> str:
        """The route that a path means: what else a client calls may be a secret in the wrong place."""
        path = route_path(scope)
        if path in self._paths:
            return path
        return next((known for known, pattern in self._patterns.items() if pattern.match(path)), UNKNOWN)


def log_access(level: int, **fields: Any) -> None:
    """Write a line of what is known, which is what is not None; a formatter finds the same in the record's `fields`."""
    if not _lines.isEnabledFor(level):
        return
    known = {name: value for name, value in fields.items() if value is not None}
    nowhere = "", 0  # to look for the caller takes as long as all else
    record = logging.getLogRecordFactory()(_lines.name, level, *nowhere, _Line(known), (), None)
    record.fields = known
    _lines.handle(record)


class _Line:
    """`POST /v1/completions 200 first_byte_s=0.021 total_s=0.214 prompt_tokens=5 generated_tokens=17 request_id=...`"""

    __slots__ = ("_fields",)

    BEGIN: Final = "method", "path", "status"

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        begin = [str(self._fields.get(name, UNKNOWN)) for name in self.BEGIN]
        rest = [f"{name}={value}" for name, value in self._fields.items() if name not in self.BEGIN]
        return " ".join([*begin, *rest])
