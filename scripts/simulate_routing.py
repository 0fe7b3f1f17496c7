"""Simulates replicas behind a router on a recorded workload, for several ways to choose a replica.

    python scripts/simulate_routing.py mooncake_conversation.jsonl.gz --replicas 2 4 8 16 32 64 --out routing.jsonl
    python scripts/simulate_routing.py mooncake_conversation.jsonl.gz --replicas 16 --hot 0.5 --out routing.jsonl
    python scripts/simulate_routing.py azure_llm_2023_conv.csv.gz --autoscale
    python scripts/simulate_routing.py --plot routing.png --out routing.jsonl

The trace is one of Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release/traces) or, with lengths alone, of
Azure's (github.com/Azure/AzurePublicDataset). It is replayed in real time; N replicas get the requests of N/16 times as
many users. A replica's speed is such that the load is `--load` where a quarter of what could be found is: what two
choices come to. A line of JSON a run is printed, and kept with --out. --plot needs matplotlib.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from routing.arrivals import Arrival, azure, mooncake, of_users, with_hot_prefix
from routing.autoscale import ByRequests, ByTokens, Scaled
from routing.policies import ByPrefix, Policy, PrefixAffinity, RoundRobin, TwoChoices
from routing.replica import Service
from routing.simulate import Simulation, most_hits

from aserve.routing.scaling import ScalingOptions

POLICIES: dict[str, Callable[[], Policy]] = {
    "round robin": RoundRobin,
    "two choices": TwoChoices,
    "PrefixCacheAffinityRouter": PrefixAffinity,
    "PrefixCacheAffinityRouter, threshold 10": lambda: PrefixAffinity(imbalanced_threshold=10),
    "aserve": ByPrefix,
    "aserve, 4 routers": lambda: ByPrefix(num_routers=4),
}
USERS_OF = 16
"""Replicas that a trace's own users are for."""
MISSED = 0.75
"""Of what one cache of all replicas' size would find, two choices find about a quarter."""


def workload(args: argparse.Namespace, num_replicas: int) -> list[Arrival]:
    """What so many replicas get."""
    arrivals = azure(args.trace) if ".csv" in args.trace.name else mooncake(args.trace)
    arrivals = of_users(arrivals, num_replicas / USERS_OF)
    if args.hot:
        arrivals = with_hot_prefix(arrivals, args.hot)
    return arrivals[: args.max_requests]


def service(args: argparse.Namespace, arrivals: list[Arrival], num_replicas: int) -> Service:
    """Replicas as fast as the load wants them."""
    num_tokens = sum(arrival.num_prompt for arrival in arrivals)
    num_new = num_tokens * (1 - (1 - MISSED) * most_hits(arrivals, num_replicas * args.blocks))
    return Service(num_new / (arrivals[-1].at * num_replicas * args.load), args.blocks)


