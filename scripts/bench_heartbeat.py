"""How free the event loop is under load: how late a heartbeat comes, and how long /health takes to answer.

The server runs in this process, over a runner that computes nothing, so that its steps follow each other as fast as the
host can: nothing else keeps the loop as busy. One other process reads --streams answers without end and, once a round,
sends a prompt of --prompt-tokens ids, the same as text, and a body of --body-bytes; a third asks /health.
Prints one JSON line; exit status 1 if a figure is over its limit (--max-ms, --p99-ms, --health-p99-ms).

    python scripts/bench_heartbeat.py --streams 64 --rounds 5
"""

import argparse
import asyncio
import gc
import http.client
import json
import sys
import threading
import time
from collections.abc import Sequence

from report import emit
from sse_starlette import EventSourceResponse
from step_stages import scripted_loader

from aserve.engine import Engine
from aserve.http import create_app
from aserve.load.figures import percentile
from aserve.server import Server, ServerConfig

BEAT_S = 0.005
PROBE_S = 0.01
SETTLING_S = 1.0
"""How long the streams run before the first round, and after the last."""


class Beats:
    """What each beat of the heart told, in milliseconds.

    late: how late it came. busy: processor time of the event loop's thread since the beat before, which other processes
    do not lengthen, however little of the machine they leave.
    """

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self.busy_ms: list[float] = []

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            start_s, busy_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(BEAT_S)
            self.late_ms.append(max(0.0, time.perf_counter() - start_s - BEAT_S) * 1000)
            self.busy_ms.append((time.thread_time() - busy_s) * 1000)


def summary(name: str, times_ms: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and the worst."""
    percentiles = {f"{name}_ms_p{percent}": percentile(times_ms, percent) for percent in (50, 99)}
    return {**percentiles, f"{name}_ms_max": max(times_ms)}


async def serve(arguments: argparse.Namespace) -> dict[str, float]:
    """Serve the load until it is over; the figures."""
    max_model_len = 2 * arguments.prompt_tokens
    load_engine = scripted_loader(
        arguments.streams + 4, max_model_len, num_kv_tokens=6 * max_model_len, max_num_batched_tokens=8192
    )
    engine = Engine(load_engine)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = Server(
        engine,
        create_app(engine),
        ServerConfig(port=0, drain_timeout_s=0.0),
        on_ready=ready.set_result,
        say=lambda _line: None,
    )
    serving = asyncio.create_task(server.run())
    url = await ready
    EventSourceResponse(iter(()))  # this and the next two as `aserve serve` does
    gc.collect()
    gc.freeze()
    port = url.rpartition(":")[2]
    beats = Beats()
    probe = await child("probe", port, arguments)
    load = await child("load", port, arguments)
    beating = asyncio.create_task(beats.run())
    await load.wait()
    beating.cancel()
    assert probe.stdin is not None
    probe.stdin.close()
    assert probe.stdout is not None
    health_ms = json.loads(await probe.stdout.read())
    await probe.wait()
    server.stop()
    await serving
    if load.returncode:
        raise SystemExit("the load failed")
    return {
        **summary("late", beats.late_ms),
        **summary("busy", beats.busy_ms),
        **summary("health", health_ms),
        "num_beats": len(beats.late_ms),
        "num_probes": len(health_ms),
    }


async def child(role: str, port: str, arguments: argparse.Namespace) -> asyncio.subprocess.Process:
    """This script again, in another role."""
    words = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in SIZES]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        f"--role={role}",
        f"--port={port}",
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


def probe(port: int) -> None:
    """Ask /health again and again, until standard input ends; print how long each answer took."""
    ending = threading.Thread(target=sys.stdin.read, daemon=True)
    ending.start()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    times_ms = []
    while ending.is_alive():
        start_s = time.perf_counter()
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ready"}'
        times_ms.append((time.perf_counter() - start_s) * 1000)
        time.sleep(PROBE_S)
    print(json.dumps(times_ms))


async def load(arguments: argparse.Namespace) -> None:
    """Streams without end, and beside them what is large, one after another."""
    num_tokens = arguments.prompt_tokens
    streams = [
        await ask(arguments.port, {"prompt": [index, 1, 2, 3], "stream": True, "max_tokens": num_tokens})
        for index in range(arguments.streams)
    ]
    readers = [asyncio.create_task(drain(reader)) for reader, _ in streams]
    await asyncio.sleep(SETTLING_S)
    for number in range(arguments.rounds):
        ids = [(number * 7 + index) % 250 for index in range(num_tokens)]
        assert await answered(arguments.port, {"prompt": ids, "max_tokens": 2}) == 200
        assert await answered(arguments.port, {"prompt": " word" * (num_tokens // 2), "max_tokens": 2}) == 200
        messages = [{"role": "user", "content": "x" * arguments.body_bytes}]
        assert await answered(arguments.port, {"messages": messages}, "/v1/chat/completions") in (200, 400)
    await asyncio.sleep(SETTLING_S)
    for reader in readers:
        assert not reader.done(), "a stream ended too early"
        reader.cancel()
    for _, writer in streams:
        writer.transport.abort()


async def ask(
    port: int, fields: dict[str, object], path: str = "/v1/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({**fields, "ignore_eos": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def answered(port: int, fields: dict[str, object], path: str = "/v1/completions") -> int:
    """The status of an answer that is not streamed."""
    reader, writer = await ask(port, fields, path)
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass


SIZES = {"streams": 64, "prompt-tokens": 200_000, "body-bytes": 4 * 1024 * 1024, "rounds": 5}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--max-ms", type=float, default=50.0, help="the latest beat")
    parser.add_argument("--p99-ms", type=float, default=10.0, help="99 %% of the beats")
    parser.add_argument("--health-p99-ms", type=float, default=20.0, help="99 %% of the answers of /health")
    parser.add_argument("--role", choices=("serve", "load", "probe"), default="serve", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.role == "probe":
        probe(arguments.port)
        return 0
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # of the load, too: it needs half the processor
        if arguments.role == "load":
            runner.run(load(arguments))
            return 0
        figures = runner.run(serve(arguments))
    emit("heartbeat", {name: getattr(arguments, name.replace("-", "_")) for name in SIZES}, figures)
    limits = {
        "late_ms_max": arguments.max_ms,
        "late_ms_p99": arguments.p99_ms,
        "health_ms_p99": arguments.health_p99_ms,
    }
    return int(any(figures[name] > limit for name, limit in limits.items()))


if __name__ == "__main__":
    sys.exit(main())
