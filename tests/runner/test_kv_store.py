"""allocate_kv: shapes, zeros, alignment, and that a CPU cache costs nothing before it is used."""

import resource
from pathlib import Path

import pytest
import torch

from aserve.runner.kv_store import Pages, allocate_kv
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


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_first_pages_are_taken_in_pieces_and_what_they_hold_stays():
    """Catches pages that are only read, which takes none, planes that are left out, and blocks that are overwritten."""
    kv = allocate_kv(ToyLM.spec, num_blocks=2**20, block_size=16, dtype=torch.float32, device=CPU)  # 2 planes of 64 MiB
    kv.planes_YBX[:, 7] = 3.0
    pages, before, num_pieces = Pages(kv.planes_YBX, 32 * 2**20), resident_bytes(), 0
    while pages.take_next():
        num_pieces += 1
    assert num_pieces == 16
    assert 24 * 2**20 < resident_bytes() - before < 48 * 2**20
    assert (kv.planes_YBX[:, 7] == 3.0).all()
    assert kv.planes_YBX.count_nonzero() == 2 * 16
