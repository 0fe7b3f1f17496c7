"""`aserve bench`: closed loops of so many clients each, or an open loop at a rate, in rounds; and their figures."""

import random
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from aserve.cli.settings import Parsed
from aserve.cli.tool_flags import BenchOptions, ClientOptions
from aserve.core.config import Options
from aserve.core.errors import AserveError, ConfigError
from aserve.load.arrivals import Arrival, poisson
from aserve.load.drive import Loadable, Round, closed_loop, open_loop
from aserve.load.drive import run as run_loop
from aserve.load.figures import PERCENTS, Figures, medians, of_round

PROFILED_STEPS: Final = 20
COLUMNS: Final = (
    ("", "requests/s", "requests_per_s", "{:.2f}"),
    ("", "tokens/s", "output_tokens_per_s", "{:.1f}"),
    *(("first token" if p == 90 else "", f"p{p}", f"ttft_p{p}_ms", "{:.1f}") for p in PERCENTS),
    *(("between two" if p == 90 else "", f"p{p}", f"itl_p{p}_ms", "{:.2f}") for p in PERCENTS),
    ("whole", "p50", "latency_p50_ms", "{:.0f}"),
    ("", "failed", "errors", "{:.0f}"),
)
"""Of the table: two lines over a column, whose figure it is, and how it is written. Times are milliseconds."""
COLUMN: Final = 10


def run(parsed: Parsed, environ: Mapping[str, str]) -> int:
    """Measure and tell; the exit status is 1 where a request failed."""
    options = parsed.of(BenchOptions)
    if options.profile:
        if parsed.of(ClientOptions).url is not None:
            raise ConfigError("--profile is of a model in this process, and --url asks one elsewhere: leave one out")
        run_loop(_profile(parsed))
        return 0
    return run_loop(_measure(parsed, environ))


async def _measure(parsed: Parsed, environ: Mapping[str, str]) -> int:
    """Every load, each told as soon as it is measured."""
    options, rng = parsed.of(BenchOptions), random.Random(0)
    num_failed = 0
    async with _opened(parsed, environ) as (target, name):
        request = Arrival(0.0, options.input_len, options.output_len)
        first = await closed_loop(target, [request] * 2, 1, rng)  # which are slower
        if len(first.failures) == len(first.samples) + len(first.failures):
            raise AserveError(f"no request was answered: {first.failures[0]}")
        tell = _JsonLines(options, name) if options.json else _Table(options, name)
        async for load, rounds in _loads(options, target, request, rng):
            failures = [failure for done in rounds for failure in done.failures]
            num_failed += len(failures)
            figures = medians([of_round(done) for done in rounds])
            if parsed.of(ClientOptions).url is None:  # the client is in the engine's process
                del figures["client_cpu"]
            tell.load(load, figures, failures[:1])
    return 1 if num_failed else 0


async def _loads(
    options: BenchOptions, target: Loadable, request: Arrival, rng: random.Random
) -> AsyncGenerator[tuple[dict[str, float], list[Round]]]:
    """What each load was, and its rounds."""
    if options.rate is not None:
        requests = [request] * options.requests
        rounds = [
            await open_loop(target, poisson(requests, options.rate, rng), rng, salt) for salt in range(options.rounds)
        ]
        yield {"rate": options.rate}, rounds
        return
    for concurrency in options.concurrency:
        requests = [request] * max(options.requests // 4, 2 * concurrency)
        yield (
            {"concurrency": concurrency},
            [await closed_loop(target, requests, concurrency, rng) for _ in range(options.rounds)],
        )


@asynccontextmanager
async def _opened(parsed: Parsed, environ: Mapping[str, str]) -> AsyncGenerator[tuple[Loadable, str]]:
    """What load is put on, and what it is called."""
    from aserve.cli.bench import targets

    options, client = parsed.of(BenchOptions), parsed.of(ClientOptions)
    if client.url is None:
        from aserve.cli.asking.choosing import load_engine

        engine = await load_engine(parsed.of(Options))
        try:
            yield (
                targets.EngineTarget(engine, options.input_len, options.output_len),
                f"{engine.info.names[0]} in this process",
            )
        finally:
            await engine.aclose()
        return
    from aserve.cli.asking.choosing import open_remote

    remote = await open_remote(parsed, environ)
    await remote.aclose()
    key, url = remote.api_key, remote.url
    yield targets.server(url, remote.name, key, client.timeout, as_text=options.text), f"{remote.name} at {url}"


class _Table:
    """Figures for people, a line a load."""

    def __init__(self, options: BenchOptions, name: str) -> None:
        lengths = f"prompts of {options.input_len} tokens, answers of {options.output_len}"
        rounds = "1 round" if options.rounds == 1 else f"medians of {options.rounds} rounds"
        print(f"{name}: {lengths}, {rounds}; times in ms", flush=True)
        for line, begin in enumerate(("", "load")):
            print(f"{begin:{COLUMN + 2}}" + "".join(f"{column[line]:>{COLUMN + 1}}" for column in COLUMNS), flush=True)

    def load(self, load: Mapping[str, float], found: Figures, failures: Sequence[str]) -> None:
        """One line, and one more about a request that failed."""
        told = f"{load['rate']:g} a second" if "rate" in load else f"{load['concurrency']:g} at once"
        cells = (f"{form.format(found[name]):>{COLUMN + 1}}" for _, _, name, form in COLUMNS)
        print(f"{told:{COLUMN + 2}}" + "".join(cells), flush=True)
        for failure in failures:
            print(f"aserve: a request failed: {failure}", file=sys.stderr)
        if found["short_answers"]:
            print(f"aserve: {found['short_answers']:.0f} answers were shorter than asked for", file=sys.stderr)


class _JsonLines:
    """Figures for programs, an object a load."""

    def __init__(self, options: BenchOptions, name: str) -> None:
        self._lengths = {"input_len": options.input_len, "output_len": options.output_len, "rounds": options.rounds}
        self._name = name

    def load(self, load: Mapping[str, float], found: Figures, failures: Sequence[str]) -> None:
        """One line."""
        error = {"first_error": failures[0]} if failures else {}
        line = {"target": self._name, **load, **self._lengths, **error, "figures": found}
        print(msgspec.json.encode(line).decode(), flush=True)


async def _profile(parsed: Parsed) -> None:
    from aserve.cli.bench.profile import profile_steps

    options = parsed.of(BenchOptions)
    kinds = profile_steps(
        parsed.of(Options), options.concurrency, [options.input_len], options.input_len, PROFILED_STEPS
    )
    async for kind, found in kinds:
        if options.json:
            print(msgspec.json.encode(kind | found).decode(), flush=True)
        else:
            print("\n".join(_profile_lines(kind, found)), flush=True)


def _profile_lines(kind: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    what = (
        f"a decoding step of {kind['rows']} rows after {kind['context']} tokens"
        if kind["kind"] == "decode"
        else f"a prompt of {kind['tokens']} tokens"
    )
    yield f"{what}: {found['step_ms']:.2f} ms; under the profiler, by kernel and by operator of torch:"
    for name, taken_ms in [*found["kernels_ms"].items(), *found["operators_ms"].items()]:
        yield f"  {taken_ms:9.3f} ms  {name}"
    yield f"  {found['rest_ms']:9.3f} ms  all else: smaller operators, and Python"
