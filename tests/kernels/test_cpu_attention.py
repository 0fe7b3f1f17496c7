"""Ways that CpuOps' attention takes by size alone, which give the same."""

import pytest
import torch

from aserve.kernels import cpu_attention
from aserve.kernels.cpu import CpuOps
from tests.kernels.cases import Fast, paged

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"soft_cap": 2.0}], ids=str)
def test_query_heads_of_a_key_head_attend_together_or_apart(monkeypatch, options) -> None:
    cpu = Fast(CpuOps(), torch.device("cpu"), torch.float32)
    case = paged(cpu, [9, 41, 300], [1, 30, 290], heads=(6, 2))
    together = case.attend(CpuOps(), **options)
    monkeypatch.setattr(cpu_attention, "_MAX_STACKED_MASK", 0)
    torch.testing.assert_close(case.attend(CpuOps(), **options), together)
