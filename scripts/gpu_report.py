"""The tables at the end of gpu_check.sh: how each step ended, the goals with what was measured, and every figure.

The goals are for one H200, bfloat16, random weights. A goal whose figures are missing says what would bring them.
Writes results.jsonl, every line of every benchmark, and goals.json. `--dry-run` judges nothing: its models are tiny.

    python scripts/gpu_report.py FOLDER [--dry-run]
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

HIDDEN: Final = ("bench", "commit", "machine", "extra_body", "url")
LARGEST_BATCH: Final = 256

Result = dict[str, Any]


class MissingError(Exception):
    """No result has a figure that a goal is about."""


class Results:
    """Every line of every benchmark."""

    def __init__(self, lines: Sequence[Result]) -> None:
        self.lines = lines

    def all(self, **wanted: object) -> list[Result]:
        """The results that have these values; a model is meant by its folder's name."""
        return [one for one in self.lines if all(_value(one, name) == value for name, value in wanted.items())]

    def figure(self, name: str, **wanted: object) -> float:
        """Of the last such result. Raises MissingError."""
        found = [one[name] for one in self.all(**wanted) if one.get(name) is not None]
        if not found:
            raise MissingError(f"{name} of {' '.join(map(str, wanted.values()))}")
        return float(found[-1])


@dataclass(frozen=True)
class Verdict:
    """What was measured of a goal, in words, and whether that is good enough; None: nobody can say."""

    measured: str
    met: bool | None


@dataclass(frozen=True)
class Goal:
    """A line of the table. judge: raises MissingError."""

    name: str
    goal: str
    judge: Callable[[Results], Verdict]


def at_most(limits: Sequence[float], values: Sequence[float], unit: str) -> Verdict:
    """Each value against its limit."""
    met = all(value <= limit for value, limit in zip(values, limits, strict=True))
    return Verdict(f"{' / '.join(f'{value:.4g}' for value in values)} {unit}", met)


def at_least(limits: Sequence[float], values: Sequence[float], unit: str) -> Verdict:
    """Each value against its limit."""
    met = all(value >= limit for value, limit in zip(values, limits, strict=True))
    return Verdict(f"{' / '.join(f'{value:.4g}' for value in values)} {unit}", met)


def decode_step(model: str, *limits_ms: float) -> Callable[[Results], Verdict]:
    """Milliseconds of a step at 1, 32 and 256 sequences, and the share of the roofline."""

    def judge(results: Results) -> Verdict:
        of = {"bench": "decode", "model": model, "context": 1024}
        times_ms = [results.figure("step_ms", **of, batch=batch) for batch in (1, 32, LARGEST_BATCH)]
        shares = [results.figure("roofline_share", **of, batch=batch) for batch in (1, 32, LARGEST_BATCH)]
        verdict = at_most(limits_ms, times_ms, "ms")
        return Verdict(f"{verdict.measured} ({' / '.join(f'{share:.0%}' for share in shares)})", verdict.met)

    return judge


def published_workload(results: Results) -> Verdict:
    models = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
    of = {"bench": "goals", "part": "offline", "workload": "published"}
    return at_least(
        (22e3, 12.5e3, 9.3e3), [results.figure("output_tokens_per_s", **of, model=m) for m in models], "tok/s"
    )


def streaming(results: Results) -> Verdict:
    ratios = []
    for model in ("qwen3-8b", "qwen3-0.6b"):
        for concurrency in (64, 256):
            over_http, offline = (
                results.figure("output_tokens_per_s", bench="goals", part=part, model=model, concurrency=concurrency)
                for part in ("serving", "offline")
            )
            ratios.append(over_http / offline)
    return at_least((0.92, 0.85, 0.80, 0.60), ratios, "of offline")


def busy(results: Results) -> Verdict:
    of = {"bench": "decode", "model": "llama-3.1-8b", "batch": 32}
    share, gap_us = results.figure("busy_share", **of), results.figure("gap_us", **of)
    return Verdict(f"{share:.1%}, {gap_us:.0f} us", share >= 0.97 and gap_us <= 60)


def first_token(results: Results) -> Verdict:
    of = {"bench": "goals", "part": "ttft", "model": "qwen3-8b"}
    times_ms = [results.figure("ttft_p50_ms", **of, input_len=length) for length in (128, 2048, 8192)]
    return at_most((12, 58, 250), times_ms, "ms")


def under_load(results: Results) -> Verdict:
    of = {"bench": "goals", "part": "load", "model": "qwen3-8b"}
    p50_ms, p99_ms = results.figure("itl_p50_ms", **of), results.figure("itl_p99_ms", **of)
    return Verdict(f"{p99_ms / p50_ms:.2f} x ({p99_ms:.3g} / {p50_ms:.3g} ms)", p99_ms <= 2.5 * p50_ms)


