"""Blocks within a cache, out of it and back: every implementation moves them as its twin does."""

import pytest
import torch

from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()


def padded_planes(fast: Fast, numbers: int) -> torch.Tensor:
    """[Y, B, X] = [6, 5, numbers], with a gap after each plane, as in a KVStore."""
    return fast.randn(6, 5 * numbers + 7)[:, : 5 * numbers].unflatten(1, (5, -1))


@pytest.mark.parametrize("numbers", [1, 48, 5000])
def test_copy(fast: Fast, numbers: int) -> None:
    planes = padded_planes(fast, numbers)
    expected = planes.clone()
    sources, targets = torch.tensor([[3, 3, 0], [1, 2, 4]], device=fast.device)
    fast.ops.copy_blocks(planes, sources, targets)
    TWIN.copy_blocks(expected, sources, targets)
    assert torch.equal(planes, expected)
    assert torch.equal(planes[:, 1], planes[:, 3])


@pytest.mark.parametrize("numbers", [1, 48, 5000])
def test_gather_and_scatter(fast: Fast, numbers: int) -> None:
    planes, blocks = padded_planes(fast, numbers), torch.tensor([4, 1, 2], device=fast.device)
    packed = torch.empty(4, 6, numbers, dtype=fast.dtype, device=fast.device)[:3]
    fast.ops.gather_blocks(planes, blocks, packed)
    assert torch.equal(packed, planes[:, [4, 1, 2]].transpose(0, 1))
    elsewhere = padded_planes(fast, numbers)
    expected = elsewhere.clone()
    fast.ops.scatter_blocks(packed, elsewhere, blocks)
    TWIN.scatter_blocks(packed, expected, blocks)
    assert torch.equal(elsewhere, expected)
    assert torch.equal(elsewhere[:, [4, 1, 2]], planes[:, [4, 1, 2]])


def test_no_block_is_no_work(fast: Fast) -> None:
    planes, none = padded_planes(fast, 8), torch.empty(0, dtype=torch.int64, device=fast.device)
    before = planes.clone()
    fast.ops.copy_blocks(planes, none, none)
    fast.ops.gather_blocks(planes, none, planes.new_empty(0, 6, 8))
    fast.ops.scatter_blocks(planes.new_empty(0, 6, 8), planes, none)
    assert torch.equal(planes, before)
