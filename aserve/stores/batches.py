"""BatchStore: files that were uploaded, batches, and what each line of a batch came to: in memory, or in a SQLite file.

files    id  tenant  created_s  name  purpose  content
batches  id  tenant  created_s  state (JSON)
results  batch_id  line  is_error  content        a row for each line that was answered; the others are still to do
running  num_lines                                a row while a process runs lines, so many of a batch at once at most
suspects batch_id  line  num_deaths  state        of lines that were perhaps being run when a process died
"""

import sqlite3
from itertools import count, islice
from typing import Any, Final

import msgspec

from aserve.core.defaults import IN_MEMORY
from aserve.core.errors import InvalidRequestError
from aserve.stores.database import Database, transaction

SCHEMA_VERSION: Final = 1001
SCHEMA: Final = """
CREATE TABLE files (id TEXT PRIMARY KEY, tenant TEXT, created_s INTEGER, name TEXT, purpose TEXT, content BLOB);
CREATE TABLE batches (id TEXT PRIMARY KEY, tenant TEXT, created_s INTEGER, state BLOB);
CREATE TABLE results (batch_id TEXT, line INTEGER, is_error INTEGER, content BLOB, PRIMARY KEY (batch_id, line))
"""
ADDITIONS: Final = """
CREATE TABLE IF NOT EXISTS running (num_lines INTEGER);
CREATE TABLE IF NOT EXISTS suspects (
    batch_id TEXT, line INTEGER, num_deaths INTEGER, state TEXT, PRIMARY KEY (batch_id, line)
)
"""
MEMORY_BYTES: Final = 256 * 1024 * 1024
FILE_BYTES: Final = 4 * 1024 * 1024 * 1024
"""Of all that is kept, at most, where nothing else is said."""
SIZE: Final = """
SELECT (SELECT COALESCE(SUM(LENGTH(content)), 0) FROM files) + (SELECT COALESCE(SUM(LENGTH(content)), 0) FROM results)
"""
CONVICT: Final = """
UPDATE suspects SET state = 'guilty' WHERE state = 'alone' AND NOT EXISTS
    (SELECT 1 FROM results WHERE results.batch_id = suspects.batch_id AND results.line = suspects.line)
"""
_Statement = tuple[str, tuple[object, ...]]
_FILE: Final = "SELECT id, tenant, created_s, name, purpose, length(content) FROM files"


class StoredFile(msgspec.Struct, frozen=True):
    """One file, without its content, of which there are `num_bytes`."""

    id: str
    tenant: str
    created_s: int
    name: str
    purpose: str
    num_bytes: int


class StoredBatch(msgspec.Struct, frozen=True):
    """One batch. state: what its API tells of it."""

    id: str
    tenant: str
    created_s: int
    state: dict[str, Any]


class Suspect(msgspec.Struct, frozen=True):
    """A line that is still to do. num_deaths: of processes that perhaps ran it. is_guilty: the last ran it alone."""

    line: int
    num_deaths: int
    is_guilty: bool