def decode_kernel(results: Results) -> Verdict:
    """The slowest with 32k keys or more, and the worst step from a batch size to the next, in time a sequence."""
    cases = sorted(results.all(bench="kernels", kernel="decode_attention"), key=lambda c: (c["context"], c["seqs"]))
    large = [case["gb_per_s"] / 1e3 for case in cases if case["seqs"] * case["context"] >= 2**15]
    cliffs = [
        (after["us"] / after["seqs"]) / (before["us"] / before["seqs"])
        for before, after in pairwise(cases)
        if after["context"] == before["context"]
    ]
    if not large or not cliffs:
        raise MissingError("decode_attention of bench_kernels.py")
    return Verdict(f"{min(large):.2f} TB/s, {max(cliffs):.2f} x", min(large) >= 3.5 and max(cliffs) <= 1.15)


def prefill_kernel(results: Results) -> Verdict:
    speeds = [
        results.figure("tflop_per_s", bench="kernels", kernel="prefill_attention", seqs=1, queries=n, context=n)
        for n in (4096, 8192)
    ]
    return at_least((380, 380), speeds, "TFLOP/s")


def prefix_cache(results: Results) -> Verdict:
    cost = results.figure("cost", bench="goals", part="cache_cost")
    gain = 1 / results.figure("later_over_first", bench="goals", part="prefix", model="qwen3-8b", input_len=8192)
    return Verdict(f"{cost:.1%}, {gain:.1f} x", cost <= 0.01 and gain >= 5)


def peer(results: Results) -> Verdict:
    return at_least((4,), [results.figure("ratio", bench="goals", part="peer")], "x")


def not_built(results: Results) -> Verdict:
    raise MissingError("quantized weights, which aserve does not serve yet")


def host(results: Results) -> Verdict:
    us = results.figure("total_us", bench="step", num_running=LARGEST_BATCH)
    return at_most((1000, 3), (us, us / LARGEST_BATCH), "us a step / a request")


GOALS: Final = (
    Goal("G9", "decode attention >= 3.5 TB/s, no cliff > 1.15 x", decode_kernel),
    Goal("G10", "prefill attention >= 380 TFLOP/s at 4k / 8k", prefill_kernel),
    Goal("G1", "step of Llama-3.1-8B <= 4.8 / 6.2 / 17.0 ms", decode_step("llama-3.1-8b", 4.8, 6.2, 17.0)),
    Goal("G2", "step of Qwen3-4B <= 2.7 / 4.3 / 15.7 ms", decode_step("qwen3-4b", 2.7, 4.3, 15.7)),
    Goal("G3", "step of Qwen3-0.6B <= 1.1 / 2.0 / 10.5 ms", decode_step("qwen3-0.6b", 1.1, 2.0, 10.5)),
    Goal("G4", "offline >= 22k / 12.5k / 9.3k tok/s (0.6B / 4B / 8B)", published_workload),
    Goal("G5", "HTTP >= 0.92 / 0.85 (8B), 0.80 / 0.60 (0.6B) of offline", streaming),
    Goal("G6", "busy >= 97 %, gap <= 60 us (8B, 32 sequences)", busy),
    Goal("G7", "first token <= 12 / 58 / 250 ms (8B: 128, 2k, 8k)", first_token),
    Goal("G8", "ITL p99 <= 2.5 x p50 at 70 % load (8B)", under_load),
    Goal("G11", "prefix cache: cost <= 1 %, gain >= 5 x at 8k / 90 %", prefix_cache),
    Goal("G12", ">= 4 x transformers' continuous batching", peer),
    Goal("G13", "FP8 >= 1.35 x / 1.1 x of bf16 (8B: 1, 256)", not_built),
    Goal("G14", "host <= 1.0 ms a step, 3 us a request (256)", host),
)


def judged(results: Results, *, dry_run: bool) -> list[dict[str, str]]:
    """The table of goals, as text."""
    rows = []
    for goal in GOALS:
        try:
            verdict = goal.judge(results)
            met = {None: "?", True: "met", False: "NOT MET"}[None if dry_run else verdict.met]
            measured = verdict.measured
        except MissingError as missing:
            met, measured = "missing", f"missing: {missing}"
        rows.append({"name": goal.name, "goal": goal.goal, "measured": measured, "met": met})
    return rows


def read_results(log: Path) -> list[Result]:
    """The JSON lines of a benchmark's log."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"bench"')]


def cells(result: Result) -> list[str]:
    """A result as the cells of a row: its benchmark, then each figure with its name."""
    return [str(result["bench"]), *(f"{name}={value}" for name, value in result.items() if name not in HIDDEN)]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, one below the other."""
    widths = [
        max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(max(map(len, rows), default=0))
    ]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )


def _value(result: Result, name: str) -> object:
    value = result.get(name)
    return Path(value).name if name == "model" and isinstance(value, str) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    logs = sorted(args.folder.glob("*.log"))
    found = [result for log in logs for result in read_results(log)]
    goals = judged(Results(found), dry_run=args.dry_run)
    (args.folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in found))
    (args.folder / "goals.json").write_text(json.dumps(goals, indent=1) + "\n")
    print(aligned([cells(result) for result in found]))
    print()
    print((args.folder / "steps.txt").read_text())
    for log in logs:
        if log.stem.endswith("_tests"):
            print(f"{log.stem}: {log.read_text().strip().splitlines()[-1:]}")
    print()
    print(aligned([[row["name"], row["goal"], row["measured"], row["met"]] for row in goals]))


if __name__ == "__main__":
    main()
