"""The CPU kernels under sanitizers; see sanitized.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cases import native_ops

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("arguments", "said"), [((), "passed"), (("--planted",), "heap-buffer-overflow")])
def test_sanitizers_watch_the_kernels_and_find_nothing_but_what_is_planted(arguments, said):
    native_ops()
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.sanitized", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (not arguments), done.stdout[-2000:] + done.stderr[-2000:]
    assert said in done.stdout + done.stderr
