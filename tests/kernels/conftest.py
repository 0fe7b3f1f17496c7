"""The fast implementations under test, as fixtures: `fast` in each type, `sampler` in float32 alone.

Triton kernels run compiled where there is a CUDA device, else under Triton's interpreter on CPU tensors. The
interpreter multiplies bfloat16 matrices wrongly, so that type is left to the device. It is chosen when triton is
imported, by an environment variable; where a test of another folder has imported triton already (transformers does),
triton is imported anew: without a device nothing else can use the old one.
"""

import fcntl
import os
import platform
import sys
from importlib.metadata import version

import pytest
import torch

from aserve.kernels.cpu import CpuOps
from aserve.kernels.native import library as native
from aserve.kernels.native.library import Library, find_or_compile
from aserve.kernels.native.native_ops import NativeOps
from tests.kernels.cases import Fast, native_ops
from tests.kernels.interpreter import make_quick

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [n for n in sys.modules if n == "triton" or n.startswith("triton.")]:
        if not name.startswith("triton._C"):  # the extension cannot be loaded twice
            del sys.modules[name]

CPU = [("cpu", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
NATIVE = [("native", dtype) for dtype in (torch.float32, torch.bfloat16)]
TRITON = [("triton", dtype) for dtype in (torch.float32, torch.float16, *[torch.bfloat16] * HAS_CUDA)]


def _name(param: tuple[str, torch.dtype]) -> str:
    return f"{param[0]}-{str(param[1]).removeprefix('torch.')}"


def _build(request: pytest.FixtureRequest) -> Fast:
    name, dtype = request.param
    if name == "triton":
        return _triton(8, dtype)
    torch.manual_seed(0)
    return Fast(native_ops() if name == "native" else CpuOps(), torch.device("cpu"), dtype)


def _triton(num_sms: int, dtype: torch.dtype) -> Fast:
    if not HAS_CUDA and version("triton") < "3.7" and version("numpy") >= "2.4":
        pytest.skip("Triton before 3.7 cannot interpret loops with NumPy 2.4 and later")
    from aserve.kernels.triton_ops import TritonOps

    if not HAS_CUDA:
        make_quick()
    torch.manual_seed(0)
    return Fast(TritonOps(num_sms), torch.device("cuda" if HAS_CUDA else "cpu"), dtype, interpreted=not HAS_CUDA)


RUNNABLE = [
    variant
    for variant, (needed, _) in native.VARIANTS.get(platform.machine(), {}).items()
    if native._processor_flags().issuperset(needed.split())
]


BETWEEN = [pytest.param(variant, marks=pytest.mark.thorough) for variant in RUNNABLE[1:-1]]
"""They have a few lines of their own, and each takes half a minute to compile."""


@pytest.fixture(scope="session", params=[*RUNNABLE[:1], *BETWEEN, *RUNNABLE[1:][-1:]])
def variant_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The kernels of variants that this processor can run: compiled once, whichever process comes first."""
    native_ops()
    with (tmp_path_factory.getbasetemp().parent / "native.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return Library(find_or_compile(request.param), request.param)


@pytest.fixture(scope="session")
def variant_ops(variant_library: Library) -> NativeOps:
    """The operations of each variant."""
    return NativeOps(variant_library)


@pytest.fixture(params=CPU + NATIVE + TRITON, ids=_name)
def fast(request: pytest.FixtureRequest) -> Fast:
    """A fast implementation, its device and a type."""
    return _build(request)


@pytest.fixture(params=TRITON, ids=_name)
def triton_each(request: pytest.FixtureRequest) -> Fast:
    """Triton in each type, for what only it offers."""
    return _build(request)


@pytest.fixture(params=[CPU[0], NATIVE[0], pytest.param(TRITON[0], marks=pytest.mark.slow)], ids=_name)
def sampler(request: pytest.FixtureRequest) -> Fast:
    """A fast implementation in float32, which logits are whatever the model computes in."""
    return _build(request)


@pytest.fixture
def triton_fast() -> Fast:
    """Triton in half precision, for a device of one processor."""
    return _triton(1, torch.float16)
