"""allocate_kv: shapes, zeros, alignment, and that a CPU cache costs nothing before it is used."""

import resource

import pytest
import torch

from aserve.runner.kv_store import allocate_kv
from tests.runner.toy import ToyLM

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_zero_and_aligned(dtype):
    [layer] = allocate_kv(ToyLM.spec, num_blocks=5, block_size=8, dtype=dtype, device=CPU).layers
    for cache in (layer.k_BPKD, layer.v_BPKD):
        assert cache.shape == (5, 8, 1, 1)
        assert cache.dtype == dtype
        assert not cache.any()
        assert cache.data_ptr() % 64 == 0
    assert layer.k_BPKD.data_ptr() != layer.v_BPKD.data_ptr()


def test_pages_are_taken_when_they_are_written():
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kv = allocate_kv(ToyLM.spec, num_blocks=2**24, block_size=16, dtype=torch.float32, device=CPU)
    assert kv.layers[0].k_BPKD.nbytes == 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2**16
