"""What a server does when far more is asked of it than it can do: Poisson arrivals at --overload times its peak.

In turns a closed loop of as many requests as may run at once, which finds the peak, and an open loop: requests come
--overload times as fast, whether or not those before have been answered. Prints one JSON line:

  goodput_over_peak   tokens a second of whole answers, against the peaks before and behind: the median of --rounds
  goodput_by_cpu      the same, of tokens a second of the server's processor time: for machines that others use, too
  refused_ms_p99      from when a request was sent to its 429
  health_ms_p99       what /ping, which is /health, took meanwhile
  lost                requests that got neither a whole answer nor a 429: there must be none

The exit status is 1 if a figure is over its limit. In reality clients sit elsewhere, so the client has a core to itself
and the server the others, while the peak is found too: the ratio then tells what refusals cost the server. With
--shared both use all cores, and it also has in it what the client takes from the server. Answers are of --output-len
tokens on average, between half and one and a half times as many, so that they do not end in waves.

    python scripts/bench_overload.py --model models/tiny
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench_startup import DEMO
from load.process import Server, exit_on_sigterm, free_port
from load.wires import Wires
from report import emit

from aserve.load.arrivals import Arrival, poisson
from aserve.load.figures import percentile
from aserve.load.prompts import Prompts

PROBE_S: Final = 0.1
START_S: Final = 60.0
PING: Final = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HEAD: Final = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
_COMPLETED: Final = re.compile(rb'"completion_tokens": ?([0-9]+)')


@dataclass
class Tally:
    """What came back. ended: when each whole answer was there, and its tokens. refused_ms, health_ms: times taken."""

    statuses: Counter[int] = field(default_factory=Counter)
    ended: list[tuple[float, int]] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)

    @property
    def num_lost(self) -> int:
        """Requests with neither a whole answer nor a refusal."""
        return sum(count for status, count in self.statuses.items() if status not in (200, 429))

    def num_tokens(self, start_s: float, end_s: float) -> int:
        """Of whole answers that ended within that time."""
        return sum(count for at_s, count in self.ended if start_s <= at_s < end_s)


class Window:
    """The time in which a loop counts: all but its first quarter. Reads what processor time the server has had."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid = pid
        now_s = time.perf_counter()
        self._due_s = [now_s + seconds / 4, now_s + seconds]
        self._looks: list[tuple[float, float]] = []

    @property
    def is_over(self) -> bool:
        """Whether it has come to its end."""
        return not self._due_s

    def look(self) -> None:
        """To be called again and again."""
        now_s = time.perf_counter()
        if self._due_s and now_s >= self._due_s[0]:
            self._due_s.pop(0)
            self._looks.append((now_s, cpu_s(self._pid)))

    def rates(self, tally: Tally) -> tuple[float, float]:
        """Tokens of whole answers: a second, and a second of the server's processor time."""
        (start_s, start_cpu_s), (end_s, end_cpu_s) = self._looks
        num_tokens = tally.num_tokens(start_s, end_s)
        return num_tokens / (end_s - start_s), num_tokens / (end_cpu_s - start_cpu_s)


