"""Norms of heads fused with rope and the cache, where operations offer it, give what the three give one by one."""

import pytest
import torch

from aserve.kernels.cpu import CpuOps
from aserve.kernels.ops import HeadNormOps, Ops
from aserve.kernels.reference import ReferenceOps
from aserve.models.layers import DenseMethod
from aserve.models.qwen3 import qwen3
from aserve.models.rope import rope_table
from aserve.models.spec import read_spec
from aserve.models.weights import RandomWeights
from tests.checkpoints import SHAPE
from tests.models.paged import PagedSequences

pytestmark = pytest.mark.torch


class UnfusedOps(CpuOps):
    """As on a CPU that fuses nothing."""

    norm_rope_and_write_kv = None


def logits(ops: Ops) -> torch.Tensor:
    spec = read_spec({"architectures": ["Qwen3ForCausalLM"], **SHAPE, "head_dim": 16})
    assert spec.rope is not None
    cpu = torch.device("cpu")
    cos_sin_LD = rope_table(spec.rope, spec.head_dim, 64, cpu)
    model = qwen3(spec, ops, RandomWeights(torch.float32, cpu, 0), DenseMethod(), cos_sin_LD)
    torch.manual_seed(0)
    sequences = PagedSequences(model, 1, max_len=64)
    return torch.cat([sequences.run([(0, tokens)])[0] for tokens in ([1, 2, 3, 4, 5], [6], [7, 8])])


def test_fused_and_one_by_one_agree() -> None:
    assert isinstance(ReferenceOps(), HeadNormOps)
    assert not isinstance(UnfusedOps(), HeadNormOps)
    torch.testing.assert_close(logits(ReferenceOps()), logits(UnfusedOps()), atol=1e-4, rtol=1e-4)
