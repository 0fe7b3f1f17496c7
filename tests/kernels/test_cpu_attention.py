"""Ways that CpuOps' attention takes by size alone, which give the same."""

from functools import partial

import pytest
import torch
from torch import Tensor

from aserve.kernels import cpu_attention
from aserve.kernels.cpu import CpuOps
from aserve.kernels.cpu_attention import ContextGather, Layer, attend_all, padded_keys, plan_reads
from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast, paged

pytestmark = pytest.mark.torch


class CountingGather(ContextGather):
    """Notes how many blocks are read at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.nums_blocks: list[int] = []

    def read(self, which, cache_BPKD, num_seqs, blocks_X):
        self.nums_blocks.append(len(blocks_X))
        return super().read(which, cache_BPKD, num_seqs, blocks_X)


@pytest.mark.parametrize("num_queries", [1, 30])
def test_a_window_reads_a_long_context_from_the_tile_on_where_it_begins(num_queries) -> None:
    case = paged(Fast(CpuOps(), torch.device("cpu"), torch.float32), [1200], [num_queries])
    gather = CountingGather()
    layer = Layer(case.k_cache_BPKD, case.v_cache_BPKD, gather, torch.float32)
    reads = plan_reads(case.batch, case.k_cache_BPKD.shape[1], 20, torch.float32)
    attend_all(reads, case.q_THD, layer, 0.25, None)
    assert gather.nums_blocks == [(1200 - 1024) // 8] * 2, "of keys and of values, from the tile's beginning on"


def test_chunks_of_queries_read_each_its_own_keys_behind_that_tile() -> None:
    case = paged(Fast(CpuOps(), torch.device("cpu"), torch.float32), [2100], [1000])
    expected = case.attend(ReferenceOps(), sliding_window=20)
    torch.testing.assert_close(case.attend(CpuOps(), sliding_window=20), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"soft_cap": 2.0}], ids=str)
def test_query_heads_of_a_key_head_attend_together_or_apart(monkeypatch, options) -> None:
    cpu = Fast(CpuOps(), torch.device("cpu"), torch.float32)
    case = paged(cpu, [9, 41, 300], [1, 30, 290], heads=(6, 2))
    together = case.attend(CpuOps(), **options)
    monkeypatch.setattr(cpu_attention, "_MAX_STACKED_MASK", 0)
    torch.testing.assert_close(case.attend(CpuOps(), **options), together)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"soft_cap": 2.0}], ids=str)
def test_beside_matrix_units_bfloat16_is_attended_in_float32(monkeypatch, options) -> None:
    """What a processor with AMX gets: the same but for rounding, in the type of the cache."""
    case = paged(Fast(CpuOps(), torch.device("cpu"), torch.bfloat16), [9, 41, 300], [1, 30, 290], heads=(6, 2))
    types = set()
    fused, softmax = cpu_attention._fused_attention, Tensor.softmax
    monkeypatch.setattr(cpu_attention, "_fused_attention", lambda *given: types.add(given[1].dtype) or fused(*given))
    monkeypatch.setattr(Tensor, "softmax", lambda x, dim: types.add(x.dtype) or softmax(x, dim))
    found = []
    for has_amx in (False, True):
        types.clear()
        monkeypatch.setattr(cpu_attention, "has_amx", partial(bool, has_amx))
        found.append(case.attend(CpuOps(), **options))
    assert types == {torch.float32}
    assert {out.dtype for out in found} == {torch.bfloat16}
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_no_tile_of_keys_is_halved() -> None:
    """What is read ends at a step, or where a tile that would be halved is full; a tile's end is a step too."""
    expected = {1: 16, 16: 16, 17: 32, 192: 192, 193: 384, 384: 384, 385: 512, 512: 512, 513: 528, 1217: 1408}
    assert {num_keys: padded_keys(num_keys) for num_keys in expected} == expected