def cpu_s(pid: int) -> float:
    """Processor time that a process and its threads have had (Linux: proc(5), "utime" and "stime")."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class Load:
    """Requests to one server, each whole and not streamed. num_in, num_out: tokens, the latter on average."""

    def __init__(self, port: int, num_in: int, num_out: int, seed: int) -> None:
        self.wires = Wires(port)
        self._prompts = Prompts.of_tokenizer(DEMO, as_text=True)
        self._num_in, self._num_out = num_in, num_out
        self._rng = random.Random(seed)
        self._next_probe_s = 0.0

    def requests(self, count: int) -> list[tuple[bytes, int]]:
        """So many as bytes, with prompts of their own, and how many tokens each is answered by."""
        made = []
        for _ in range(count):
            num_out = self._rng.randint((self._num_out + 1) // 2, self._num_out + self._num_out // 2)
            prompt = self._prompts.render(self._prompts.draw(self._rng, self._num_in))
            fields = {"prompt": prompt, "max_tokens": num_out, "temperature": 0, "ignore_eos": True}
            body = json.dumps(fields)
            made.append((f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode(), num_out))
        return made

    def send(self, request: tuple[bytes, int], tally: Tally, then: Callable[[], None] | None = None) -> None:
        """Send one; note what comes of it, and go on with `then`."""
        data, num_out = request

        def told(status: int, answer: bytes, took_s: float) -> None:
            if status == 429:
                tally.refused_ms.append(took_s * 1000)
            elif status == 200:
                found = _COMPLETED.search(answer)
                if found is None or int(found[1]) != num_out:
                    status = 0
                tally.ended.append((time.perf_counter(), num_out))
            tally.statuses[status] += 1
            if then is not None:
                then()

        self.wires.send(data, told)

    def at_once(self, concurrency: int, window: Window) -> Tally:
        """A closed loop: so many clients, until the window is over. Their requests are made as they are needed."""
        tally = Tally()

        def send_next() -> None:
            if not window.is_over:
                self.send(self.requests(1)[0], tally, send_next)

        for _ in range(concurrency):
            send_next()
        while self.wires.num_busy:
            self._look(window, tally)
            self.wires.wait(PROBE_S)
        return tally

    def open(self, arrivals: Sequence[Arrival], requests: Sequence[tuple[bytes, int]], window: Window) -> Tally:
        """An open loop: each at its time."""
        tally = Tally()
        num_sent, start_s = 0, time.perf_counter()
        while num_sent < len(arrivals) or self.wires.num_busy:
            self._look(window, tally)
            now_s = time.perf_counter() - start_s
            while num_sent < len(arrivals) and arrivals[num_sent].at_s <= now_s:
                self.send(requests[num_sent], tally)
                num_sent += 1
            next_s = arrivals[num_sent].at_s if num_sent < len(arrivals) else now_s + PROBE_S
            self.wires.wait(min(next_s - now_s, PROBE_S))
        return tally

    def _look(self, window: Window, tally: Tally) -> None:
        """Read the clocks, and ask now and then how the server does."""
        window.look()
        if window.is_over or time.perf_counter() < self._next_probe_s:
            return
        self._next_probe_s = inf

        def told(status: int, _answer: bytes, took_s: float) -> None:
            assert status == 200, f"/ping answered {status}"
            tally.health_ms.append(took_s * 1000)
            self._next_probe_s = time.perf_counter() + PROBE_S

        self.wires.send(PING, told)


def find_peak(load: Load, pid: int, arguments: argparse.Namespace) -> tuple[float, float, int]:
    """Tokens a second, and a second of processor time, of as many clients as have room; how many answers were lost."""
    window = Window(pid, arguments.seconds)
    tally = load.at_once(arguments.max_num_seqs, window)
    peak, peak_by_cpu = window.rates(tally)
    if not peak:
        sys.exit("bench_overload: no answer came within the time in which the peak is measured: use more --seconds")
    return peak, peak_by_cpu, tally.num_lost


def find_goodput(load: Load, pid: int, arguments: argparse.Namespace, peak: float, turn: int) -> dict[str, Any]:
    """What comes of asking too much."""
    per_s = arguments.overload * peak / arguments.output_len
    rng = random.Random(arguments.seed + turn)
    arrivals = poisson([Arrival(0.0, 0, 0)] * int(per_s * arguments.seconds), per_s, rng)
    requests = load.requests(len(arrivals))  # before the clock starts: it takes long
    start_cpu_s, start_s = time.process_time(), time.perf_counter()
    window = Window(pid, arrivals[-1].at_s)
    tally = load.open(arrivals, requests, window)
    goodput, goodput_by_cpu = window.rates(tally)
    return {
        "goodput": goodput,
        "goodput_by_cpu": goodput_by_cpu,
        "tally": tally,
        "client_cpu": (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s),
    }


def measure(arguments: argparse.Namespace, server: Server) -> dict[str, Any]:
    """The figures of all rounds. Each is compared with the peaks before and behind it: the machine's clock changes."""
    load = Load(server.port, arguments.input_len, arguments.output_len, arguments.seed)
    (pid,) = server.processes()
    load.at_once(arguments.max_num_seqs, Window(pid, arguments.warm_up_seconds))
    peaks, rounds = [find_peak(load, pid, arguments)], []
    for turn in range(arguments.rounds):
        rounds.append(find_goodput(load, pid, arguments, peaks[-1][0], turn))
        peaks.append(find_peak(load, pid, arguments))
    load.wires.close()
    tallies = [one["tally"] for one in rounds]
    refused_ms = [took for tally in tallies for took in tally.refused_ms]
    health_ms = [took for tally in tallies for took in tally.health_ms]
    around = [[(one + other) / 2 for one, other in zip(*pair, strict=True)] for pair in pairwise(peaks)]
    ratios = [one["goodput"] / peak for one, (peak, _, _) in zip(rounds, around, strict=True)]
    ratios_by_cpu = [one["goodput_by_cpu"] / peak for one, (_, peak, _) in zip(rounds, around, strict=True)]
    return {
        "peak_tokens_per_s": median(peak for peak, _, _ in peaks),
        "goodput_tokens_per_s": median(one["goodput"] for one in rounds),
        "goodput_over_peak": median(ratios),
        "goodput_by_cpu": median(ratios_by_cpu),
        "by_round": [[round(one, 3) for one in each] for each in (ratios, ratios_by_cpu)],
        "asked": sum(tally.statuses.total() for tally in tallies),
        "answered": sum(tally.statuses[200] for tally in tallies),
        "refused": sum(tally.statuses[429] for tally in tallies),
        "lost": sum(tally.num_lost for tally in tallies) + sum(num_lost for _, _, num_lost in peaks),
        **{f"refused_ms_p{percent}": percentile(refused_ms, percent) for percent in (50, 99)},
        **{f"health_ms_p{percent}": percentile(health_ms, percent) for percent in (50, 99)},
        "probes": len(health_ms),
        "client_cpu": median(one["client_cpu"] for one in rounds),
    }


