"""How near `aserve simulate` comes to real runs: a run is recorded, simulated with changes, and run with these changes.

    A runs, is recorded --> simulated unchanged --> against A itself
                        --> simulated as B      --> against B, which runs with the same traffic
    B runs
    A runs again, likewise: so a machine that gets faster or slower is as far from A as from B

Traffic is an open loop: random arrivals, prompts and lengths of answers, the same in all runs of a round, at shares of
what the machine was just measured to do. Each round runs A, then every B, then A once more: how far the two runs of A
are apart is how exact any simulation can be. One table a share, in Markdown: of each figure, averaged over the rounds,
how far the one is from the other in %, with the error of that average, which the machine's moments make. What a process
does but once, a run has done that does not count. On a quiet machine:

    python scripts/check_simulation.py --model demo --seconds 60 --shares 0.3,0.7,0.95 --rounds 3 \
        --changes max_num_seqs=8 --changes max_num_batched_tokens=128 --changes enable_prefix_caching=false
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

from report import emit

from aserve import AsyncEngine, SamplingParams
from aserve.cli.simulate import read_changes
from aserve.recording.files import Recording
from aserve.simulation.changes import OPTIONS, changed
from aserve.simulation.meter import Figures
from aserve.simulation.simulator import Simulator
from aserve.simulation.traffic import Traffic, read_traffic

FIGURES: Final = {
    "output_tokens_per_s": "tokens a second",
    "ttft_p50_s": "first token, median",
    "ttft_p99_s": "first token, p99",
    "itl_p50_s": "between two, median",
    "itl_p99_s": "between two, p99",
    "latency_p50_s": "whole answer, median",
    "latency_p99_s": "whole answer, p99",
}
NUM_WARM: Final = 48
"""Requests of the closed loop that says what the machine can do."""
AT_ONCE: Final = 16
KV_BYTES: Final = 2**26
"""Of the cache, whose pages are all taken before the traffic begins: the step that is the first to write to one waits
for the system, which changes move to other requests, and no simulation knows."""
SETTLED_S: Final = 2.0
"""For what an engine does while nothing is to do: it takes the first 128 MiB of pages."""
FIRST_S: Final = 10.0
"""Of the run that does not count."""
NUM_BEGINNINGS: Final = 4
"""That prompts share: half of them begin with one of these."""


class Ask(NamedTuple):
    """A request. due_s: after the first."""

    due_s: float
    prompt: Sequence[int]
    num_tokens: int


def asks(num: int, rate: float, vocab: int, seed: int) -> list[Ask]:
    """So many, at so many a second."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(10, vocab) for _ in range(64)] for _ in range(NUM_BEGINNINGS)]
    made, due_s = [], 0.0
    for _ in range(num):
        own = [rng.randrange(10, vocab) for _ in range(min(400, max(4, round(rng.lognormvariate(4.0, 0.9)))))]
        shared = rng.choice(beginnings) if rng.random() < 0.5 else []
        made.append(Ask(due_s, [*shared, *own], min(160, max(4, round(rng.lognormvariate(3.6, 0.6))))))
        due_s += rng.expovariate(rate)
    return made


async def answer(engine: AsyncEngine, ask: Ask) -> None:
    params = SamplingParams(max_tokens=ask.num_tokens, temperature=0.0, ignore_eos=True)
    async with engine.open(ask.prompt, params) as mailbox:
        async for _ in mailbox:
            pass


async def requests_per_s(model: str, options: Mapping[str, Any]) -> float:
    """What the machine can do, of such requests."""
    async with AsyncEngine(model, **options, kv_cache_memory_bytes=KV_BYTES) as engine:
        waiting = asks(NUM_WARM, 1.0, engine.info.vocab_size, seed=-1)
        started_s = time.perf_counter()

        async def client() -> None:
            while waiting:
                await answer(engine, waiting.pop())

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        return NUM_WARM / (time.perf_counter() - started_s)


