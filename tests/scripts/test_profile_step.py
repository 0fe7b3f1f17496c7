"""profile_step.py: what it says of a step adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.torch
@pytest.mark.thorough
def test_operators_and_the_rest_are_the_step():
    command = [sys.executable, "scripts/profile_step.py", "--decode", "2", "--prefill", "16", "--steps", "4"]
    ran = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=True)
    decode, prefill = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert (decode["kind"], decode["rows"], prefill["kind"], prefill["tokens"]) == ("decode", 2, "prefill", 16)
    for result in (decode, prefill):
        assert 0 < len(result["operators_ms"]) <= 8
        assert min(result["operators_ms"].values()) > 0
        assert result["step_ms"] > 0
        assert result["rest_ms"] > 0
        assert sum(took for name, took in result["kernels_ms"].items() if name.startswith("product")) > 0
        assert any(name.startswith("attend") for name in result["kernels_ms"])
