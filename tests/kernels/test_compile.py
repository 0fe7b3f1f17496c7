"""Every kernel, in the head sizes and types that models have, becomes machine code for an H100 or H200 that fits it.

The strongest check that needs no GPU: the interpreter takes more than the compiler does.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SHARED_BYTES_OF_A_HOPPER_SM = 227 * 1024
SHARED_BYTES_OF_AN_ADA_SM = 99 * 1024
MAX_STACK_BYTES = 64
"""A thread's, in the largest heads: a few registers in and out of the first cache, beside hundreds that stay."""
ROOT = Path(__file__).parents[2]

Variants = list[dict[str, object]]
"""What offline_shapes.py reports of each variant of each kernel."""


def compiled_variants(folder: Path, *arguments: str) -> Variants:
    """For the GPU that the arguments of offline_shapes.py name; compiled anew where the folder is empty."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-m", "tests.kernels.offline_shapes", *arguments]
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Variants]:
    """For an H100 or H200, and attention for an L4 or RTX 40: both at once, for each takes a core a minute."""
    folder = tmp_path_factory.mktemp("triton")
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda arguments: compiled_variants(folder, *arguments), ((), ("89",))))


@pytest.fixture(scope="module")
def variants(compiled: list[Variants]) -> Variants:
    """For an H100 or H200."""
    return compiled[0]


def test_every_kernel_compiles_in_every_shape(variants: Variants) -> None:
    """A new kernel belongs into offline_shapes.py."""
    sources = [path.read_text() for path in (ROOT / "aserve/kernels").glob("*.py")]
    written = {name for source in sources for name in re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)}
    assert {variant["kernel"] for variant in variants} == written


def test_shared_memory_suffices(variants: Variants) -> None:
    assert [v for v in variants if v["shared_bytes"] > SHARED_BYTES_OF_A_HOPPER_SM] == []


def test_registers_suffice(variants: Variants) -> None:
    assert [v for v in variants if v["stack_bytes"] > MAX_STACK_BYTES] == []
    assert [v for v in variants if v["stack_bytes"] and v.get("head_dim", 0) == 128] == []


def test_attention_fits_a_gpu_with_little_shared_memory(compiled: list[Variants]) -> None:
    """An L4 or RTX 40, whose tiles are smaller."""
    variants = compiled[1]
    assert {"_decode_kernel", "_combine_kernel", "_prefill_kernel"} <= {variant["kernel"] for variant in variants}
    assert [v for v in variants if v["shared_bytes"] > SHARED_BYTES_OF_AN_ADA_SM] == []
    assert [v for v in variants if v["stack_bytes"] > MAX_STACK_BYTES] == []
