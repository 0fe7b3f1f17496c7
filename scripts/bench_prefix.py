"""What the prefix cache gives and what it costs. One JSON line for each.

`prefix`: requests one after another that share --prefix-len tokens and have --unique-len of their own; the time to the
first token of the first, which computes all, and of the later ones. Of any server with --url, else of an aserve server
that is started for it.

`prefix_cost`, without --url: no two prompts share anything, so the cache cannot help, with the cache on and off in two
engines of one process, turn and turn about. The cost is the ratio of the medians less one.

    python scripts/bench_prefix.py --model demo
    python scripts/bench_prefix.py --url http://127.0.0.1:8000
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_offline import Workload, time_round
from bench_serving import add_target, target_of
from bench_startup import add_setting, setting_of, start
from load.prefix import prefix_figures, sharing
from load.process import exit_on_sigterm
from peers.table import ASERVE
from report import emit

from aserve import LLM
from aserve.load.arrivals import Arrival
from aserve.load.drive import Target, closed_loop, run
from aserve.load.figures import Figures, medians


async def measure_prefix(args: argparse.Namespace, target: Target) -> list[Figures]:
    """One round after another, each with a prefix of its own."""
    rng = random.Random(args.seed)
    warm_up = Arrival(0.0, args.unique_len, args.prefix_output_len)
    await closed_loop(target, [warm_up] * 2, 1, rng)
    salts = [rng.getrandbits(32) for _ in range(args.rounds)]
    requests = [sharing(args.prefix_len, args.unique_len, args.prefix_output_len)] * args.requests
    return [prefix_figures(await closed_loop(target, requests, 1, rng, salt)) for salt in salts]


def report_prefix(args: argparse.Namespace, target: Target) -> None:
    """Print the line of what sharing gives."""
    figures = medians(run(measure_prefix(args, target)))
    names = ("prefix_len", "unique_len", "requests", "rounds")
    emit("prefix", {"model": args.model, **{name: getattr(args, name) for name in names}}, figures)


def measure_cost(args: argparse.Namespace) -> Figures:
    """Output tokens per second with the cache on and off, prompts that share nothing, and what having it costs."""
    rng = random.Random(args.seed)
    setting = setting_of(args)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    options: dict[str, Any] = {"dtype": setting.dtype, "max_model_len": setting.max_model_len, "device": "cpu"}
    options["kv_cache_memory_bytes"] = setting.kv_bytes
    with (
        LLM(setting.model, **options, enable_prefix_caching=True) as with_cache,
        LLM(setting.model, **options, enable_prefix_caching=False) as without,
    ):
        for turn in range(args.cost_rounds + 1):
            pair = [(True, with_cache), (False, without)]
            for caches, llm in pair if turn % 2 else pair[::-1]:
                seconds, num_out = time_round(llm, fresh_workload(args, rng), 0.0)
                if turn > 0:  # the first round of each is slower
                    speeds[caches].append(num_out / seconds)
    on, off = statistics.median(speeds[True]), statistics.median(speeds[False])
    return {"output_tokens_per_s_on": on, "output_tokens_per_s_off": off, "cost": off / on - 1}


def fresh_workload(args: argparse.Namespace, rng: random.Random) -> Workload:
    """Prompts of random ids."""
    prompts = [
        [rng.randrange(*args.token_range) for _ in range(args.cost_input_len)] for _ in range(args.cost_requests)
    ]
    return prompts, [args.cost_output_len] * args.cost_requests


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs; none is started")
    parser.add_argument("--model", help="a checkpoint's folder (default: demo), or with --url the name to ask for")
    add_target(parser)
    add_setting(parser)
    parser.add_argument("--prefix-len", type=int, default=512)
    parser.add_argument("--unique-len", type=int, default=32)
    parser.add_argument("--prefix-output-len", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16, help="of a round that share the prefix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cost-requests", type=int, default=16)
    parser.add_argument("--cost-input-len", type=int, default=512)
    parser.add_argument("--cost-output-len", type=int, default=32)
    parser.add_argument("--cost-rounds", type=int, default=10)
    return parser.parse_args(words)


def main() -> None:
    args = parse_arguments()
    if args.url is not None:
        report_prefix(args, target_of(args))
        sys.exit()
    args.model = args.model or "demo"
    exit_on_sigterm()
    setting = setting_of(args)
    with tempfile.TemporaryDirectory() as folder, start(ASERVE, setting, Path(folder) / "server.log") as server:
        server.wait_for(ASERVE.ready, args.timeout)
        args.url = server.url
        report_prefix(args, replace(target_of(args), model=None))
    names = ("model", "cost_requests", "cost_input_len", "cost_output_len", "cost_rounds")
    emit("prefix_cost", {name: getattr(args, name) for name in names}, measure_cost(args))


if __name__ == "__main__":
    main()
