"""The host tier: time to first token of a prefix that was evicted from the device and is asked for again.

One runner, and two schedulers that differ in the tier alone. In a round each of them answers a prompt, then others
until its cache holds nothing of the first, and then the first once more, whose first token is timed. The cache holds
two prompts. One JSON line: medians of both, their ratio, and whether the engine would have the tier here by itself.

    python scripts/bench_host_tier.py --model demo
"""

import argparse
import asyncio
import random
import statistics
import time

import msgspec
from report import emit

from aserve import build
from aserve.core.ids import RequestId
from aserve.core.params import SamplingParams
from aserve.core.request import Request
from aserve.engine import EngineParts
from aserve.kv_cache.host_memory import has_host_tier
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduling import make_scheduler

NUM_OTHERS = 3
"""Prompts between the first and its return; the cache holds two."""


def scheduler_of(parts: EngineParts, num_tokens: int, *, has_tier: bool) -> Scheduler:
    """That of an engine whose cache holds two prompts. The costs are set so that the tier pays, or never does."""
    config = parts.config
    num_blocks = 1 + 2 * -(-(num_tokens + 1) // config.block_size)
    costs = {"recompute_cost_s": 1.0, "swap_cost_s": 0.0 if has_tier else 1e9}
    return make_scheduler(msgspec.structs.replace(config, num_blocks=num_blocks, watermark=0.0, **costs))


async def first_token_s(parts: EngineParts, scheduler: Scheduler, prompt: tuple[int, ...]) -> float:
    """Seconds from `add` to the one token of the answer."""
    start_s = time.perf_counter()
    scheduler.add(
        Request(
            id=RequestId("one"),
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0),
            max_tokens=1,
            seed=0,
            arrival_s=start_s,
        )
    )
    while (plan := scheduler.plan(time.perf_counter())) is not None:
        scheduler.commit(await parts.runner.launch(plan).land())
    scheduler.cancel(RequestId("one"))
    return time.perf_counter() - start_s


async def bench(parts: EngineParts, num_prefix: int, num_rounds: int) -> dict[str, float]:
    """The figures: seconds with and without the tier, and how many times as long it takes without."""
    rng = random.Random(0)

    def prompt() -> tuple[int, ...]:
        return tuple(rng.randrange(parts.info.vocab_size) for _ in range(num_prefix + 1))

    schedulers = {has_tier: scheduler_of(parts, num_prefix + 1, has_tier=has_tier) for has_tier in (True, False)}
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for index in range(num_rounds + 1):
        again, others = prompt(), [prompt() for _ in range(NUM_OTHERS)]
        for has_tier in (True, False) if index % 2 else (False, True):
            scheduler = schedulers[has_tier]
            for each in (again, *others):
                await first_token_s(parts, scheduler, each)
            elapsed_s = await first_token_s(parts, scheduler, again)
            if index:  # the first round touches memory for the first time
                times_s[has_tier].append(elapsed_s)
    num_spans = num_prefix // parts.config.block_size
    assert schedulers[True].statistics().num_host_hit_blocks >= num_rounds * num_spans, "each return is one of the tier"
    assert schedulers[False].statistics().num_cache_hits == 0, "without it the prefix is gone"
    return {
        "ttft_tier_s": statistics.median(times_s[True]),
        "ttft_without_s": statistics.median(times_s[False]),
        "without_over_tier": statistics.median(b / a for a, b in zip(times_s[True], times_s[False], strict=True)),
        "chosen": has_host_tier(parts.config),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, and the demo model's tokenizer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--swap-space", type=float, default=0.125, help="GiB")
    parser.add_argument("--prefix-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    options = build.make_options(
        model=args.model,
        load_format=args.load_format,
        device=args.device,
        tokenizer="demo" if args.load_format == "dummy" else None,
        swap_space=args.swap_space,
        max_model_len=args.prefix_len + 2,
    )
    parts = build.load(options, lambda _: None)
    try:
        figures = asyncio.run(bench(parts, args.prefix_len, args.rounds))
    finally:
        parts.runner.close()
    emit("host_tier", {name: getattr(args, name) for name in ("model", "prefix_len", "rounds")}, figures)


if __name__ == "__main__":
    main()
