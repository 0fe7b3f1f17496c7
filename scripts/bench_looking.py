"""What looking on costs: tokens per second of streams that somebody watches or has explained, over those of plain ones.

One server in turns: plain streams, the same while one viewer reads `/v1/inspect/events`, and the same with
`"x_aserve": {"explain": true}`. One JSON line: medians of the rounds, and of their ratios to the plain ones,
with the errors of those medians.

    python scripts/bench_looking.py --model demo --streams 32 --rounds 30 --against watched explained
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench_tools import tokens_per_s
from load.process import Server, exit_on_sigterm, free_port
from report import emit, median_error

from aserve.load.http import Client

PATH: Final = "/v1/completions"
EVENTS: Final = b"GET /v1/inspect/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
SNAPSHOT: Final = b'"type":"snapshot"'
KINDS: Final = ("plain", "watched", "explained")


def body(stream: int, max_tokens: int, *, explains: bool) -> bytes:
    """A request as JSON."""
    fields: dict[str, Any] = {
        "prompt": [10 + stream, *range(20, 52)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields | {"x_aserve": {"explain": True}} if explains else fields).encode()


@asynccontextmanager
async def viewer(port: int) -> AsyncIterator[None]:
    """Somebody who has been told what is there, and reads all events. Raises ValueError where there are none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def read() -> None:
        while await reader.read(1 << 16):
            pass

    try:
        writer.write(EVENTS)
        if b" 200 " not in (status := await reader.readline()):
            raise ValueError(f"the inspector answered {status!r}")
        await reader.readuntil(SNAPSHOT)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read())
            yield
            reading.cancel()
    finally:
        writer.close()
        await writer.wait_closed()


async def run(port: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second by round, of each kind."""
    client = Client(f"http://127.0.0.1:{port}")
    requests = {
        kind: [
            client.render(PATH, body(stream, args.max_tokens, explains=kind == "explained"))
            for stream in range(args.streams)
        ]
        for kind in args.kinds
    }
    rates: dict[str, list[float]] = {kind: [] for kind in args.kinds}
    await tokens_per_s(client, requests["plain"])  # warms up
    for turn in range(args.rounds):
        first = turn % len(args.kinds)
        for kind in (*args.kinds[first:], *args.kinds[:first]):
            async with viewer(port) if kind == "watched" else nullcontext():
                rates[kind].append(await tokens_per_s(client, requests[kind]))
    client.close()
    return rates


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--against", nargs="+", choices=KINDS[1:], default=KINDS[1:], help="the plain ones")
    args = parser.parse_args(words)
    args.kinds = (KINDS[0], *args.against)
    exit_on_sigterm()
    port = free_port()
    command = [sys.executable, "-m", "aserve", "serve", "--model", args.model, "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder, Server(command, port, Path(folder) / "log") as server:
        server.wait_for("/ready", 120.0)
        rates = asyncio.run(run(port, args))
    ratios = {kind: [a / b for a, b in zip(rates[kind], rates["plain"], strict=True)] for kind in args.against}
    emit(
        "looking",
        {"model": args.model, "streams": args.streams, "rounds": args.rounds},
        {f"{kind}_tokens_per_s": median(rates[kind]) for kind in args.kinds}
        | {f"{kind}_ratio": median(several) for kind, several in ratios.items()}
        | {f"{kind}_ratio_error": median_error(several) for kind, several in ratios.items()},
    )


if __name__ == "__main__":
    main()