async def recorded(model: str, options: Mapping[str, Any], path: Path, asked: tuple[int, float, int]) -> Traffic:
    """A run of an open loop."""
    async with AsyncEngine(model, **options, record=path, kv_cache_memory_bytes=KV_BYTES) as engine:
        await asyncio.sleep(SETTLED_S)
        tasks, started_s = [], time.perf_counter()
        for ask in asks(asked[0], asked[1], engine.info.vocab_size, asked[2]):
            await asyncio.sleep(max(0.0, started_s + ask.due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(answer(engine, ask)))
        await asyncio.gather(*tasks)
    return read_traffic(Recording(path))


def simulated(traffic: Traffic, changes: Mapping[str, Any]) -> Figures:
    return Simulator(traffic, changed(traffic.header.config, changes)).run()


class Off(NamedTuple):
    """In %. error: of the average over rounds; 0.0 of one round, of which it is not known."""

    percent: float
    error: float = 0.0


def off(pairs: Sequence[tuple[Figures, Figures]]) -> dict[str, Off]:
    """By figure, from what was found and what is real in each round."""
    return {name: _off([(getattr(found, name), getattr(real, name)) for found, real in pairs]) for name in FIGURES}


def _off(pairs: Sequence[tuple[float, float]]) -> Off:
    found, real = (fmean(side) for side in zip(*pairs, strict=True))
    apart = [(one - other) / real for one, other in pairs]
    return Off(100 * (found / real - 1), 100 * stdev(apart) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0)


Pairs = list[tuple[Figures, Figures]]


async def round_of(arguments: argparse.Namespace, rate: float, seed: int, folder: Path) -> dict[str, Pairs]:
    """What was found and what is real, by column. Each B is simulated from the A before and from the A behind it."""
    base = read_changes(arguments.base)
    asked = round(rate * arguments.seconds), rate, seed

    async def run(name: str, changes: Mapping[str, Any]) -> Traffic:
        return await recorded(arguments.model, {**base, **changes}, folder / f"{name}{seed}.rec", asked)

    first = await run("a", {})
    after = {words: await run(f"b{i}-", read_changes(words.split())) for i, words in enumerate(arguments.changes)}
    both = first, await run("again", {})
    columns: dict[str, Pairs] = {"as recorded": [(simulated(one, {}), one.figures) for one in both]}
    for words, changed_run in after.items():
        changes = read_changes(words.split())
        columns[words] = [(simulated(one, changes), changed_run.figures) for one in both]
        columns[f"({words}: what it changed)"] = [(changed_run.figures, one.figures) for one in both]
    columns["(the same run twice)"] = [(both[1].figures, first.figures)]
    return columns


async def check(arguments: argparse.Namespace, folder: Path) -> None:
    able = arguments.rate or await requests_per_s(arguments.model, read_changes(arguments.base))
    for share in map(float, arguments.shares.split(",")):
        place = folder / f"{share:g}"
        place.mkdir(parents=True, exist_ok=True)
        rate, base = able * share, read_changes(arguments.base)
        await recorded(arguments.model, base, place / "first.rec", (1 + round(rate * FIRST_S), rate, arguments.rounds))
        rounds = [await round_of(arguments, rate, seed, place) for seed in range(arguments.rounds)]
        columns = {name: off([*chain(*(one[name] for one in rounds))]) for name in rounds[0]}
        num = round(rate * arguments.seconds)
        print(f"\n{arguments.model}, {share:.0%} of {able:.2f} requests a second, {num} requests, off by %:\n")
        print("\n".join(table(columns)), flush=True)
        told = {name: str(value) if name == "folder" else value for name, value in vars(arguments).items()}
        emit("check_simulation", told | {"share": share, "requests": num}, columns)


def table(columns: Mapping[str, Mapping[str, Off]]) -> list[str]:
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, label in FIGURES.items():
        lines.append(f"| {label} | " + " | ".join(in_words(column[name]) for column in columns.values()) + " |")
    return lines


def in_words(one: Off) -> str:
    return f"{one.percent:+.1f}" + (f" ± {one.error:.1f}" if one.error else "")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--base", nargs="*", default=["max_num_batched_tokens=512"], help="NAME=VALUE of A")
    parser.add_argument("--changes", action="append", default=[], help="NAME=VALUE ... of a B; may be given again")
    parser.add_argument("--shares", default="0.3,0.7,0.95", help="of what the machine can do")
    parser.add_argument("--rate", type=float, help="requests a second that the machine can do, in place of measuring")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where recordings are left; else they are removed")
    arguments = parser.parse_args(words)
    for given in [arguments.base, *(changes.split() for changes in arguments.changes)]:
        for name in read_changes(given):
            if name not in OPTIONS:
                parser.error(f"{name} is none of an engine's options: {', '.join(OPTIONS)}")
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(check(arguments, arguments.folder or Path(scratch)))


if __name__ == "__main__":
    main()
