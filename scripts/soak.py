"""A soak: for --minutes the demonstration model is asked by friends and foes, while steps fail now and then.

A server in a process of its own, over a runner that makes one step in --fault-every fail; in this process clients that
read whole streams, cut them, ask for whole answers, send what no server wants, and read nothing; SIGHUP every SIGHUP_S.
Every SAMPLE_S seconds the server tells what it holds. Prints one JSON line: requests by kind and outcome, answers that
differed from the first one to the same question, the slopes of the resident memory after the first --settle-minutes
and of what malloc has handed out in the second half of the time, and what was left at the end. Resident memory settles
slowly, as the C heap fills with holes of all sizes; what is handed out does not grow where nothing leaks. Exit status 1
if an answer differed, a good request got an error that a fault does not explain, anything was left, or what is handed
out grew by more than --max-mib-per-hour.

    python scripts/soak.py --minutes 30
"""

import argparse
import asyncio
import ctypes
import dataclasses
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx
from report import emit

SAMPLE_S: Final = 5.0
SIGHUP_S: Final = 20.0
NUM_CLIENTS: Final = 12
KEY: Final = "sk-soak"
QUESTIONS: Final = ("What is aserve?", "Tell me a story about a fox.", "What is 12 plus 7?", "What is paged attention?")
BAD_BODIES: Final = (
    b"",
    b"{",
    b"[]",
    b'{"messages": 5}',
    b'{"messages": [{"role": "root", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e400}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 1000000}',
    b'{"messages": [{"role": "user", "content": "' + b"a" * 300_000 + b'"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"-1": 5}}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": [' + b",".join([b'"s"'] * 5000) + b"]}",
)


# The server's process.


def serve(fault_every: int, keys_file: str) -> int:
    """Serve the demonstration model on a free port, telling on standard output where, and then what is held."""
    from aserve.build import loader, make_options
    from aserve.cli.commands import bound_product_caches
    from aserve.core.plan import StepPlan
    from aserve.core.ports import Flight, Runner
    from aserve.engine import Engine, EngineParts, Progress
    from aserve.http import Keyring, create_app
    from aserve.server import Server, ServerConfig
    from aserve.server.lifecycle import run_until_signal

    bound_product_caches(os.environ)

    class FaultyRunner:
        """Some launches raise; which is a matter of a seeded chance."""

        def __init__(self, runner: Runner) -> None:
            self._runner = runner
            self._chance = random.Random(0)
            self.recover = runner.recover
            self.close = runner.close
            self.num_faults = 0

        def launch(self, plan: StepPlan) -> Flight:
            """The runner's, or a fault."""
            if self._chance.randrange(fault_every) == 0:
                self.num_faults += 1
                raise RuntimeError("a planted fault")
            return self._runner.launch(plan)

    runners: list[FaultyRunner] = []
    load = loader(make_options(model="demo", max_num_seqs=8))

    def load_faulty(report: Callable[[Progress], None]) -> EngineParts:
        parts = load(report)
        runners.append(FaultyRunner(parts.runner))
        return dataclasses.replace(parts, runner=runners[0])

    engine = Engine(load_faulty)

    async def tell() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            print(json.dumps(held(engine, runners[0].num_faults)), flush=True)

    async def main() -> int:
        telling: list[asyncio.Task[None]] = []

        def ready(url: str) -> None:
            print(url, flush=True)
            telling.append(asyncio.create_task(tell()))

        keyring = Keyring(path=keys_file, tenants=engine.tenants)
        app = create_app(engine, keyring=keyring)
        server = Server(engine, app, ServerConfig(port=0), on_ready=ready, on_hangup=keyring.reload)
        code = await run_until_signal(server)
        for task in telling:
            task.cancel()
        return code

    return asyncio.run(main())


class MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_kib() -> int:
    """What malloc has handed out. Needs glibc 2.33."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    return int(mallinfo2().uordblks) // 1024


def held(engine: Any, num_faults: int) -> dict[str, Any]:
    """What the server's process holds at this moment."""
    counts = engine.statistics()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "at_s": time.monotonic(),
        "resident_kib": int(status["VmRSS"].split()[0]),
        "heap_kib": heap_kib(),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "used_blocks": counts.num_used_blocks,
        "running": counts.num_running,
        "waiting": counts.num_waiting,
        "faults": num_faults,
    }


# The clients' process.


