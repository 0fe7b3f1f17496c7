"""The GPU check proves itself without a GPU: every step runs on tiny shapes, and the table has all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.torch
def test_a_dry_run_ends_well_and_reports_every_step(tmp_path):
    done = run(tmp_path, "bash", "scripts/gpu_check.sh", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {result["bench"] for result in found} == {"kernels", "decode", "offline"}
    for step in ("kernel_tests", "gpu_tests", "bench_kernels", "bench_decode_tiny", "bench_offline_tiny"):
        assert f"{step} ok" in done.stdout
    assert "tokens_per_s=" in done.stdout


def test_the_report_lines_cells_up_and_keeps_every_result(tmp_path):
    (tmp_path / "steps.txt").write_text("bench_a ok, 3 s\n")
    lines = [{"bench": "a", "size": 10, "us": 1.5, "commit": "x"}, {"bench": "longer", "size": 2, "us": 30.0}]
    (tmp_path / "bench_a.log").write_text("noise\n" + "".join(json.dumps(line) + "\n" for line in lines))
    done = run(tmp_path, sys.executable, "scripts/gpu_report.py", str(tmp_path))
    assert done.stdout.splitlines() == ["bench_a ok, 3 s", "", "a       size=10  us=1.5", "longer  size=2   us=30.0"]
    assert [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()] == lines
