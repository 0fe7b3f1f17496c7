"""The store of files and batches: what its thread raises, and what ends together."""

import asyncio
from contextlib import closing

import pytest

from aserve.stores.batches import BatchStore, StoredBatch


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
