import pytest
import torch
from torch import Tensor

from aserve.kernels.ops import HeadNormOps, Ops
from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()
NUM_BLOCKS, BLOCK_SIZE = 5, 4


def angles(fast: Fast, num_positions: int, head_dim: int) -> Tensor:
    angle = torch.rand(num_positions, head_dim // 2) * 6
    return torch.cat((angle.cos(), angle.sin()), dim=1).to(fast.device)


def step(fast: Fast, num_tokens: int, heads: tuple[int, int], head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v as slices of one tensor, as the fused projection leaves them; and their slots, out of order."""
    num_heads, num_kv_heads = heads
    qkv = fast.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v, torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens].to(fast.device)


def caches(k: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(k.new_zeros(NUM_BLOCKS, BLOCK_SIZE, *k.shape[1:]) for _ in range(2))


@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim"),
    [(1, (1, 1), 2), (1, (14, 2), 64), (7, (9, 3), 80), (20, (2, 2), 8)],
)
def test_rope_and_write_kv(fast: Fast, num_tokens: int, heads: tuple[int, int], head_dim: int) -> None:
    q, k, v, slots = step(fast, num_tokens, heads, head_dim)
    cos_sin = angles(fast, 50, head_dim)
    positions = torch.randint(0, 50, (num_tokens,)).to(fast.device)

    def run(ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        k_cache, v_cache = caches(k)
        return ops.rope_and_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, slots), k_cache, v_cache

    for actual, expected in zip(run(fast.ops), run(TWIN), strict=True):
        fast.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim"), [(1, (1, 1), 2), (3, (16, 8), 128), (7, (9, 3), 80), (5, (32, 8), 16)]
)
def test_norms_of_heads_fused_with_rope(
    triton_each: Fast, num_tokens: int, heads: tuple[int, int], head_dim: int
) -> None:
    fast = triton_each
    q, k, v, slots = step(fast, num_tokens, heads, head_dim)
    cos_sin = angles(fast, 50, head_dim)
    positions = torch.randint(0, 50, (num_tokens,)).to(fast.device)
    norms = fast.randn(head_dim), fast.randn(head_dim), 1e-6

    def run(ops: HeadNormOps) -> tuple[Tensor, Tensor, Tensor]:
        k_cache, v_cache = caches(k)
        turned = ops.norm_rope_and_write_kv(q, k, v, *norms, cos_sin, positions, k_cache, v_cache, slots)
        return turned, k_cache, v_cache

    assert isinstance(fast.ops, HeadNormOps)
    for actual, expected in zip(run(fast.ops), run(TWIN), strict=True):
        fast.assert_close(actual, expected)


def test_write_kv_touches_nothing_but_its_slots(fast: Fast) -> None:
    _, k, v, slots = step(fast, 6, (4, 2), 16)
    k_cache, v_cache = caches(k)
    fast.ops.write_kv(k, v, k_cache, v_cache, slots)
    for cache, written in ((k_cache, k), (v_cache, v)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[slots], written)
        flat[slots] = 0
        assert not flat.any()


def test_a_rotation_keeps_the_product_of_equal_distances() -> None:
    """What rope is for: q at position m and k at position n meet at an angle that depends on m - n alone."""
    head_dim, positions = 8, torch.arange(20)
    angle = positions[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1)
    q, k = torch.randn(1, 1, head_dim).expand(20, -1, -1), torch.randn(1, 1, head_dim).expand(20, -1, -1)
    k_cache, v_cache = caches(k)
    turned_q = TWIN.rope_and_write_kv(q, k, k, cos_sin, positions, k_cache, v_cache, positions)
    products = turned_q.flatten(1) @ k_cache.view(-1, head_dim).T
    for distance in (0, 3, 11):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