class BatchStore:
    """Of one file, or of none. Raises `ConfigError` as `Database`.

    max_bytes: of all files and results, beyond which no more is asked for; None for 256 MiB in memory, 4 GiB in a file.
    """

    def __init__(self, path: str = IN_MEMORY, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes or (MEMORY_BYTES if path == IN_MEMORY else FILE_BYTES)
        self._database = Database(
            path, option="--batch-store", schema=SCHEMA, version=SCHEMA_VERSION, additions=ADDITIONS
        )
        self._is_running = False

    async def check_room(self, num_bytes: int, param: str) -> None:
        """Raise `InvalidRequestError`, naming `param`, where so many bytes more are too many."""
        ((kept,),) = await self._read(SIZE)
        if kept + num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"{param}: files and results of {kept} bytes are kept, and {num_bytes} more are over the limit of "
                f"{self._max_bytes}: delete files that nobody needs",
                param,
            )

    async def add_file(self, file: StoredFile, content: bytes) -> None:
        """Keep a file, in place of one of the same id."""
        row = (file.id, file.tenant, file.created_s, file.name, file.purpose, content)
        await self._write(("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", row))

    async def file(self, tenant: str, id: str) -> StoredFile | None:
        """The tenant's file of that id; None where there is none."""
        rows = await self._read(f"{_FILE} WHERE tenant = ? AND id = ?", tenant, id)
        return StoredFile(*rows[0]) if rows else None

    async def files(self, tenant: str) -> list[StoredFile]:
        """Those of a tenant, the newest first."""
        rows = await self._read(f"{_FILE} WHERE tenant = ? ORDER BY created_s DESC, rowid DESC", tenant)
        return [StoredFile(*row) for row in rows]

    async def content(self, id: str) -> bytes:
        """Of a file that is there; b"" of another."""
        rows = await self._read("SELECT content FROM files WHERE id = ?", id)
        return rows[0][0] if rows else b""

    async def delete_file(self, id: str) -> None:
        """Forget it."""
        await self._write(("DELETE FROM files WHERE id = ?", (id,)))

    async def put_batch(self, batch: StoredBatch, *, drops_results: bool = False) -> None:
        """Keep a batch as it is now. drops_results: what its lines came to is in files, and goes in the same stroke."""
        row = (batch.id, batch.tenant, batch.created_s, msgspec.json.encode(batch.state))
        statements: list[_Statement] = [("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?)", row)]
        if drops_results:
            statements += [
                (f"DELETE FROM {table} WHERE batch_id = ?", (batch.id,)) for table in ("results", "suspects")
            ]
        await self._write(*statements)

    async def batches(self, tenant: str | None = None) -> list[StoredBatch]:
        """Those of a tenant, or of all, the newest first."""
        query = "SELECT id, tenant, created_s, state FROM batches"
        where = "" if tenant is None else " WHERE tenant = ?"
        given = () if tenant is None else (tenant,)
        rows = await self._read(f"{query}{where} ORDER BY created_s DESC, rowid DESC", *given)
        return [StoredBatch(id, owner, since_s, msgspec.json.decode(state)) for id, owner, since_s, state in rows]

    async def add_result(self, batch_id: str, line: int, content: bytes, *, is_error: bool) -> None:
        """What a line of a batch came to."""
        await self._write(("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?)", (batch_id, line, is_error, content)))

    async def done(self, batch_id: str) -> dict[int, bool]:
        """The lines of a batch that were answered, and whether by an error."""
        rows = await self._read("SELECT line, is_error FROM results WHERE batch_id = ?", batch_id)
        return {line: bool(is_error) for line, is_error in rows}

    async def results(self, batch_id: str, *, is_error: bool) -> bytes:
        """What the lines came to, in their order, a line each."""
        query = "SELECT content FROM results WHERE batch_id = ? AND is_error = ? ORDER BY line"
        rows = await self._read(query, batch_id, is_error)
        return b"".join(content + b"\n" for (content,) in rows)

    async def begin_running(self, num_lines: int) -> int:
        """A process is to run lines, so many of a batch at once at most.

        Returns how many the one before ran, where it died of one of these; 0 where it came to a proper end, and where
        it is known of which it died: of the one that it ran alone.
        """

        def begin(connection: sqlite3.Connection) -> int:
            with transaction(connection):
                before = connection.execute("SELECT num_lines FROM running").fetchall()
                connection.execute("DELETE FROM running")
                connection.execute("INSERT INTO running VALUES (?)", (num_lines,))
                num_guilty = connection.execute(CONVICT).rowcount if before else 0
                connection.execute("UPDATE suspects SET state = '' WHERE state = 'alone'")
                return 0 if num_guilty or not before else int(before[0][0])

        self._is_running = True
        return await self._database.run(begin)

    async def suspect(self, batch_id: str, num_lines: int) -> None:
        """The first lines that are still to do, so many of them, were perhaps being run when a process died."""
        done = await self.done(batch_id)
        lines = islice((line for line in count() if line not in done), num_lines)
        statement = "INSERT INTO suspects VALUES (?, ?, 1, '') ON CONFLICT DO UPDATE SET num_deaths = num_deaths + 1"
        await self._write(*((statement, (batch_id, line)) for line in lines))

    async def run_alone(self, batch_id: str, line: int) -> None:
        """Of all lines this one alone is about to be run: if the process dies, it is the one."""
        await self._set_state(batch_id, line, "alone")

    async def acquit(self, batch_id: str, line: int) -> None:
        """It is not run any more, and was not answered."""
        await self._set_state(batch_id, line, "")

    async def _set_state(self, batch_id: str, line: int, state: str) -> None:
        statement = "UPDATE suspects SET state = ? WHERE batch_id = ? AND line = ?"
        await self._write((statement, (state, batch_id, line)))

    async def suspects(self, batch_id: str) -> list[Suspect]:
        """Those of a batch, in their order."""
        rows = await self._read(
            "SELECT line, num_deaths, state = 'guilty' FROM suspects WHERE batch_id = ? ORDER BY line", batch_id
        )
        done = await self.done(batch_id)
        return [Suspect(line, num, bool(is_guilty)) for line, num, is_guilty in rows if line not in done]

    def close(self, *, has_died: bool = False) -> None:
        """Do what was asked for before, and take no more. Idempotent.

        has_died: the lines that were being run are suspected of it, as of the end of a process that was killed.
        """
        self._database.close("DELETE FROM running" if self._is_running and not has_died else "")

    async def _read(self, query: str, *given: object) -> list[tuple[Any, ...]]:
        return await self._database.run(lambda connection: connection.execute(query, given).fetchall())

    async def _write(self, *statements: _Statement) -> None:
        def write(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                for statement, given in statements:
                    connection.execute(statement, given)

        await self._database.run(write)
