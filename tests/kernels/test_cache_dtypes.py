"""Keys and values of another type than queries: what is written, and what attention makes of it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aserve.kernels.ops import Ops
from aserve.kernels.reference import ReferenceOps
from aserve.kernels.reference_fp8 import FP8, LARGEST
from tests.kernels.cases import Fast, paged

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()
BF16 = torch.bfloat16

STEPS = {
    "decodes": ([1, 150, 33, 64], [1] * 4),
    "a long decode": ([1100], [1]),
    "a prompt": ([37], [37]),
    "mixed": ([5, 90, 20, 41], [1, 1, 20, 3]),
}


def types(fast: Fast) -> list[torch.dtype]:
    """float8 is for GPUs."""
    return [BF16] if fast.device.type == "cpu" and not fast.interpreted else [BF16, FP8]


@pytest.mark.parametrize("step", STEPS)
def test_attention(fast: Fast, step: str) -> None:
    for dtype in types(fast):
        case = paged(fast, *STEPS[step], head_dim=32, cache_dtype=dtype)
        fast.assert_close(case.attend(fast.ops), case.attend(TWIN))


def test_with_a_window_and_a_soft_cap(fast: Fast) -> None:
    options = {"sliding_window": 5, "soft_cap": 2.0}
    for dtype in types(fast):
        case = paged(fast, *STEPS["mixed"], cache_dtype=dtype)
        fast.assert_close(case.attend(fast.ops, **options), case.attend(TWIN, **options))


def test_queries_of_bfloat16_are_multiplied_as_float16_beside_float8(triton_fast: Fast) -> None:
    """One that float16 has no number for counts as the largest that it has, and does not become a NaN."""
    fast = replace(triton_fast, dtype=BF16)
    for step in STEPS.values():
        case = paged(fast, *step, head_dim=32, cache_dtype=FP8)
        fast.assert_close(case.attend(fast.ops), case.attend(TWIN))
        case.q_THD[:] = 1e6
        assert case.attend(fast.ops).isfinite().all()


def test_what_is_written(fast: Fast) -> None:
    """Rounded once, to the nearest; numbers too large for float8 are its largest, and NaN stays NaN."""
    q, k, v = fast.randn(6, 4 + 2 + 2, 16).split((4, 2, 2), dim=1)
    v[0, 0, :6] = torch.tensor([1000.0, -1e4, 460.0, math.nan, 1e-4, 0.0])
    angle = torch.rand(50, 8) * 6
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1).to(fast.device)
    positions, slots = torch.arange(6).to(fast.device), torch.randperm(20)[:6].to(fast.device)

    def caches(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return tuple(torch.zeros(5, 4, 2, 16, device=fast.device).to(dtype) for _ in range(2))

    def turned(ops: Ops, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        k_cache, v_cache = caches(dtype)
        out = ops.rope_and_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, slots)
        return out, k_cache.float(), v_cache.float()

    def as_they_are(ops: Ops, dtype: torch.dtype) -> tuple[Tensor, ...]:
        k_cache, v_cache = caches(dtype)
        ops.write_kv(k, v, k_cache, v_cache, slots)
        return k_cache.float(), v_cache.float()

    for dtype in types(fast):
        step = torch.finfo(dtype).eps
        rtol = step if fast.interpreted and dtype == BF16 else 0.0  # the interpreter cuts off
        (out, k_cache, v_cache), expected = turned(fast.ops, dtype), turned(TWIN, dtype)
        fast.assert_close(out, expected[0])
        torch.testing.assert_close(k_cache, expected[1], rtol=step, atol=step * 2**-6)
        torch.testing.assert_close(v_cache, expected[2], rtol=rtol, atol=0, equal_nan=True)
        for actual, twin in zip(as_they_are(fast.ops, dtype), as_they_are(TWIN, dtype), strict=True):
            torch.testing.assert_close(actual, twin, rtol=rtol, atol=0, equal_nan=True)
        if dtype == FP8:
            assert v_cache.flatten(0, 1)[slots[0], 0, :3].tolist() == [LARGEST, -LARGEST, LARGEST]


def test_blocks_are_moved_as_they_are(fast: Fast) -> None:
    """Every byte there is, in each block: also those that are no number of float8."""
    for dtype in types(fast):
        bytes_YBX = torch.arange(256).to(torch.uint8).expand(2, 6, 256).clone()
        planes_YBX = bytes_YBX.to(fast.device).view(dtype)
        blocks_N, others_N = torch.tensor([4, 1]).to(fast.device), torch.tensor([0, 5]).to(fast.device)
        nothing = torch.zeros((), device=fast.device).to(dtype)
        packed_NYX = nothing.expand(2, 2, planes_YBX.shape[2]).clone()
        planes_YBX[:, others_N] = nothing
        fast.ops.copy_blocks(planes_YBX, blocks_N, others_N)
        fast.ops.gather_blocks(planes_YBX, others_N, packed_NYX)
        planes_YBX[:, blocks_N] = nothing
        fast.ops.scatter_blocks(packed_NYX, planes_YBX, blocks_N)
        assert torch.equal(planes_YBX.cpu().view(torch.uint8), bytes_YBX)
