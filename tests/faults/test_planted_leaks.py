"""The sweep is checked: whatever we leave behind on purpose, it complains of."""

import asyncio
import importlib
import logging
import os
import threading

import pytest

from aserve.engine_loop import EngineLoop
from aserve.http import generation
from aserve.kv_cache.block_pool import BlockPool
from aserve.text.stream import TextStream
from tests.faults.points import Delay, Panic, Point, at
from tests.faults.sweep import Sweep

pytestmark = pytest.mark.torch

NOWHERE = Point("nowhere", lambda _world: [])
STREAMS = Point("stream made", at((generation, "EventStream")))


async def complaints_of(plant, point=NOWHERE, fault=Delay):
    """Of one case. plant: called after the run that tells what is right."""
    async with Sweep() as sweep:
        plant()
        return " ".join((await sweep.run(point, 1, fault)).complaints)


@pytest.fixture
def plant(monkeypatch):
    """Put something in a class's or module's place, later."""

    def later(owner, name, value):
        target = importlib.import_module(owner) if isinstance(owner, str) else owner
        return lambda: monkeypatch.setattr(target, name, value)

    return later


@pytest.fixture
def at_the_first_stream(plant):
    """Call something once, when the text of a request is begun."""

    def once(call):
        init, results = TextStream.__init__, []

        def begin(stream, *arguments, **options):
            if not results:
                results.append(call())
            init(stream, *arguments, **options)

        return plant(TextStream, "__init__", begin), results

    return once


async def test_nothing_is_complained_of_where_nothing_is_planted():
    assert await complaints_of(lambda: None) == ""
    assert await complaints_of(lambda: None, STREAMS, Panic) == ""


async def test_a_reader_that_is_not_removed(plant):
    give_back = EngineLoop._give_back

    def keep(loop, request_id):
        give_back(loop, request_id)
        loop._readers["undead"] = None

    assert "readers ['undead']" in await complaints_of(plant(EngineLoop, "_give_back", keep))


async def test_a_block_that_is_not_freed(plant):
    release = BlockPool.release
    complaints = await complaints_of(plant(BlockPool, "release", lambda pool, ids: release(pool, list(ids)[:-1])))
    assert "blocks, rows or queues" in complaints
    assert "check: I" in complaints


async def test_a_task_that_is_left(at_the_first_stream):
    plant, tasks = at_the_first_stream(lambda: asyncio.create_task(asyncio.sleep(60), name="forgotten"))
    assert "left behind: task forgotten" in await complaints_of(plant)
    tasks[0].cancel()


async def test_a_thread_that_is_left(at_the_first_stream):
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    plant, _ = at_the_first_stream(thread.start)
    try:
        assert "left behind: thread forgotten" in await complaints_of(plant)
    finally:
        done.set()
        thread.join()


async def test_a_descriptor_that_is_left(at_the_first_stream):
    plant, pipes = at_the_first_stream(os.pipe)
    assert "left behind: descriptor" in await complaints_of(plant)
    for descriptor in pipes[0]:
        os.close(descriptor)


async def test_a_wrong_word_in_a_neighbours_answer(plant):
    encode = generation._encode
    assert "changed" in await complaints_of(plant(generation, "_encode", lambda text: encode(text.upper())))


async def test_an_exception_that_escapes(plant):
    def escape(error):
        raise Panic from error

    plant = plant("aserve.http.endpoint", "is_fault", escape)
    assert "raised Panic" in await complaints_of(plant, STREAMS, RuntimeError)


async def test_a_fault_that_is_logged_twice_and_word_for_word(plant):
    def log_it_all(_log, place, error, _request_id=None):
        for _ in range(2):
            logging.getLogger("aserve").error("%s %s", error, place)
        return "no id"

    complaints = await complaints_of(plant("aserve.core.faults", "log_fault", log_it_all), STREAMS, RuntimeError)
    assert "logged 2 times" in complaints
    assert "the canary is in the log" in complaints
