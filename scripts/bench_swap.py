"""Swap against recomputation: output tokens per second of groups of four that do not fit the KV cache together.

One runner, and for each run a fresh scheduler. In a round every mode runs once, in turns, so that what else the machine
does hits all of them. The cache holds --share of the blocks that all groups would fill. One JSON line: the median of
each mode, and medians over rounds of swap over recomputation, and of the rule's own choice over the better of both.

    python scripts/bench_swap.py --model demo
"""

import argparse
import asyncio
import random
import statistics
import time

import msgspec
from report import emit

from aserve import build
from aserve.core.config import PREEMPTION_MODES, PreemptionMode
from aserve.core.ids import RequestId
from aserve.core.params import SamplingParams
from aserve.core.request import Request
from aserve.engine import EngineParts
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduler.statistics import Statistics
from aserve.scheduling import make_scheduler

NUM_CHOICES = 4


def workload(args: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Groups of random prompts, sampled to their full length: nothing ends a choice early."""
    rng = random.Random(0)
    return [
        Request(
            id=RequestId(str(index)),
            prompt_token_ids=tuple(rng.randrange(vocab_size) for _ in range(args.input_len)),
            params=SamplingParams(n=NUM_CHOICES),
            max_tokens=args.output_len,
            seed=index,
            arrival_s=0.0,
        )
        for index in range(args.groups)
    ]


def num_blocks(args: argparse.Namespace, block_size: int) -> int:
    """--share of what all groups fill, each prompt's full blocks once; and the null block."""
    num_shared = args.input_len // block_size
    num_own = -(-(args.input_len + args.output_len) // block_size) - num_shared
    return 1 + int(args.share * args.groups * (num_shared + NUM_CHOICES * num_own))


def scheduler_of(parts: EngineParts, mode: PreemptionMode, args: argparse.Namespace) -> Scheduler:
    """That of an engine with a small cache, in which sequences give way in the given mode."""
    wanted = num_blocks(args, parts.config.block_size)
    assert wanted <= parts.config.num_blocks, "the runner holds all blocks that a scheduler hands out"
    return make_scheduler(msgspec.structs.replace(parts.config, num_blocks=wanted, preemption_mode=mode))


async def run(parts: EngineParts, scheduler: Scheduler, requests: list[Request]) -> tuple[float, Statistics]:
    """Output tokens per second of all requests at once, one step planned ahead where the engine loop may."""
    start_s = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    num_tokens = 0
    flying = None
    while True:
        may_plan = flying is None or scheduler.max_in_flight > 1
        plan = scheduler.plan(time.perf_counter() - start_s) if may_plan else None
        launched = parts.runner.launch(plan) if plan is not None else None
        if flying is not None:
            step = scheduler.commit(await flying.land())
            num_tokens += len(step.token_ids) + sum(len(delta.token_ids) for delta in step.deltas)
        elif launched is None:
            return num_tokens / (time.perf_counter() - start_s), scheduler.statistics()
        flying = launched


async def bench(parts: EngineParts, args: argparse.Namespace) -> dict[str, float]:
    """The figures: rates by mode, their ratios, and how many preemptions the last round of each mode had."""
    requests = workload(args, parts.info.vocab_size)
    rates: dict[PreemptionMode, list[float]] = {mode: [] for mode in PREEMPTION_MODES}
    counts: dict[PreemptionMode, Statistics] = {}
    await run(parts, scheduler_of(parts, "swap", args), requests[:1])  # memory is touched for the first time
    for index in range(args.rounds):
        first = index % len(PREEMPTION_MODES)
        for mode in (*PREEMPTION_MODES[first:], *PREEMPTION_MODES[:first]):
            rate, counts[mode] = await run(parts, scheduler_of(parts, mode, args), requests)
            rates[mode].append(rate)
    swap_ratio = statistics.median(s / r for s, r in zip(rates["swap"], rates["recompute"], strict=True))
    better: PreemptionMode = "swap" if swap_ratio > 1 else "recompute"
    return {
        **{f"{mode}_tokens_per_s": statistics.median(of_mode) for mode, of_mode in rates.items()},
        "swap_over_recompute": swap_ratio,
        "auto_over_better": statistics.median(a / b for a, b in zip(rates["auto"], rates[better], strict=True)),
        "preemptions_recompute": counts["recompute"].num_preemptions,
        "preemptions_swap": counts["swap"].num_preemptions,
        "swap_outs_swap": counts["swap"].num_swap_outs,
        "swap_outs_auto": counts["auto"].num_swap_outs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, and the demo model's tokenizer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--swap-space", type=float, default=0.125, help="GiB")
    parser.add_argument("--groups", type=int, default=8, help=f"requests with n = {NUM_CHOICES}")
    parser.add_argument("--input-len", type=int, default=192)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.5, help="of the blocks wanted that the cache holds")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    options = build.make_options(
        model=args.model,
        load_format=args.load_format,
        device=args.device,
        tokenizer="demo" if args.load_format == "dummy" else None,
        swap_space=args.swap_space,
        max_model_len=args.input_len + args.output_len,
    )
    parts = build.load(options, lambda _: None)
    try:
        figures = asyncio.run(bench(parts, args))
    finally:
        parts.runner.close()
    config = {name: getattr(args, name) for name in ("model", "groups", "input_len", "output_len", "share", "rounds")}
    emit("swap", config, figures)


if __name__ == "__main__":
    main()
