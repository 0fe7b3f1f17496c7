"""Responses that are kept for later requests of the same tenant: in memory, or in a file that outlives the process.

    put --> kept (in a file: committed) --> returns         get, delete --> of that tenant, and not too old

Both kinds are bounded: what is older than the limit of age is gone, and where the limit of bytes is passed the oldest
go; the newest stays in any case. What `put` has returned for is there, at whatever moment the process is killed
afterwards. (A file is written in SQLite's WAL mode, which a power failure may cost its last moments, and never its
integrity.)
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, Protocol, TypeVar

import msgspec

from aserve.core.errors import ConfigError, UnavailableError
from aserve.core.faults import for_a_future

MEMORY_BYTES: Final = 64 * 1024 * 1024
FILE_BYTES: Final = 1024 * 1024 * 1024
AGE_S: Final = 30 * 24 * 3600.0
"""The age that OpenAI's have."""
SCHEMA_VERSION: Final = 1
RECORD_BYTES: Final = 256
"""What a record takes besides its contents."""

Clock = Callable[[], float]
"""Seconds of a clock that goes on while no process runs."""
P = ParamSpec("P")
T = TypeVar("T")


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response. id: unique among all tenants. response, input: JSON, of the object and of the list it answers."""

    id: str
    tenant: str
    response: bytes
    input: bytes

    @property
    def num_bytes(self) -> int:
        """That count for the limit."""
        return RECORD_BYTES + len(self.response) + len(self.input)


class ResponseStore(Protocol):
    """Where responses are kept."""

    async def put(self, record: StoredResponse) -> None:
        """Keep it, as the newest, in place of one of the same id."""
        ...

    async def get(self, tenant: str, id: str) -> StoredResponse | None:
        """The tenant's response of that id; None where there is none, or no more."""
        ...

    async def delete(self, tenant: str, id: str) -> bool:
        """Forget it; whether it was there."""
        ...

    def close(self) -> None:
        """Do what was asked for before, and take no more. Idempotent."""
        ...


class MemoryStore:
    """Keeps responses as long as the process lives."""

    def __init__(self, *, max_bytes: int = MEMORY_BYTES, max_age_s: float = AGE_S, clock: Clock = time.time) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._records: dict[str, tuple[float, StoredResponse]] = {}  # by age, the oldest first
        self.num_bytes = 0

    async def put(self, record: StoredResponse) -> None:
        """See `ResponseStore`."""
        now = self._clock()
        if record.id in self._records:
            self._drop(record.id)
        self.num_bytes += record.num_bytes
        self._records[record.id] = now, record
        while len(self._records) > 1:
            oldest, (since_s, _) = next(iter(self._records.items()))
            if self.num_bytes <= self._max_bytes and since_s >= now - self._max_age_s:
                break
            self._drop(oldest)

    async def get(self, tenant: str, id: str) -> StoredResponse | None:
        """See `ResponseStore`."""
        since_s, record = self._records.get(id, (0.0, None))
        is_there = record is not None and record.tenant == tenant and since_s >= self._clock() - self._max_age_s
        return record if is_there else None

    async def delete(self, tenant: str, id: str) -> bool:
        """See `ResponseStore`."""
        if await self.get(tenant, id) is None:
            return False
        self._drop(id)
        return True

    def close(self) -> None:
        """There is nothing to close."""

    def _drop(self, id: str) -> None:
        self.num_bytes -= self._records.pop(id)[1].num_bytes


