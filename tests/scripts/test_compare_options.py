"""compare_options.py: both sides are steps, and the change is on one of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.torch
@pytest.mark.thorough
def test_a_step_with_an_option_and_without():
    sizes = ["--rows", "2", "--context", "40", "--steps", "3", "--rounds", "3"]
    words = ["--with", "kv_cache_dtype=bfloat16", "--both", "dtype=float32", *sizes]
    command = [sys.executable, "scripts/compare_options.py", *words]
    ran = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=True)
    [result] = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert (result["with"], result["both"]) == ({"kv_cache_dtype": "bfloat16"}, {"dtype": "float32"})
    assert 0 < result["low"] <= result["ratio"] <= result["high"]
    assert min(result["without_ms"], result["with_ms"]) > 0
