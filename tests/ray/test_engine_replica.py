"""A replica by itself, without Ray: who leaves it, and when."""

import asyncio
from contextlib import aclosing

import pytest

from aserve.cli.flags import ServerOptions
from aserve.core.config import Options
from aserve.ray.engine_replica import EngineReplica
from tests.engines import scripted_engine
from tests.ray.test_exchange import carried


class AloneReplica(EngineReplica):
    """Closed by hand, where Serve would await its `__del__`."""

    def __del__(self):
        pass


@pytest.fixture
async def replica(monkeypatch):
    async with scripted_engine() as engine:
        monkeypatch.setattr("aserve.build.AsyncEngine.from_options", lambda options: engine)
        replica = AloneReplica(Options(model="demo"), ServerOptions(shutdown_timeout=5.0), "a")
        yield replica
        await replica.close()


async def test_a_replica_ends_once_what_it_computed_is_taken(replica):
    """Catches an end that an earlier request's last piece sets off, and one that comes twice."""
    ended = []
    [*_] = [item async for item in replica.respond(carried())]
    async with aclosing(replica.respond(carried())) as items:
        await anext(items)
        leaving = asyncio.create_task(replica.leave(lambda: ended.append("ended")))
        await asyncio.sleep(0.2)
        assert not ended
        await replica.leave(lambda: ended.append("twice"))
        [*_] = [item async for item in items]
    async with asyncio.timeout(3.0):  # not as long as it may take
        await leaving
    assert ended == ["ended"]
