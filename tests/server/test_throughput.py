"""The line of what an engine does."""

import asyncio
import logging
from dataclasses import replace

import msgspec
import pytest

from aserve.engine import Engine
from aserve.server.throughput import Reading, describe_work, log_throughput, read
from tests.engines import scripted_engine, scripted_loader
from tests.server.wire import until


@pytest.fixture
async def engine():
    async with scripted_engine() as engine:
        yield engine


async def test_work_is_described_by_its_rates(engine):
    nothing = read(engine, 100.0)
    assert describe_work(nothing, nothing) is None
    await engine.complete("some prompt of 27 characters"[:27])
    done = msgspec.structs.replace(read(engine, 102.0))
    assert describe_work(nothing, done) == (
        "0 running, 0 waiting, 13.5 prompt and 7.0 generated tokens/s, KV cache 0.0% used, "
        "0.0% of prompts from the cache"
    )
    await engine.complete("some prompt of 27 characters"[:27])
    line = describe_work(done, read(engine, 103.0))
    assert line is not None
    assert line.endswith("27.0 prompt and 14.0 generated tokens/s, KV cache 0.0% used, 88.9% of prompts from the cache")


async def test_tokens_are_found_under_any_prefix():
    load = scripted_loader()

    def prefixed(report):
        parts = load(report)
        return replace(parts, config=msgspec.structs.replace(parts.config, metrics_prefix="vllm:"))

    async with Engine(prefixed) as engine:
        await engine.complete("some prompt of 27 characters"[:27])
        reading = read(engine, 1.0)
        assert (reading.num_prompt_tokens, reading.num_generated_tokens) == (27, 14)


def test_who_runs_and_waits_is_work():
    async def state() -> Reading:
        async with scripted_engine() as engine:
            return read(engine, 0.0)

    idle = asyncio.run(state())
    waiting = msgspec.structs.replace(
        idle,
        time_s=10.0,
        statistics=msgspec.structs.replace(idle.statistics, num_waiting=3, num_running=2, num_used_blocks=32),
    )
    line = describe_work(idle, waiting)
    assert line == "2 running, 3 waiting, 0.0 prompt and 0.0 generated tokens/s, KV cache 50.8% used"


async def test_lines_come_while_there_is_work_and_end_with_the_engine(engine, caplog):
    caplog.set_level(logging.INFO, "aserve.throughput")
    task = asyncio.create_task(log_throughput(engine, every_s=0.001))
    await asyncio.sleep(0.01)
    assert not caplog.records
    await engine.complete("hi")
    await until(lambda: bool(caplog.records))
    await engine.aclose()
    async with asyncio.timeout(60):
        await task
