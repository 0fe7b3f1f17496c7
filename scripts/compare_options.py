"""What an option does to a step on a CPU: decoding steps with it and without it, in turns, in one process.

A machine's clock and memory have moods of minutes, which fall on both alike: each round times some steps of either, who
is first alternating, and the ratio is the median of the rounds' ratios. One JSON line.

    python scripts/compare_options.py --model models/tiny --with kv_cache_dtype=bfloat16 --rows 32 --context 1000
"""

import argparse
import asyncio
import statistics
from contextlib import ExitStack
from itertools import islice
from typing import Final

from report import emit

from aserve import build
from aserve.cli.bench.profile import times_s
from aserve.cli.bench.step_plans import Rows

WITHOUT: Final = "without"
WITH: Final = "with"


async def ratios(args: argparse.Namespace, common: dict[str, str], changed: dict[str, str]) -> dict[str, object]:
    """Milliseconds of a step by either, and the ratio with its quartiles. Of the rounds the first is a warm-up."""
    num_steps = args.steps * (args.rounds + 1)
    sizes = {"max_num_seqs": args.rows, "max_model_len": args.context + num_steps + 1, "device": "cpu"}
    step_ms: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    with ExitStack() as on_exit:
        runners, plans = {}, {}
        for which, options in ((WITHOUT, common), (WITH, common | changed)):
            parts = build.load(build.make_options(model=args.model, **sizes, **options), lambda _: None)
            on_exit.callback(parts.runner.close)
            rows = Rows(args.rows, args.context, parts.config.block_size, parts.info.vocab_size, num_steps)
            runners[which] = parts.runner
            await times_s(parts.runner, rows.prefill(min(args.context, parts.config.max_num_batched_tokens)))
            plans[which] = map(rows.decode, range(num_steps))
        for turn in range(args.rounds + 1):
            for which in (WITHOUT, WITH) if turn % 2 else (WITH, WITHOUT):
                took_s = await times_s(runners[which], list(islice(plans[which], args.steps)))
                step_ms[which].append(1e3 * statistics.median(took_s))
    without_ms, with_ms = (step_ms[which][1:] for which in (WITHOUT, WITH))
    found = [changed / plain for plain, changed in zip(without_ms, with_ms, strict=True)]
    low, middle, high = statistics.quantiles(found, n=4)
    of_a_step = {"without_ms": statistics.median(without_ms), "with_ms": statistics.median(with_ms)}
    return {"ratio": middle, "low": low, "high": high, **of_a_step}


def read_settings(words: list[str]) -> dict[str, str]:
    """NAME=VALUE, each."""
    return dict(word.split("=", 1) for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--with", dest="changed", nargs="+", required=True, metavar="NAME=VALUE", help="what is compared"
    )
    parser.add_argument(
        "--both", nargs="*", default=[], metavar="NAME=VALUE", help="options of either, such as dtype=float32"
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--steps", type=int, default=20, help="of a round, by either")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    common, changed = read_settings(args.both), read_settings(args.changed)
    config = {"model": args.model, "with": changed, "both": common}
    config |= {name: getattr(args, name) for name in ("rows", "context", "steps", "rounds")}
    emit("options", config, asyncio.run(ratios(args, common, changed)))


if __name__ == "__main__":
    main()
