"""What Ray costs: one server beside replicas on Ray Serve, in turn, with the same model, load and cores.

    python scripts/ray_bench.py --model demo --replicas 1 --rounds 3

Starts both, and has `aserve bench` ask one and the other by turns. Prints for each load tokens/s and time to the first
token, their ratios, start-up and memory, and what Serve's proxy and the ingress spend on an event, in CPU time.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]

PLAIN_PORT, RAY_PORT = 8311, 8312
START_S = 900.0


def started(words: list[str], url: str) -> tuple["subprocess.Popen[bytes]", float]:
    """A server that is ready, and how long it took."""
    start_s = time.monotonic()
    log = open(f"/tmp/ray_bench_{url.rsplit(':', 1)[1]}.log", "wb")  # noqa: SIM115  the process keeps it
    process = subprocess.Popen([sys.executable, "-m", "aserve", *words], stdout=log, stderr=log)
    while time.monotonic() - start_s < START_S:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5.0) as answer:
                if answer.status == 200:
                    return process, time.monotonic() - start_s
        except OSError:
            time.sleep(0.2)
        if process.poll() is not None:
            break
    raise SystemExit(f"{' '.join(words)} did not become ready: see {log.name}")


def bench(url: str, concurrency: list[int], tokens: int) -> list[dict[str, Any]]:
    """One round of each load."""
    loads = [str(each) for each in concurrency]
    words = ["bench", "--url", url, "--concurrency", *loads, "--rounds", "1", "--json"]
    words += ["--input-len", "64", "--output-len", str(tokens)]
    done = subprocess.run([sys.executable, "-m", "aserve", *words], capture_output=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]


def of_ray() -> dict[str, list[psutil.Process]]:
    """Ray's processes by what they are."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter(["cmdline", "name"]):
        line = " ".join(process.info["cmdline"] or [])
        for kind, sign in (
            ("replica", ":replica"),
            ("ingress", ":ingress"),
            ("proxy", "ProxyActor"),
            ("controller", "ServeController"),
            ("ray", "ray/core/src/ray"),
            ("ray", "ray::"),
            ("ray", "/ray/_private/"),
        ):
            if sign in line:
                found.setdefault(kind, []).append(process)
                break
    return found


def rss_mb(processes: list[psutil.Process]) -> float:
    return float(sum(process.memory_info().rss for process in processes)) / 1e6


def cpu_s(processes: list[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def figures(results: dict[str, list[list[dict[str, Any]]]], concurrency: list[int]) -> None:
    """Medians of the rounds, and the ratio of one to the other."""
    for place, load in enumerate(concurrency):
        told: dict[str, dict[str, float]] = {}
        for name, rounds in results.items():
            told[name] = {
                "tokens_per_s": median(each[place]["tokens_per_s"] for each in rounds),
                "first_token_ms": median(each[place]["first_token_ms"] for each in rounds),
            }
        ratios = {key: told["ray"][key] / told["plain"][key] for key in told["plain"]}
        print(json.dumps({"concurrency": load, **told, "ray_over_plain": ratios}), flush=True)


def read(row: dict[str, Any]) -> dict[str, float]:
    """The two figures of a row of `aserve bench`."""
    return {"tokens_per_s": row["figures"]["output_tokens_per_s"], "first_token_ms": row["figures"]["ttft_p50_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of aserve ray run")
    given = parser.parse_args()
    cores = os.cpu_count() or 1
    urls = {"plain": f"http://127.0.0.1:{PLAIN_PORT}", "ray": f"http://127.0.0.1:{RAY_PORT}"}
    plain, plain_s = started(["serve", given.model, "--port", str(PLAIN_PORT)], urls["plain"])
    words = [*given.flags, "--replicas", str(given.replicas), "--replica-cpus", str(cores / given.replicas)]
    ray, ray_s = started(["ray", "run", "--model", given.model, "--port", str(RAY_PORT), *words], urls["ray"])
    try:
        processes = of_ray()
        memory = {kind: round(rss_mb(found)) for kind, found in processes.items()}
        start = {"plain": round(plain_s, 1), "ray": round(ray_s, 1)}
        plain_mb = round(rss_mb([psutil.Process(plain.pid)]))
        print(json.dumps({"start_s": start, "rss_mb": {"plain": plain_mb, **memory}}), flush=True)
        results: dict[str, list[list[dict[str, Any]]]] = {"plain": [], "ray": []}
        spent, num_events = 0.0, 0
        for _ in range(given.rounds):
            for name, url in urls.items():
                between = [*processes.get("proxy", []), *processes.get("ingress", [])]
                before_s = cpu_s(between)
                rows = bench(url, given.concurrency, given.tokens)
                if name == "ray":
                    spent += cpu_s(between) - before_s
                    num_events += sum(row["figures"]["output_tokens"] for row in rows)
                results[name].append([read(row) for row in rows])
        figures(results, given.concurrency)
        print(json.dumps({"proxy_and_ingress_us_per_event": round(1e6 * spent / max(num_events, 1), 1)}))
    finally:
        for process in (plain, ray):
            process.send_signal(signal.SIGINT)
        for process in (plain, ray):
            process.wait(60)


if __name__ == "__main__":
    main()
