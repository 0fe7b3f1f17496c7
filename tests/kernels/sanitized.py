"""Runs the tests of the CPU kernels with kernels that watch every access and every undefined operation.

    python -m tests.kernels.sanitized
    python -m tests.kernels.sanitized --planted    calls a kernel with a row too many, which has to end the process

GCC's address and undefined sanitizers (Serebryany et al., "AddressSanitizer", USENIX ATC 2012). The first accesses out
of bounds, and the first undefined operation, end the process. Their library has to be loaded before Python's, so the
process starts itself anew.
"""

import os
import platform
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

from aserve.kernels.native import library as native
from aserve.kernels.native.library import Library
from aserve.kernels.native.native_ops import NativeOps

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
PRELOADED = "ASERVE_SANITIZED"
TESTS = (
    *("test_native.py", "test_norm.py", "test_activation.py", "test_rope.py", "test_sampling.py", "test_scores.py"),
    *("test_native_linear.py", "test_native_attention.py", "test_lora.py"),
)
NOT_THESE = "threads_that_torch_has or compiler or folder or processor or sources"
"""Tests of how kernels are compiled, which is done otherwise here."""


def main() -> int:
    """The exit status of pytest."""
    if PRELOADED not in os.environ:
        libraries = [
            subprocess.run(
                ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        # Python and torch leave much behind when they end, and torch's own code is not watched.
        options = {"ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1", PRELOADED: "1", "LD_PRELOAD": ":".join(libraries)}
        return subprocess.run(
            [sys.executable, "-m", "tests.kernels.sanitized", *sys.argv[1:]], check=False, env=os.environ | options
        ).returncode

    with tempfile.TemporaryDirectory() as folder:
        variant = native.choose_variant(platform.machine(), native._processor_flags())
        path = native.compile_variant(variant, Path(folder), extra_flags=FLAGS)
        native._places = lambda variant: iter([path])
        # Fixtures that compile compile the same.
        machine = platform.machine()
        native.VARIANTS = {machine: {variant: native.VARIANTS[machine][variant]}}
        native.compile_variant = partial(native.compile_variant, extra_flags=FLAGS)
        if "--planted" in sys.argv:
            return read_a_row_too_many(native.library())
        files = [str(Path(__file__).with_name(name)) for name in TESTS]
        return int(pytest.main(["-q", "-x", "-k", f"native and not ({NOT_THESE})", "-p", "no:cacheprovider", *files]))


def read_a_row_too_many(library: Library) -> int:
    """What the sanitizers have to find."""
    x_TE, weight_E, out_TE = torch.ones(4, 64), torch.ones(64), torch.ones(5, 64)
    NativeOps(library)._kernels[x_TE.dtype]["rms_norm"](
        x_TE.data_ptr(), 64, weight_E.data_ptr(), out_TE.data_ptr(), 5, 64, 1e-6
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