def compare(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each number of replicas and policy."""
    for num_replicas in args.replicas:
        arrivals = workload(args, num_replicas)
        can = service(args, arrivals, num_replicas)
        said = {
            "bench": "routing",
            "trace": args.trace.name.partition(".")[0],
            "replicas": num_replicas,
            "hot": args.hot,
            "requests": len(arrivals),
            "blocks": args.blocks,
            "prefill_tokens_per_s": round(can.prefill_tokens_per_s),
        }
        bounds = {"no cache is bounded": None, "one cache of all": num_replicas * args.blocks}
        yield said | {"policy": "bound", **{name: round(most_hits(arrivals, most), 4) for name, most in bounds.items()}}
        for name in args.policies:
            outcome = Simulation(arrivals, POLICIES[name](), can, num_replicas).run()
            yield said | {"policy": name, **outcome.to_dict()}


def autoscale(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each way to decide how many there are; fixed numbers are our mean, and the most there may be."""
    arrivals = workload(args, USERS_OF)
    busy = service(args, arrivals, args.replicas[0])
    options = ScalingOptions(min_replicas=1, max_replicas=args.replicas[0] * 4, down_after_s=120.0)
    said = {"bench": "autoscale", "trace": args.trace.name.partition(".")[0], "requests": len(arrivals)}
    mean_replicas = []
    for name, wants in (("by tokens", ByTokens(options)), ("by requests", ByRequests(options))):
        run = Scaled(arrivals, ByPrefix(), busy, args.replicas[0], wants)
        outcome = run.run()
        mean_replicas.append(mean(run.counts))
        yield said | {"policy": name, **outcome.to_dict(), **counts(run)}
    for num in (round(mean_replicas[0]), args.replicas[0] * 4):
        fixed = Simulation(arrivals, ByPrefix(), busy, num).run()
        yield said | {"policy": f"always {num}", **fixed.to_dict()}


def counts(run: Scaled) -> dict[str, Any]:
    """How many replicas there were."""
    changes = sum(one != other for one, other in zip(run.counts, run.counts[1:], strict=False))
    return {
        "mean_replicas": round(mean(run.counts), 2),
        "least": min(run.counts),
        "most": max(run.counts),
        "changes": changes,
    }


def draw(lines: list[dict[str, Any]], out: Path) -> None:
    """Hit rate, first tokens and imbalance by the number of replicas, a line for each policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "hit_rate": "share of prompts' tokens found cached (more is better)",
        "ttft_p50_s": "first token, median, s (less is better)",
        "ttft_p99_s": "first token, 99th percentile, s (less is better)",
        "imbalance": "busiest replica over the mean (less is better)",
    }
    lines = [line for line in lines if line["trace"] == lines[0]["trace"]]
    shown = [line for line in lines if line["bench"] == "routing" and not line["hot"] and "hit_rate" in line]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axis, (figure_name, label) in zip(axes.flat, panels.items(), strict=True):
        for policy in dict.fromkeys(line["policy"] for line in shown):
            points = sorted((line["replicas"], line[figure_name]) for line in shown if line["policy"] == policy)
            is_ours = policy == "aserve"
            if len(points) > 1:
                axis.plot(*zip(*points, strict=True), marker="o", label=policy, linewidth=2.5 if is_ours else 1.2)
        if figure_name == "hit_rate":
            bounds = sorted((line["replicas"], line["one cache of all"]) for line in lines if is_bound(line))
            axis.plot(*zip(*bounds, strict=True), "k--", label="bound: one cache of all", linewidth=1)
            axis.legend(fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_xticks([2, 4, 8, 16, 32, 64], ["2", "4", "8", "16", "32", "64"])
        axis.set_ylim(bottom=1 if figure_name == "imbalance" else 0)
        axis.set_title(label, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("replicas", fontsize=9)
    figure.savefig(out, dpi=110)


def is_bound(line: dict[str, Any]) -> bool:
    """Whether it tells of the bounds of an undisturbed trace."""
    return line["policy"] == "bound" and not line["hot"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--replicas", type=int, nargs="+", default=[16])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES), metavar="NAME")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--blocks", type=int, default=1000, help="of 512 tokens, that a replica's cache has")
    parser.add_argument(
        "--hot", type=float, default=0.0, help="share of requests that begin with one 8192-token prefix"
    )
    parser.add_argument("--max-requests", type=int, default=12_031)
    parser.add_argument("--autoscale", action="store_true")
    parser.add_argument("--out", type=Path, help="lines are added to it")
    parser.add_argument("--plot", type=Path, help="draw the lines of --out")
    args = parser.parse_args()
    if args.plot:
        draw([json.loads(line) for line in args.out.read_text().splitlines()], args.plot)
        return
    if args.trace is None:
        parser.error("a trace is needed")
    for line in autoscale(args) if args.autoscale else compare(args):
        print(json.dumps(line), flush=True)
        if args.out:
            with args.out.open("a") as kept:
                kept.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
