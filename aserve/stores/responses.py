"""Responses that are kept for later requests of the same tenant: in memory, or in a file that outlives the process.

    put --> kept (in a file: committed) --> returns         get, delete --> of that tenant, and not too old

Both kinds are bounded: what is older than the limit of age is gone, and where the limit of bytes is passed the oldest
go; the newest stays in any case.
"""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from aserve.stores.database import Database, transaction

MEMORY_BYTES: Final = 64 * 1024 * 1024
FILE_BYTES: Final = 1024 * 1024 * 1024
AGE_S: Final = 30 * 24 * 3600.0
"""The age that OpenAI's have."""
SCHEMA_VERSION: Final = 1
SCHEMA: Final = """
CREATE TABLE responses (rowid INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    since_s REAL NOT NULL, num_bytes INTEGER NOT NULL, response BLOB NOT NULL, input BLOB NOT NULL)
"""
RECORD_BYTES: Final = 256
"""What a record takes besides its contents."""

Clock = Callable[[], float]
"""Seconds of a clock that goes on while no process runs."""


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
    """Keeps responses in a file, which one process at a time has open. Raises `ConfigError` as `Database`."""

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
        self._database = Database(path, option="--response-store", schema=SCHEMA, version=SCHEMA_VERSION)
        self._num_bytes: int | None = None  # of all; the thread's alone, once it has counted them

    async def put(self, record: StoredResponse) -> None:
        """See `ResponseStore`; it is committed when this returns."""
        await self._database.run(self._put, record)

    async def get(self, tenant: str, id: str) -> StoredResponse | None:
        """See `ResponseStore`."""
        return await self._database.run(self._get, tenant, id)

    async def delete(self, tenant: str, id: str) -> bool:
        """See `ResponseStore`."""
        return await self._database.run(self._delete, tenant, id)

    def close(self) -> None:
        """See `ResponseStore`."""
        self._database.close()

    # In the database's thread

    def _put(self, connection: sqlite3.Connection, record: StoredResponse) -> None:
        now = self._clock()
        if self._num_bytes is None:
            (self._num_bytes,) = connection.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM responses").fetchone()
        with transaction(connection):
            earlier = connection.execute(
                "DELETE FROM responses WHERE id = ? RETURNING num_bytes", (record.id,)
            ).fetchall()
            num_bytes = self._num_bytes + record.num_bytes - sum(row_bytes for (row_bytes,) in earlier)
            connection.execute(
                "INSERT INTO responses (id, tenant, since_s, num_bytes, response, input) VALUES (?, ?, ?, ?, ?, ?)",
                (record.id, record.tenant, now, record.num_bytes, record.response, record.input),
            )
            num_bytes -= self._evict(connection, record.id, now, num_bytes)
        self._num_bytes = num_bytes

    def _evict(self, connection: sqlite3.Connection, newest: str, now: float, num_bytes: int) -> int:
        """Drop what is too old, and the oldest while there is too much; how many bytes went."""
        freed = 0
        oldest = "SELECT rowid, since_s, num_bytes FROM responses WHERE id != ? ORDER BY rowid LIMIT 1"
        while (row := connection.execute(oldest, (newest,)).fetchone()) is not None:
            rowid, since_s, row_bytes = row
            if since_s >= now - self._max_age_s and num_bytes - freed <= self._max_bytes:
                break
            connection.execute("DELETE FROM responses WHERE rowid = ?", (rowid,))
            freed += row_bytes
        return freed

    def _get(self, connection: sqlite3.Connection, tenant: str, id: str) -> StoredResponse | None:
        found = connection.execute(
            "SELECT response, input FROM responses WHERE id = ? AND tenant = ? AND since_s >= ?",
            (id, tenant, self._clock() - self._max_age_s),
        ).fetchone()
        return None if found is None else StoredResponse(id=id, tenant=tenant, response=found[0], input=found[1])

    def _delete(self, connection: sqlite3.Connection, tenant: str, id: str) -> bool:
        gone = connection.execute(
            "DELETE FROM responses WHERE id = ? AND tenant = ? RETURNING num_bytes, since_s", (id, tenant)
        ).fetchall()
        if self._num_bytes is not None:
            self._num_bytes -= sum(num_bytes for num_bytes, _ in gone)
        return any(since_s >= self._clock() - self._max_age_s for _, since_s in gone)
