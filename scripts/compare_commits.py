"""Plan + commit of a step, of this tree and of an earlier commit, in turns: microseconds, and their ratios.

Each run is a process of its own: `step_times_us` of the bench_step.py that the commit has. The one line of JSON has,
for each number of running sequences, the medians over the rounds and the median of the rounds' ratios. On Linux, pin
both to one core and keep other processes off it, or the noise is larger than what is looked for:

    chrt -f 50 taskset -c 1 python scripts/compare_commits.py 377d046
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import ROOT, emit

RUN = """
import json, statistics, sys
sys.path[:0] = [".", "scripts"]
from bench_step import step_times_us
sizes, num_steps = json.loads(sys.argv[1])
print(json.dumps([statistics.median(step_times_us(size, num_steps)) for size in sizes]))
"""


def medians_us(root: Path, sizes: list[int], num_steps: int) -> list[float]:
    """One run of the tree at `root`: the median step of each size."""
    command = [sys.executable, "-c", RUN, json.dumps([sizes, num_steps])]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{root} failed:\n{ran.stderr[-2000:]}")
    medians: list[float] = json.loads(ran.stdout)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("earlier", help="a commit, by any name that git knows")
    parser.add_argument("--sizes", default="1,64,256", help="numbers of running sequences")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", args.earlier], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        pairs = [[medians_us(root, sizes, args.steps) for root in (Path(folder), ROOT)] for _ in range(args.rounds)]
    for place, size in enumerate(sizes):
        figures[f"earlier_us_{size}"] = statistics.median(earlier[place] for earlier, _ in pairs)
        figures[f"now_us_{size}"] = statistics.median(now[place] for _, now in pairs)
        figures[f"now_over_earlier_{size}"] = statistics.median(now[place] / earlier[place] for earlier, now in pairs)
    emit("step_commits", {"earlier": args.earlier, "steps": args.steps, "rounds": args.rounds}, figures)


if __name__ == "__main__":
    main()
