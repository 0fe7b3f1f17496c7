import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SHARED_BYTES_OF_A_HOPPER_SM = 227 * 1024


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What offline.py reports of each kernel, compiled anew."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.kernels.offline"]
    child = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


def test_every_kernel_compiles_for_hopper_and_fits(kernels: list[dict[str, object]]) -> None:
    assert len(kernels) == 13
    for kernel in kernels:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES_OF_A_HOPPER_SM, kernel


def test_no_kernel_is_compiled_again_as_lengths_change(kernels: list[dict[str, object]]) -> None:
    """Decode attention is compiled for one split and for several, whatever their number."""
    expected = {kernel["kernel"]: 2 if kernel["kernel"] == "_decode_kernel" else 1 for kernel in kernels}
    assert {kernel["kernel"]: kernel["variants"] for kernel in kernels} == expected
