"""A line of what an engine does, every ten seconds while it does anything, from /metrics and `statistics`."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry

from aserve.core.errors import UnavailableError
from aserve.engine import Engine
from aserve.scheduler.statistics import Statistics

_log = logging.getLogger("aserve.throughput")

EVERY_S: Final = 10.0


class Reading(msgspec.Struct, frozen=True):
    """The counts of one moment. Tokens since the start."""

    time_s: float
    num_prompt_tokens: float
    num_generated_tokens: float
    statistics: Statistics

    @property
    def num_open(self) -> int:
        """Sequences that run or wait."""
        return self.statistics.num_running + self.statistics.num_waiting


async def log_throughput(engine: Engine, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
    """Write the lines, from when the engine is loaded until it is closed."""
    with suppress(UnavailableError):
        last = read(engine, clock())
        while True:
            await asyncio.sleep(every_s)
            now = read(engine, clock())
            if (line := describe_work(last, now)) is not None:
                _log.info("%s", line)
            last = now


def read(engine: Engine, time_s: float) -> Reading:
    """The counts of this moment. Raises `UnavailableError` for an engine without a model."""
    totals, prefix = _totals(engine.registry), engine.config.metrics_prefix
    return Reading(
        time_s,
        totals.get(f"{prefix}prompt_tokens_total", 0.0),
        totals.get(f"{prefix}generation_tokens_total", 0.0),
        engine.statistics(),
    )


def describe_work(last: Reading, now: Reading) -> str | None:
    """What was done between two readings; None if nothing was, and nothing is to be done."""
    seconds = max(now.time_s - last.time_s, 1e-9)
    num_prompt = now.num_prompt_tokens - last.num_prompt_tokens
    num_generated = now.num_generated_tokens - last.num_generated_tokens
    if not (num_prompt or num_generated or now.num_open):
        return None
    num_queries = now.statistics.num_cache_queries - last.statistics.num_cache_queries
    num_hits = now.statistics.num_cache_hits - last.statistics.num_cache_hits
    hits = f", {num_hits / num_queries:.1%} of prompts from the cache" if num_queries else ""
    return (
        f"{now.statistics.num_running} running, {now.statistics.num_waiting} waiting, "
        f"{num_prompt / seconds:.1f} prompt and {num_generated / seconds:.1f} generated tokens/s, "
        f"KV cache {now.statistics.kv_usage:.1%} used{hits}"
    )


def _totals(registry: CollectorRegistry) -> dict[str, float]:
    return {sample.name: sample.value for metric in registry.collect() for sample in metric.samples}