class SqliteStore:
    """Keeps responses in a file, which one process at a time has open. All is done in one thread, in order.

    Raises `ConfigError` for a file that cannot be opened, is in use, or is none of aserve's.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_bytes: int = FILE_BYTES,
        max_age_s: float = AGE_S,
        clock: Clock = time.time,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aserve-responses")
        self._num_bytes = 0
        self._is_closed = False
        try:
            self._connection = self._thread.submit(self._open, Path(path)).result()
        except (sqlite3.Error, OSError, ConfigError) as error:
            self._thread.shutdown()
            raise ConfigError(f"--response-store: cannot use {path}: {error}") from None

    async def put(self, record: StoredResponse) -> None:
        """See `ResponseStore`; it is committed when this returns."""
        await self._run(self._put, record)

    async def get(self, tenant: str, id: str) -> StoredResponse | None:
        """See `ResponseStore`."""
        return await self._run(self._get, tenant, id)

    async def delete(self, tenant: str, id: str) -> bool:
        """See `ResponseStore`."""
        return await self._run(self._delete, tenant, id)

    def close(self) -> None:
        """See `ResponseStore`."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._connection.close)
            self._thread.shutdown()

    async def _run(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call it in the thread. What was asked for is done, whether the caller waits for it or is cancelled."""
        if self._is_closed:
            raise UnavailableError("the store of responses is closed")
        work = self._thread.submit(for_a_future, partial(function, *arguments, **options))
        return await asyncio.shield(asyncio.wrap_future(work))

    # In the thread

    def _open(self, path: Path) -> sqlite3.Connection:
        path.touch(mode=0o600)  # it will hold what users said
        connection = sqlite3.connect(path, isolation_level=None, timeout=1.0)
        try:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                _make_table(connection)
            (self._num_bytes,) = connection.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM responses").fetchone()
        except BaseException:
            connection.close()
            raise
        return connection

    def _put(self, record: StoredResponse) -> None:
        now = self._clock()
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            earlier = connection.execute(
                "DELETE FROM responses WHERE id = ? RETURNING num_bytes", (record.id,)
            ).fetchall()
            num_bytes = self._num_bytes + record.num_bytes - sum(row_bytes for (row_bytes,) in earlier)
            connection.execute(
                "INSERT INTO responses (id, tenant, since_s, num_bytes, response, input) VALUES (?, ?, ?, ?, ?, ?)",
                (record.id, record.tenant, now, record.num_bytes, record.response, record.input),
            )
            num_bytes -= self._evict(record.id, now, num_bytes)
        self._num_bytes = num_bytes

    def _evict(self, newest: str, now: float, num_bytes: int) -> int:
        """Drop what is too old, and the oldest while there is too much; how many bytes went."""
        freed = 0
        oldest = "SELECT rowid, since_s, num_bytes FROM responses WHERE id != ? ORDER BY rowid LIMIT 1"
        while (row := self._connection.execute(oldest, (newest,)).fetchone()) is not None:
            rowid, since_s, row_bytes = row
            if since_s >= now - self._max_age_s and num_bytes - freed <= self._max_bytes:
                break
            self._connection.execute("DELETE FROM responses WHERE rowid = ?", (rowid,))
            freed += row_bytes
        return freed

    def _get(self, tenant: str, id: str) -> StoredResponse | None:
        found = self._connection.execute(
            "SELECT response, input FROM responses WHERE id = ? AND tenant = ? AND since_s >= ?",
            (id, tenant, self._clock() - self._max_age_s),
        ).fetchone()
        return None if found is None else StoredResponse(id=id, tenant=tenant, response=found[0], input=found[1])

    def _delete(self, tenant: str, id: str) -> bool:
        gone = self._connection.execute(
            "DELETE FROM responses WHERE id = ? AND tenant = ? RETURNING num_bytes, since_s", (id, tenant)
        ).fetchall()
        self._num_bytes -= sum(num_bytes for num_bytes, _ in gone)
        return any(since_s >= self._clock() - self._max_age_s for _, since_s in gone)


def _make_table(connection: sqlite3.Connection) -> None:
    """Where there is none yet. Raises `ConfigError` for a file of another kind or version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if version == 0 and num_tables == 0:
        connection.execute(
            "CREATE TABLE responses (rowid INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,"
            " since_s REAL NOT NULL, num_bytes INTEGER NOT NULL, response BLOB NOT NULL, input BLOB NOT NULL)"
        )
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    elif version != SCHEMA_VERSION:
        raise ConfigError(f"it is a database of another kind or version ({version}, not {SCHEMA_VERSION})")
