"""Runs the tests of the CPU kernels with kernels that watch every access and every undefined operation.

    python -m tests.kernels.sanitized
    python -m tests.kernels.sanitized --all    those too that take long and reach no other lines

First a process of its own calls a kernel with a row too many, which has to end it: so the sanitizers watch.

GCC's address and undefined sanitizers (Serebryany et al., "AddressSanitizer", USENIX ATC 2012). The first accesses out
of bounds, and the first undefined operation, end the process. Their library has to be loaded before Python's, so the
process starts itself anew.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from aserve.kernels.native import library as native
from aserve.kernels.native.library import Library
from aserve.kernels.native.native_ops import NativeOps

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O1", "-fexpensive-optimizations")
"""The last rounds a product and a sum once (FMA), as optimized kernels do, which have to equal twins to the bit. -g1:
reports name lines but no variables, which took the compiler half of its time.
"""
PRELOADED = "ASERVE_SANITIZED"
TESTS = (
    *("test_native.py", "test_norm.py", "test_activation.py", "test_rope.py", "test_sampling.py", "test_scores.py"),
    *("test_native_linear.py", "test_native_int8.py", "test_native_attention.py", "test_lora.py"),
    *("test_logit_controls.py", "test_block_copy.py", "test_call_table.py", "test_call_memory.py"),
)
NOT_THESE = "threads_that_torch_has or compiler or folder or processor or sources"
"""Tests of how kernels are compiled, which is done otherwise here."""
SLOW = "same_bits"
"""Tests that compare a kernel with itself, in shapes like those of the others: half of the time."""


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
        machine = platform.machine()
        native.VARIANTS = {machine: {variant: native.VARIANTS[machine][variant]}}  # fixtures take each that there is
        if os.fork() == 0:
            read_a_row_too_many(native.library())
            os._exit(0)
        if os.wait()[1] == 0:
            print("a row too many was read, and nothing was said")
            return 1
        files = [str(Path(__file__).with_name(name)) for name in TESTS]
        left_out = NOT_THESE if "--all" in sys.argv else f"{NOT_THESE} or {SLOW}"
        return int(pytest.main(["-q", "-x", "-k", f"native and not ({left_out})", "-p", "no:cacheprovider", *files]))


def read_a_row_too_many(library: Library) -> None:
    """What the sanitizers have to find."""
    x_TE, weight_E, out_TE = torch.ones(4, 64), torch.ones(64), torch.ones(5, 64)
    NativeOps(library)._kernels[x_TE.dtype]["rms_norm"](
        x_TE.data_ptr(), 64, None, weight_E.data_ptr(), out_TE.data_ptr(), None, 5, 64, 1e-6
    )


if __name__ == "__main__":
    sys.exit(main())
