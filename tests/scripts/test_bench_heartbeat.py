"""The heartbeat benchmark runs. How late a beat may come depends on who else uses the machine; what the event loop is
busy with does not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
@pytest.mark.e2e
def test_the_event_loop_stays_free_under_load():
    sizes = ["--streams", "16", "--rounds", "1", "--prompt-tokens", "200000"]
    bounds = ["--max-ms", "60000", "--p99-ms", "60000", "--health-p99-ms", "60000"]
    run = subprocess.run(
        [sys.executable, "scripts/bench_heartbeat.py", *sizes, *bounds],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(run.stdout)
    assert 0 <= figures["late_ms_p50"] <= figures["late_ms_p99"] <= figures["late_ms_max"]
    assert figures["busy_ms_p99"] < 50
    assert figures["busy_ms_max"] < 250
    assert figures["num_beats"] > 20
    assert figures["num_probes"] > 5
