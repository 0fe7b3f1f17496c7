"""An application over a scripted engine, and a client that needs no socket."""

import asyncio

import httpx
import pytest

from aserve.http import create_app
from tests.engines import scripted_engine


def client_of(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://aserve")


@pytest.fixture
async def engine():
    """An engine that answers "Hello, world!"; afterwards it must hold nothing and have no task left of any request."""
    async with scripted_engine() as engine:
        before = asyncio.all_tasks()
        yield engine
        await asyncio.sleep(0)
        statistics = engine.statistics()
        assert (statistics.num_used_blocks, statistics.num_running, statistics.num_waiting) == (0, 0, 0)
        assert asyncio.all_tasks() <= before | {asyncio.current_task()}


@pytest.fixture
async def client(engine):
    async with client_of(create_app(engine)) as client:
        yield client
