"""What a server does when far more is asked of it than it can do: Poisson arrivals at --overload times its peak.

First a closed loop finds the peak: as many requests at once as may run. Then requests come --overload times as fast,
whether or not those before have been answered. Prints one JSON line:

  goodput_over_peak   tokens a second of whole answers, against the peak's
  refused_ms_p99      from when a request was sent to its 429
  health_ms_p99       what /ping, which is /health, took meanwhile
  lost                requests that got neither a whole answer nor a 429: there must be none

The exit status is 1 if a figure is over its limit. Client and server share the machine's cores.

    python scripts/bench_overload.py --seconds 20
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench_startup import DEMO
from load.arrivals import Arrival, poisson
from load.drive import FAILURES, PATH, Target, run
from load.http import Client
from load.process import Server, exit_on_sigterm, free_port
from load.prompts import Prompts
from report import emit, percentile

PROBE_S: Final = 0.05
START_S: Final = 60.0


@dataclass
class Tally:
    """What came back. ended_s: when each whole answer was there. failures: of requests without an answer."""

    statuses: Counter[int] = field(default_factory=Counter)
    ended_s: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_without_retry_after: int = 0

    @property
    def num_lost(self) -> int:
        """Requests with neither a whole answer nor a refusal."""
        return sum(count for status, count in self.statuses.items() if status not in (200, 429)) + len(self.failures)


class Load:
    """Requests of one length to one server, each whole and not streamed."""

    def __init__(self, target: Target, num_in: int, num_out: int, seed: int) -> None:
        self.client = target.client()
        self._target = target
        self._num_in, self.num_out = num_in, num_out
        self._rng = random.Random(seed)

    def request(self) -> bytes:
        """One more, with a prompt of its own."""
        return self.client.render(
            PATH, self._target.body(self._target.prompts.draw(self._rng, self._num_in), self.num_out)
        )

    async def send(self, request: bytes, tally: Tally) -> None:
        """Send one, and note what came of it."""
        sent_s = time.perf_counter()
        try:
            answer = await self.client.post(request)
        except FAILURES as error:
            tally.failures.append(f"{type(error).__name__}: {error}")
            return
        now_s = time.perf_counter()
        status = answer.status
        if status == 429:
            tally.refused_ms.append((now_s - sent_s) * 1000)
        elif status == 200:
            is_whole = json.loads(answer.body)["usage"]["completion_tokens"] == self.num_out
            status = 200 if is_whole else 0
            tally.ended_s.append(now_s)
        tally.statuses[status] += 1

    async def at_once(self, concurrency: int, count: int) -> Tally:
        """A closed loop: so many clients, so many requests."""
        tally, waiting = Tally(), iter([self.request() for _ in range(count)])

        async def one_client() -> None:
            for request in waiting:
                await self.send(request, tally)

        await asyncio.gather(*(one_client() for _ in range(concurrency)))
        return tally

    async def open(self, arrivals: Sequence[Arrival]) -> Tally:
        """An open loop: each at its time."""
        tally, requests = Tally(), [self.request() for _ in arrivals]
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for arrival, request in zip(arrivals, requests, strict=True):
                if (early_s := start_s + arrival.at_s - time.perf_counter()) > 0:
                    await asyncio.sleep(early_s)
                group.create_task(self.send(request, tally))
        return tally


def rate(ended_s: Sequence[float], start_s: float, end_s: float) -> float:
    """Whole answers a second in that time."""
    return sum(start_s <= at_s < end_s for at_s in ended_s) / (end_s - start_s)


async def probe(client: Client, times_ms: list[float]) -> None:
    """Ask whether it is alive, until cancelled."""
    while True:
        start_s = time.perf_counter()
        answer = await client.post(client.render("/ping", b""))
        assert answer.status == 200, f"/ping answered {answer.status}"
        times_ms.append((time.perf_counter() - start_s) * 1000)
        await asyncio.sleep(PROBE_S)


async def measure(arguments: argparse.Namespace, url: str) -> dict[str, float]:
    """Both loops; the figures."""
    prompts = Prompts.of_tokenizer(DEMO, as_text=True)
    load = Load(Target(url, prompts, stream=False), arguments.input_len, arguments.output_len, arguments.seed)
    running = arguments.max_num_seqs
    await load.at_once(running, 2 * running)
    at_peak = await load.at_once(running, max(4 * running, arguments.peak_requests))
    ended_s = sorted(at_peak.ended_s)
    tail = len(ended_s) // 4  # neither the start, when all begin, nor the end, when fewer and fewer are left
    peak = rate(ended_s, ended_s[tail], ended_s[-tail])
    count = int(arguments.overload * peak * arguments.seconds)
    arrivals = poisson([Arrival(0.0, 0, 0)] * count, arguments.overload * peak, random.Random(arguments.seed))
    health_ms: list[float] = []
    prober = Client(url)
    probing = asyncio.create_task(probe(prober, health_ms))
    start_s = time.perf_counter()
    tally = await load.open(arrivals)
    probing.cancel()
    await asyncio.wait([probing])
    for client in (load.client, prober):
        client.close()
    await asyncio.sleep(0)  # what was closed hears of it
    goodput = rate(tally.ended_s, start_s + arguments.seconds / 4, start_s + arguments.seconds)
    return {
        "peak_tokens_per_s": peak * load.num_out,
        "goodput_tokens_per_s": goodput * load.num_out,
        "goodput_over_peak": goodput / peak,
        "asked": count,
        "answered": tally.statuses[200],
        "refused": tally.statuses[429],
        "lost": tally.num_lost + at_peak.num_lost,
        **{f"refused_ms_p{percent}": percentile(tally.refused_ms, percent) for percent in (50, 99)},
        **{f"health_ms_p{percent}": percentile(health_ms, percent) for percent in (50, 99)},
        "probes": len(health_ms),
        "overload_s": time.perf_counter() - start_s,
    }


SIZES: Final = {
    "max-num-seqs": 32,
    "max-num-queued-reqs": 64,
    "input-len": 32,
    "output-len": 64,
    "peak-requests": 256,
    "seed": 1,
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--overload", type=float, default=10.0, help="times the peak")
    parser.add_argument("--seconds", type=float, default=10.0, help="of overload")
    parser.add_argument("--min-goodput", type=float, default=0.95, help="against the peak")
    parser.add_argument("--refused-p99-ms", type=float, default=50.0)
    parser.add_argument("--health-p99-ms", type=float, default=20.0)
    arguments = parser.parse_args(words)
    exit_on_sigterm()
    port = free_port()
    sizes = {name: getattr(arguments, name.replace("-", "_")) for name in SIZES}
    flags = [f"--{name}={sizes[name]}" for name in ("max-num-seqs", "max-num-queued-reqs")]
    command = [sys.executable, "-m", "aserve", "--model", arguments.model, f"--port={port}", *flags]
    with tempfile.TemporaryDirectory() as folder, Server(command, port, Path(folder) / "server.log") as server:
        server.wait_for("/ready", START_S)
        figures = run(measure(arguments, server.url))
    config = {"model": arguments.model, **sizes, "overload": arguments.overload, "seconds": arguments.seconds}
    emit("overload", config, figures)
    is_good = (
        figures["lost"] == 0
        and figures["goodput_over_peak"] >= arguments.min_goodput
        and figures["refused_ms_p99"] <= arguments.refused_p99_ms
        and figures["health_ms_p99"] <= arguments.health_p99_ms
    )
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
