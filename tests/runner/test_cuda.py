"""What TorchCuda asks of torch, as far as a machine without a GPU can tell, and on one the rest."""

from inspect import signature
from pathlib import Path

import pytest
import torch

from aserve.runner.cuda import Cuda, TorchCuda
from aserve.runner.device import CudaDevice
from aserve.runner.kv_store import allocate_kv, allocate_swap
from tests.runner.fake_cuda import FakeCuda
from tests.runner.toy import ToyLM

pytestmark = pytest.mark.torch
METHODS = [name for name in vars(Cuda) if not name.startswith("_")]


@pytest.mark.parametrize("name", ["_host_emptyCache", "_cuda_endAllocateToPool", "_cuda_releasePool"])
def test_torch_has_the_calls_that_are_not_public(name: str) -> None:
    """A version of torch that drops one is found here, and not when a capture fails."""
    assert f"def {name}(" in (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()


@pytest.mark.parametrize("name", METHODS)
def test_the_model_of_a_gpu_takes_what_torch_takes(name: str) -> None:
    ours, fake = (list(signature(getattr(kind, name)).parameters) for kind in (TorchCuda, FakeCuda))
    assert ours == fake == list(signature(getattr(Cuda, name)).parameters)


def test_swap_space_begins_with_a_page() -> None:
    """Page-locking takes whole pages, and may not take a neighbour's."""
    kv = allocate_kv(ToyLM.spec, num_blocks=3, block_size=4, dtype=torch.bfloat16, device=torch.device("cpu"))
    blocks_HYX = allocate_swap(kv, 2**20)
    assert blocks_HYX.shape == (2**20, 2, 4)
    assert blocks_HYX.data_ptr() % 4096 == 0
    blocks_HYX[-1].fill_(3)
    assert blocks_HYX[-2:].sum(dtype=torch.float32) == 24


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_pages_are_locked_and_given_back() -> None:
    from aserve.kernels.triton_ops import TritonOps
    from aserve.runner.swapper import CudaHostStore

    device = torch.device("cuda", torch.cuda.current_device())
    kv = allocate_kv(ToyLM.spec, num_blocks=3, block_size=4, dtype=torch.float32, device=device)
    steps = CudaDevice(device)
    pool = CudaHostStore(TritonOps(num_sms=8), kv, steps, 3 * 2**15, TorchCuda(device))
    assert pool._blocks_HYX.is_pinned()
    pool.close()
    assert not pool._blocks_HYX.is_pinned()
    steps.drain()


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_pages_that_are_locked_already_are_refused() -> None:
    cuda = TorchCuda(torch.device("cuda", torch.cuda.current_device()))
    kv = allocate_kv(ToyLM.spec, num_blocks=3, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    blocks_HYX = allocate_swap(kv, 2**12)
    unlock = cuda.page_lock(blocks_HYX)
    with pytest.raises(RuntimeError, match="CUDA error"):
        cuda.page_lock(blocks_HYX)
    unlock()
    cuda.release_cached()
