"""The CPU kernels under sanitizers; see sanitized.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cases import native_ops

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("arguments", [(), pytest.param(("--all",), marks=pytest.mark.thorough)], ids=str)
def test_sanitizers_watch_the_kernels_and_find_nothing_but_what_is_planted(arguments):
    native_ops()
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.sanitized", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert done.stderr.count("ERROR: AddressSanitizer: heap-buffer-overflow") == 1, done.stderr[-2000:]
