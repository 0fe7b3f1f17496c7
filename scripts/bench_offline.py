"""Throughput without HTTP: all requests at once through LLM.generate, prompts as random token ids, one JSON line.

The default is 32 requests of 128 tokens in and 64 out. --uniform LOW HIGH draws both lengths uniformly, and makes 256
requests of them: with 100 1024 they are the lengths that nano-vllm and mini-sglang publish, to the token (142,827 in,
133,966 out; they sample at --temperature 0.6). --scale asks for a part of the requests.

    python scripts/bench_offline.py --model demo
    python scripts/bench_offline.py --model MODEL --uniform 100 1024 --scale 0.25
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from report import emit

from aserve import LLM, SamplingParams

PUBLISHED_IDS = 10_000
"""Ids of the published workload are drawn from [0, 10000]; drawing as many makes the same lengths of the same seed."""

Workload = tuple[list[list[int]], list[int]]
"""Prompts, and tokens of each answer."""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, and the demo model's tokenizer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--requests", type=int, help="256 with --uniform, else 32")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many requests")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--uniform", type=int, nargs=2, metavar=("LOW", "HIGH"))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--token-range", type=int, nargs=2, default=(300, 1000), help="ids are drawn from [low, high)")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(words)


def num_requests(args: argparse.Namespace) -> int:
    """After --scale, at least one."""
    count: int = args.requests or (256 if args.uniform else 32)
    return max(1, round(float(args.scale) * count))


def uniform_workload(rng: random.Random, count: int, bounds: tuple[int, int], token_range: tuple[int, int]) -> Workload:
    """The first of the requests that the published benchmark draws, in the order in which it draws them."""
    low, high = token_range
    prompts = [
        [low + rng.randint(0, PUBLISHED_IDS) % (high - low) for _ in range(rng.randint(*bounds))] for _ in range(count)
    ]
    return prompts, [rng.randint(*bounds) for _ in range(count)]


def draw(args: argparse.Namespace, rng: random.Random) -> Workload:
    """One round's requests."""
    count = num_requests(args)
    if args.uniform:
        return uniform_workload(rng, count, args.uniform, args.token_range)
    prompts = [[rng.randrange(*args.token_range) for _ in range(args.input_len)] for _ in range(count)]
    return prompts, [args.output_len] * count


def time_round(llm: LLM, workload: Workload, temperature: float) -> tuple[float, int]:
    """Answer all of it: seconds, and tokens that were made."""
    prompts, lengths = workload
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=num_out) for num_out in lengths]
    start_s = time.perf_counter()
    completions = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start_s, sum(len(one.token_ids) for one in completions)


def main() -> None:
    args = parse_arguments()
    rng = random.Random(0)
    options: dict[str, Any] = {name: getattr(args, name) for name in ("load_format", "device", "dtype", "max_num_seqs")}
    if args.load_format == "dummy":
        options["tokenizer"] = "demo"
    workloads = [draw(args, rng) for _ in range(args.rounds)]
    with LLM(args.model, **options) as llm:
        time_round(llm, ([[args.token_range[0]] * 16] * 2, [4] * 2), 0.0)  # the first requests are slower
        rounds = [time_round(llm, workload, args.temperature) for workload in workloads]
    config = {"model": args.model, "requests": num_requests(args), "rounds": args.rounds}
    config["lengths"] = list(args.uniform) if args.uniform else [args.input_len, args.output_len]
    num_in = statistics.mean(sum(map(len, prompts)) for prompts, _ in workloads)
    figures = {
        "output_tokens_per_s": statistics.median(num_out / seconds for seconds, num_out in rounds),
        "total_tokens_per_s": statistics.median((num_in + num_out) / seconds for seconds, num_out in rounds),
        "wall_s": statistics.median(seconds for seconds, _ in rounds),
    }
    emit("offline", config, figures)


if __name__ == "__main__":
    main()