def apart(is_shared: bool) -> tuple[set[int], set[int]]:
    """The cores of the server and of the client. Exits where one core is all there is to be divided."""
    cores = os.sched_getaffinity(0)
    if is_shared:
        return cores, cores
    if len(cores) < 2:
        sys.exit("bench_overload: one core cannot be divided: use --shared")
    own = max(cores)
    return cores - {own}, {own}


SIZES: Final = {"max-num-seqs": 32, "max-num-queued-reqs": 64, "input-len": 32, "output-len": 64, "seed": 1}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--overload", type=float, default=10.0, help="times the peak")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each loop; the clock drifts in long ones")
    parser.add_argument("--warm-up-seconds", type=float, default=2.0)
    parser.add_argument("--shared", action="store_true", help="client and server share all cores")
    parser.add_argument("--min-goodput", type=float, default=0.95, help="against the peak")
    parser.add_argument("--refused-p99-ms", type=float, default=50.0)
    parser.add_argument("--health-p99-ms", type=float, default=20.0)
    arguments = parser.parse_args(words)
    exit_on_sigterm()
    port = free_port()
    sizes = {name: getattr(arguments, name.replace("-", "_")) for name in SIZES}
    flags = [f"--{name}={sizes[name]}" for name in ("max-num-seqs", "max-num-queued-reqs")]
    command = [sys.executable, "-m", "aserve", "--model", arguments.model, f"--port={port}", *flags]
    all_cores = os.sched_getaffinity(0)
    servers_cores, own_cores = apart(arguments.shared)
    try:
        os.sched_setaffinity(0, servers_cores)  # the server's, which inherits it
        with tempfile.TemporaryDirectory() as folder, Server(command, port, Path(folder) / "server.log") as server:
            os.sched_setaffinity(0, own_cores)
            server.wait_for("/ready", START_S)
            figures = measure(arguments, server)
    finally:
        os.sched_setaffinity(0, all_cores)
    cores = {"server_cores": len(servers_cores), "client_cores": len(own_cores), "shared": arguments.shared}
    times = {"overload": arguments.overload, "seconds": arguments.seconds, "rounds": arguments.rounds}
    emit("overload", {"model": arguments.model, **sizes, **times, **cores}, figures)
    is_good = (
        figures["lost"] == 0
        and figures["goodput_over_peak"] >= arguments.min_goodput
        and figures["refused_ms_p99"] <= arguments.refused_p99_ms
        and figures["health_ms_p99"] <= arguments.health_p99_ms
    )
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
