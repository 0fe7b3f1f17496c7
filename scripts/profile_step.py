"""Where the time of a step goes on a CPU: milliseconds by kernel and by operator, of decoding steps and of prompts.

`step_ms` is the median of steps without a profiler, the rest is of some that were profiled: see
aserve/cli/bench/profile.py. One JSON line a kind of step.

    python scripts/profile_step.py --model models/q05 --decode 1 32 --prefill 128 512
"""

import argparse
import asyncio

from report import emit

from aserve import build
from aserve.cli.bench.profile import profile_steps


async def run(args: argparse.Namespace) -> None:
    """Load, then every kind of step."""
    model = {"model": args.model, "quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    options = build.make_options(**model)
    async for kind, found in profile_steps(options, args.decode, args.prefill, args.context, args.steps):
        emit("profile", model | kind, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization", help="as of aserve")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of aserve")
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 32], help="rows of decoding steps")
    parser.add_argument("--prefill", type=int, nargs="+", default=[128, 512], help="tokens of a prompt")
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--steps", type=int, default=20, help="timed, and as many profiled")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
