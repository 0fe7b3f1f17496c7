"""The GPU check proves itself without a GPU: every step runs on tiny shapes, and the tables have all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_decode import busy_figures
from gpu_report import GOALS, Results, judged

ROOT = Path(__file__).parents[2]

OF_8B = {"bench": "goals", "model": "scripts/shapes/qwen3-8b"}
OF_SMALL = {"bench": "goals", "model": "qwen3-0.6b"}
PASSING = [
    *(
        {"bench": "decode", "model": f"scripts/shapes/{model}", "context": 1024, "batch": batch, "step_ms": 1.0}
        | {"roofline_share": 0.7, "busy_share": 0.99, "gap_us": 40.0}
        for model in ("llama-3.1-8b", "qwen3-4b", "qwen3-0.6b")
        for batch in (1, 32, 256)
    ),
    *(
        {"bench": "kernels", "kernel": "decode_attention", "seqs": seqs, "context": 4096, "us": 20.0 * seqs}
        | {"gb_per_s": 3900.0}
        for seqs in (8, 16, 17)
    ),
    *(
        {"bench": "kernels", "kernel": "prefill_attention", "seqs": 1, "queries": n, "context": n, "tflop_per_s": 400.0}
        for n in (4096, 8192)
    ),
    *(
        {"bench": "goals", "part": "offline", "model": model, "workload": "published", "output_tokens_per_s": 3e4}
        for model in ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
    ),
    *(
        one | {"part": part, "concurrency": concurrency, "output_tokens_per_s": speed}
        for one in (OF_8B, OF_SMALL)
        for part, speed in (("offline", 100.0), ("serving", 95.0))
        for concurrency in (64, 256)
    ),
    *(OF_8B | {"part": "ttft", "input_len": length, "ttft_p50_ms": 10.0} for length in (128, 2048, 8192)),
    OF_8B | {"part": "load", "itl_p50_ms": 10.0, "itl_p99_ms": 20.0},
    OF_8B | {"part": "prefix", "input_len": 8192, "later_over_first": 0.1},
    OF_SMALL | {"part": "cache_cost", "cost": 0.005},
    OF_SMALL | {"part": "peer", "ratio": 6.0},
    {"bench": "step", "num_running": 256, "total_us": 600.0},
]
NOT_BUILT = "G13"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.torch
def test_a_dry_run_ends_well_and_reports_every_step(tmp_path):
    done = run(tmp_path, "bash", "scripts/gpu_check.sh", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {result["bench"] for result in found} == {"kernels", "decode", "goals", "step"}
    parts = {result["part"] for result in found if result["bench"] == "goals"}
    assert parts == {"offline", "cache_cost", "peer", "serving", "ttft", "load", "prefix"}
    for name in (
        "bench_kernels",
        "test_norm_tests",
        "gpu_tests",
        "bench_decode_tiny",
        "bench_goals_tiny",
        "bench_step",
    ):
        assert f"{name} ok" in done.stdout
    goals = json.loads((tmp_path / "goals.json").read_text())
    assert [goal["name"] for goal in goals] == [goal.name for goal in GOALS]
    assert not {"met", "NOT MET"} & {goal["met"] for goal in goals}


def test_every_goal_that_is_built_is_judged_by_what_was_measured():
    verdicts = {row["name"]: row["met"] for row in judged(Results(PASSING), dry_run=False)}
    assert verdicts == {f"G{n}": "missing" if f"G{n}" == NOT_BUILT else "met" for n in range(1, 15)}


def test_a_goal_is_missed_by_one_figure_among_many():
    slow = PASSING[0] | {"step_ms": 5.0}
    cliff = {"bench": "kernels", "kernel": "decode_attention", "seqs": 18, "context": 4096, "us": 500.0}
    rows = judged(Results([*PASSING, slow, cliff | {"gb_per_s": 3900.0}]), dry_run=False)
    missed = {row["name"]: row["measured"] for row in rows if row["met"] == "NOT MET"}
    assert missed == {"G1": "5 / 1 / 1 ms (70% / 70% / 70%)", "G9": "3.90 TB/s, 1.39 x"}


def test_what_was_not_measured_is_named():
    rows = judged(Results([line for line in PASSING if line.get("part") != "ttft"]), dry_run=False)
    [row] = [row for row in rows if row["name"] == "G7"]
    assert row["met"] == "missing"
    assert "ttft_p50_ms" in row["measured"]
    assert "128" in row["measured"]


def test_the_report_lines_cells_up_and_keeps_every_result(tmp_path):
    (tmp_path / "steps.txt").write_text("bench_a ok, 3 s\n")
    lines = [{"bench": "a", "size": 10, "us": 1.5, "commit": "x"}, {"bench": "longer", "size": 2, "us": 30.0}]
    (tmp_path / "bench_a.log").write_text("noise\n" + "".join(json.dumps(line) + "\n" for line in lines))
    done = run(tmp_path, sys.executable, "scripts/gpu_report.py", str(tmp_path))
    assert done.stdout.splitlines()[:4] == [
        "a       size=10  us=1.5",
        "longer  size=2   us=30.0",
        "",
        "bench_a ok, 3 s",
    ]
    assert [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()] == lines


@pytest.mark.parametrize(
    ("spans_us", "expected"),
    [
        ([], {}),
        ([(0.0, 10.0), (10.0, 20.0)], {"busy_share": 1.0, "gap_us": 0.0}),
        ([(30.0, 40.0), (0.0, 10.0), (5.0, 20.0), (41.0, 50.0)], {"busy_share": 0.78, "gap_us": 5.5}),
    ],
)
def test_a_device_is_busy_while_any_kernel_runs(spans_us, expected):
    assert busy_figures(spans_us, num_steps=2) == pytest.approx(expected)
