"""The store of files and batches: what its thread raises, and what ends together."""

import asyncio
from contextlib import closing

import pytest

from aserve.core.errors import StoreError
from aserve.stores.batches import BatchStore, StoredBatch, StoredFile


async def test_a_stop_iteration_in_the_thread_reaches_who_waits():
    """Catches a wait for ever: asyncio's futures refuse a StopIteration."""
    with closing(BatchStore()) as store:
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="StopIteration"):
                await store._database.run(lambda _connection: next(iter(())))


async def test_a_batchs_results_go_with_its_end_and_not_before():
    """Catches results that stay beside the files which are made of them, or that go while the batch still runs."""
    with closing(BatchStore()) as store:
        batch = StoredBatch("b", "", 1, {"status": "finalizing"})
        for id in ("b", "another"):
            await store.add_result(id, 0, b"{}", is_error=False)
        await store.put_batch(batch)
        assert await store.done("b") == {0: False}
        await store.put_batch(batch, drops_results=True)
        assert (await store.done("b"), await store.done("another")) == ({}, {0: False})


async def test_a_full_disk_is_told_by_its_name_and_nothing_is_lost(tmp_path, caplog):
    """Catches a fault of which neither client nor log says that the disk is full, and a store that stays unusable."""
    path = str(tmp_path / "a.db")
    file = StoredFile("f", "", 1, "a.jsonl", "batch", 100_000)
    with closing(BatchStore(path)) as store:
        await store.add_file(file, b"before")
        await store._database.run(lambda connection: connection.execute("PRAGMA max_page_count=1").fetchall())
        with pytest.raises(StoreError, match=r"^the server's batch-store cannot be used: database or disk is full$"):
            await store.add_file(file, b"x" * 100_000)
        assert await store.content("f") == b"before"
        await store._database.run(lambda connection: connection.execute("PRAGMA max_page_count=1000").fetchall())
        await store.add_file(file, b"x" * 100_000)
        assert len(await store.content("f")) == 100_000
    assert f"--batch-store: {path} fails: database or disk is full" in caplog.text