class Soak:
    """Clients, and what became of them."""

    def __init__(self, url: str, until_s: float) -> None:
        self._url = url
        self._until_s = until_s
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits, headers=headers)
        self._answers: dict[str, str] = {}
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        """All clients, until time is up."""
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self._client(random.Random(number)))
        await self._http.aclose()

    async def _client(self, chance: random.Random) -> None:
        kinds: list[tuple[str, Callable[[random.Random], Awaitable[str]]]] = [
            *[("stream", self._whole_stream)] * 4,
            *[("answer", self._answer)] * 3,
            *[("cut", self._cut_stream)] * 3,
            *[("bad", self._bad)] * 2,
            ("silent", self._silent_reader),
        ]
        while time.monotonic() < self._until_s:
            kind, ask = chance.choice(kinds)
            try:
                outcome = await ask(chance)
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            self.outcomes[f"{kind}: {outcome}"] += 1

    def _body(self, chance: random.Random, *, stream: bool) -> dict[str, Any]:
        content = chance.choice(QUESTIONS)
        return {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 48,
            "stream": stream,
        }

    def _compare(self, body: dict[str, Any], text: str) -> str:
        return "as ever" if self._answers.setdefault(body["messages"][0]["content"], text) == text else "DIFFERENT"

    async def _answer(self, chance: random.Random) -> str:
        body = self._body(chance, stream=False)
        response = await self._http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            return str(response.status_code)
        return self._compare(body, response.json()["choices"][0]["message"]["content"])

    async def _whole_stream(self, chance: random.Random) -> str:
        body = self._body(chance, stream=True)
        text = ""
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return str(response.status_code)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return str(event["error"]["code"])
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        return self._compare(body, text) if line_is_done(response, text) else "truncated"

    async def _cut_stream(self, chance: random.Random) -> str:
        body = self._body(chance, stream=True) | {"max_tokens": 400, "ignore_eos": True}
        num_events = chance.randrange(20)
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_lines():
                num_events -= 1
                if num_events < 0:
                    break
        return str(response.status_code)

    async def _bad(self, chance: random.Random) -> str:
        content = chance.choice(BAD_BODIES)
        headers = {"Content-Type": "application/json"}
        response = await self._http.post("/v1/chat/completions", content=content, headers=headers)
        return str(response.status_code)

    async def _silent_reader(self, chance: random.Random) -> str:
        """Asks for a long stream, reads nothing of it, and leaves."""
        body = json.dumps(self._body(chance, stream=True) | {"max_tokens": 400, "ignore_eos": True}).encode()
        host, port = self._url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(sock, (host, int(port)))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            head += f"Authorization: Bearer {KEY}\r\n"
            await loop.sock_sendall(sock, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await asyncio.sleep(chance.uniform(0.0, 3.0))
        finally:
            sock.close()
        return "left"


def line_is_done(response: httpx.Response, text: str) -> bool:
    """Whether a stream had its proper end: httpx raises where the chunks end too soon."""
    return response.is_stream_consumed and bool(text)


def slope_mib_per_hour(samples: list[dict[str, Any]], name: str) -> float:
    """Of what is counted in KiB, by least squares."""
    times = [sample["at_s"] / 3600 for sample in samples]
    sizes = [sample[name] / 1024 for sample in samples]
    mean_time, mean_size = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((at - mean_time) ** 2 for at in times)
    return float(sum((a - mean_time) * (b - mean_size) for a, b in zip(times, sizes, strict=True)) / spread)


async def soak(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the server, let the clients at it, and see what is left. folder: for the file of keys."""
    keys_file = folder / "keys.yaml"
    keys_file.write_text(f"- name: soak\n  key: {KEY}\n  weight: 2\n")
    command = [sys.executable, __file__, "--serve", "--fault-every", str(args.fault_every), "--keys", str(keys_file)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    url = (await server.stdout.readline()).decode().strip()
    samples: list[dict[str, Any]] = []

    async def listen(lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            samples.append(json.loads(line))

    async def hang_up() -> None:
        while True:
            await asyncio.sleep(SIGHUP_S)
            server.send_signal(signal.SIGHUP)

    listening = asyncio.create_task(listen(server.stdout))
    hanging_up = asyncio.create_task(hang_up()) if args.sighup else None
    run = Soak(url, time.monotonic() + args.minutes * 60)
    await run.run()
    await asyncio.sleep(3 * SAMPLE_S)  # what was cut or left is given back
    if hanging_up is not None:
        hanging_up.cancel()
    server.terminate()
    code = await server.wait()
    await listening
    settled = [s for s in samples if s["at_s"] - samples[0]["at_s"] >= args.settle_minutes * 60][:-2]
    return {
        "outcomes": dict(sorted(run.outcomes.items())),
        "faults": samples[-1]["faults"],
        "resident_mib_per_hour": round(slope_mib_per_hour(settled, "resident_kib"), 2),
        "heap_mib_per_hour": round(slope_mib_per_hour(samples[len(samples) // 2 : -2], "heap_kib"), 2),
        "resident_mib": [round(s["resident_kib"] / 1024, 1) for s in (samples[0], settled[0], settled[-1])],
        "left": {name: samples[-1][name] for name in ("used_blocks", "running", "waiting")},
        "grown": {name: samples[-1][name] - samples[0][name] for name in ("threads", "descriptors", "tasks")},
        "exit_code": code,
    }


def is_sound(result: dict[str, Any], max_mib_per_hour: float) -> bool:
    """Whether the soak found nothing."""
    expected = ("stream: as ever", "answer: as ever", "cut: 200", "bad: 400", "bad: 413", "silent: left")
    return (
        all(outcome in expected for outcome in result["outcomes"])
        and not any(result["left"].values())
        and result["grown"]["tasks"] <= 0
        and result["grown"]["descriptors"] <= 0
        and result["heap_mib_per_hour"] <= max_mib_per_hour
        and result["exit_code"] == 0
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--settle-minutes", type=float, default=5.0)
    parser.add_argument("--fault-every", type=int, default=50)
    parser.add_argument("--max-mib-per-hour", type=float, default=8.0)
    parser.add_argument("--sighup", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.fault_every, args.keys)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(soak(args, Path(folder)))
    emit("soak", vars(args), result)
    return 0 if is_sound(result, args.max_mib_per_hour) else 1


if __name__ == "__main__":
    sys.exit(main())
