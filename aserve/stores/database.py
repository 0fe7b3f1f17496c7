"""Database: an SQLite file, or memory, and the one thread in which all is done with it, in order.

What `run` has returned for is there, at whatever moment the process is killed afterwards. (A file is written in
SQLite's WAL mode, which a power failure may cost its last moments, and never its integrity.)
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from aserve.core.defaults import IN_MEMORY
from aserve.core.errors import ConfigError, StoreError, UnavailableError
from aserve.core.faults import for_a_future

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Database:
    """Raises `ConfigError`, naming the option, for a file that cannot be opened, is in use, or is of another kind.

    schema: makes its tables. version: of these tables, which no other kind of file has. additions: makes those that
    came later, where they are not there; a program that does not know them can use the file all the same.
    """

    def __init__(self, path: str | Path, *, option: str, schema: str, version: int, additions: str = "") -> None:
        self._path, self._schema, self._version, self._additions = path, schema, version, additions
        self._option = option
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"aserve{option[1:]}")
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False
        if path != IN_MEMORY:  # that of memory is made when it is first needed
            try:
                self._thread.submit(self._opened).result()
            except (sqlite3.Error, OSError, ConfigError) as error:
                self._thread.shutdown()
                raise ConfigError(f"{option}: cannot use {path}: {error}") from None

    async def run(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Call it in the thread. What was asked for is done, whether the caller waits for it or is cancelled.

        Raises `StoreError` where SQLite cannot write or read the file; the log says why too.
        """
        if self._is_closed:
            raise UnavailableError("the store is closed")
        work = self._thread.submit(for_a_future, lambda: self._done(function, *arguments, **options))
        return await asyncio.shield(asyncio.wrap_future(work))

    def close(self, last: str = "") -> None:
        """Do what was asked for before, and then the `last` statement, and take no more. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if self._connection is not None:
                if last:
                    self._thread.submit(self._connection.execute, last)
                self._thread.submit(self._connection.close)
            self._thread.shutdown()

    def _done(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """In the thread."""
        try:
            return function(self._opened(), *arguments, **options)
        except sqlite3.DatabaseError as error:
            if type(error) not in (sqlite3.OperationalError, sqlite3.DatabaseError):  # others are of a wrong statement
                raise
            _log.error("%s: %s fails: %s", self._option, self._path, error)
            raise StoreError(f"the server's {self._option[2:]} cannot be used: {error}") from error

    def _opened(self) -> sqlite3.Connection:
        """In the thread."""
        if self._connection is None:
            if self._path != IN_MEMORY:
                Path(self._path).touch(mode=0o600)  # it will hold what users said
            connection = sqlite3.connect(self._path, isolation_level=None, timeout=1.0)
            try:
                for setting in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL"):
                    connection.execute(f"PRAGMA {setting}")
                with transaction(connection):
                    self._make_tables(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        """Where there are none yet. Raises `ConfigError` for a file of another kind or version."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if version == 0 and num_tables == 0:
            for statement in self._schema.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={self._version}")
        elif version != self._version:
            raise ConfigError(f"it is a database of another kind or version ({version}, not {self._version})")
        for statement in filter(None, self._additions.split(";")):
            connection.execute(statement)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is written in it is kept, or nothing, where something raises."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
