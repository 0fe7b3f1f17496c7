import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aserve.kernels.dispatch import select_ops
from aserve.kernels.ops import HeadNormOps

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_the_dry_run_measures_every_kernel() -> None:
    command = [sys.executable, "scripts/bench_kernels.py", "--dry-run"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    results = [json.loads(line) for line in output.splitlines()]
    assert {result["kernel"] for result in results} == {
        "copy",
        "matmul",
        "rms_norm",
        "add_rms_norm",
        "silu_and_mul",
        "rope_and_write_kv",
        *["norm_rope_and_write_kv"] * isinstance(select_ops(torch.device("cpu")), HeadNormOps),
        "decode_attention",
        "prefill_attention",
        "torch_linear",
        "sample",
    }
    assert all(result["us"] > 0 and result["gb_per_s"] > 0 for result in results)
