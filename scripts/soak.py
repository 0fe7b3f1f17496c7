"""A soak: for --minutes the demonstration model is asked by friends and foes, while steps fail now and then.

A server in a process of its own (`soak_server`), with adapters, drafts and planted faults; in this process clients
(`soak_clients`) that read whole answers and streams, of adapters, of structures and of tools too, cut them, send what
no server wants, read nothing, and bring poison; SIGHUP every SIGHUP_S. The server tells at times what it holds.

Prints one JSON line: requests by kind and outcome, the slopes of the resident memory after the first --settle-minutes
and of what malloc has handed out in the second half of the time, what was left at the end, and all complaints. Resident
memory settles slowly, as the C heap fills with holes of all sizes; what is handed out does not grow where nothing
leaks. Exit status 1 if there is a complaint: an answer that differed from the first one to the same question, a request
that ended by an error and was not poisoned, one that was and did not, anything that was left, or memory that grew.

    python scripts/soak.py --minutes 30
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from report import emit
from soak_clients import KEY, POISONED, SAME, Clients
from soak_server import SAMPLE_S, serve

SIGHUP_S: Final = 20.0
EXPECTED: Final[Mapping[str, tuple[str, ...]]] = {
    "stream": (SAME,),
    "answer": (SAME,),
    "adapter": (SAME,),
    "structured": (SAME,),
    "tools": (SAME,),
    "repetitive": (SAME,),
    "cut": ("200",),
    "bad": ("400", "413"),
    "silent": ("left",),
    "poisoned": (POISONED,),
}
"""What each kind of request may come to. Passing faults end nobody: there are never two in a row."""


def complaints(result: Mapping[str, Any], max_mib_per_hour: float) -> list[str]:
    """What a soak found, in words; nothing of a sound one."""
    return [*_of_requests(result), *_of_what_is_left(result, max_mib_per_hour)]


def _of_requests(result: Mapping[str, Any]) -> Iterator[str]:
    outcomes: Mapping[str, int] = result["outcomes"]
    for name, count in outcomes.items():
        kind, outcome = name.split(": ", 1)
        if outcome not in EXPECTED[kind]:
            yield f"{count} of kind {kind} came to {outcome}"
    for kind, expected in EXPECTED.items():
        if not any(f"{kind}: {outcome}" in outcomes for outcome in expected):
            yield f"none of kind {kind} came to {' or '.join(expected)}"
    num_poisoned = outcomes.get(f"poisoned: {POISONED}", 0)
    if result["errors"] != num_poisoned:  # those whose clients do not listen are counted here too
        yield f"{result['errors']} requests ended by an error, and {num_poisoned} were poisoned"
    for name in ("passing_faults", "accepted_drafts"):
        if not result[name]:
            yield f"no {name}"


def _of_what_is_left(result: Mapping[str, Any], max_mib_per_hour: float) -> Iterator[str]:
    yield from (f"left: {count} {name}" for name, count in result["left"].items() if count)
    for name in ("tasks", "descriptors"):
        if result["grown"][name] > 0:
            yield f"grown: {name} by {result['grown'][name]}"
    if result["heap_mib_per_hour"] > max_mib_per_hour:
        yield f"what malloc has handed out grows by {result['heap_mib_per_hour']} MiB an hour"
    if result["exit_code"]:
        yield f"the server ended with {result['exit_code']}"


def slope_mib_per_hour(samples: list[dict[str, Any]], name: str) -> float:
    """Of what is counted in KiB, by least squares."""
    times = [sample["at_s"] / 3600 for sample in samples]
    sizes = [sample[name] / 1024 for sample in samples]
    mean_time, mean_size = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((at - mean_time) ** 2 for at in times)
    return float(sum((a - mean_time) * (b - mean_size) for a, b in zip(times, sizes, strict=True)) / spread)


async def soak(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the server, let the clients at it, and see what is left. folder: for keys and adapters."""
    (folder / "keys.yaml").write_text(f"- name: soak\n  key: {KEY}\n  weight: 2\n")
    command = [sys.executable, __file__, "--serve", str(folder), "--fault-every", str(args.fault_every)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    url = (await server.stdout.readline()).decode().strip()
    assert url, "the server did not start"
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
    clients = Clients(url, time.monotonic() + args.minutes * 60)
    await clients.run()
    await asyncio.sleep(3 * SAMPLE_S)  # what was cut or left is given back
    if hanging_up is not None:
        hanging_up.cancel()
    server.terminate()
    code = await server.wait()
    await listening
    return {"outcomes": dict(sorted(clients.outcomes.items())), **figures(samples, args.settle_minutes)} | {
        "exit_code": code
    }


def figures(samples: list[dict[str, Any]], settle_minutes: float) -> dict[str, Any]:
    """What the server's samples come to; the last two are of a server that nobody asks any more."""
    settled = [s for s in samples if s["at_s"] - samples[0]["at_s"] >= settle_minutes * 60][:-2]
    counted = ("passing_faults", "poisoned_launches", "errors", "accepted_drafts", "preemptions")
    return {
        **{name: samples[-1][name] for name in counted},
        "resident_mib_per_hour": round(slope_mib_per_hour(settled, "resident_kib"), 2),
        "heap_mib_per_hour": round(slope_mib_per_hour(samples[len(samples) // 2 : -2], "heap_kib"), 2),
        "resident_mib": [round(s["resident_kib"] / 1024, 1) for s in (samples[0], settled[0], settled[-1])],
        "heap_mib": [round(s["heap_kib"] / 1024, 1) for s in (samples[0], settled[0], settled[-1])],
        "left": {name: samples[-1][name] for name in ("used_blocks", "running", "waiting")},
        "grown": {name: samples[-1][name] - samples[0][name] for name in ("threads", "descriptors", "tasks")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--settle-minutes", type=float, default=5.0)
    parser.add_argument("--fault-every", type=int, default=50)
    parser.add_argument("--max-mib-per-hour", type=float, default=8.0)
    parser.add_argument("--sighup", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.fault_every, args.serve)
    config = {name: value for name, value in vars(args).items() if name != "serve"}
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(soak(args, Path(folder)))
    result["complaints"] = complaints(result, args.max_mib_per_hour)
    emit("soak", config, result)
    return 1 if result["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
