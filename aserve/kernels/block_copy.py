"""Blocks of the KV cache, moved in Triton: within the cache, out of it into a packed buffer, and back in.

Twins: ReferenceOps.copy_blocks, gather_blocks, scatter_blocks. Bound by memory; one program moves a piece of one block
of one plane, so that all layers move in one launch.

    planes  [Y, B, X]      key | value | key | value ...   each with its B blocks
    packed  [N, Y, X]      all of one block side by side, to be one copy to the host

Shape letters: ops.py.
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch

_CHUNK = 4096


@triton.jit(
    do_not_specialize=["from_plane_stride", "from_block_stride", "to_plane_stride", "to_block_stride"],
    do_not_specialize_on_alignment=["from_ids_ptr", "to_ids_ptr"],
)
def _move_kernel(
    from_ptr,
    to_ptr,
    from_ids_ptr,
    to_ids_ptr,
    from_plane_stride,
    from_block_stride,
    to_plane_stride,
    to_block_stride,
    NUMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Ids are those of blocks, int64; without any, block n of a packed buffer is meant."""
    n, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    from_block, to_block = n, n
    if from_ids_ptr is not None:
        from_block = tl.load(from_ids_ptr + n)
    if to_ids_ptr is not None:
        to_block = tl.load(to_ids_ptr + n)
    numbers = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    mask = numbers < NUMBERS
    x = tl.load(from_ptr + plane * from_plane_stride + from_block * from_block_stride + numbers, mask=mask)
    tl.store(to_ptr + plane * to_plane_stride + to_block * to_block_stride + numbers, x, mask=mask)


def copy_blocks(planes_YBX: Tensor, sources_N: Tensor, targets_N: Tensor) -> None:
    """planes[:, targets] = planes[:, sources]; no block is both."""
    strides = planes_YBX.stride()[:2]
    _move(planes_YBX, strides, sources_N, planes_YBX, strides, targets_N)


def gather_blocks(planes_YBX: Tensor, blocks_N: Tensor, packed_NYX: Tensor) -> None:
    """packed[n] = planes[:, blocks[n]]."""
    block_stride, plane_stride = packed_NYX.stride()[:2]
    _move(planes_YBX, planes_YBX.stride()[:2], blocks_N, packed_NYX, (plane_stride, block_stride), None)


def scatter_blocks(packed_NYX: Tensor, planes_YBX: Tensor, blocks_N: Tensor) -> None:
    """planes[:, blocks[n]] = packed[n]."""
    block_stride, plane_stride = packed_NYX.stride()[:2]
    _move(packed_NYX, (plane_stride, block_stride), None, planes_YBX, planes_YBX.stride()[:2], blocks_N)


def _move(
    from_: Tensor,
    from_strides: tuple[int, ...],
    from_ids_N: Tensor | None,
    to: Tensor,
    to_strides: tuple[int, ...],
    to_ids_N: Tensor | None,
) -> None:
    """strides: of a plane and of a block, in numbers."""
    ids_N = to_ids_N if from_ids_N is None else from_ids_N
    num_blocks, num_numbers = len(ids_N), from_.shape[2]
    num_planes = from_.shape[1] if from_ids_N is None else from_.shape[0]
    if not num_blocks:
        return
    _shaped(num_blocks, num_planes, num_numbers, from_strides, to_strides)(from_, to, from_ids_N, to_ids_N)


@lru_cache(maxsize=SHAPES)
def _shaped(
    num_blocks: int, num_planes: int, num_numbers: int, from_strides: tuple[int, ...], to_strides: tuple[int, ...]
) -> Launch:
    chunk = min(_CHUNK, triton.next_power_of_2(num_numbers))
    grid = (num_blocks, num_planes, triton.cdiv(num_numbers, chunk))
    return Launch(_move_kernel, grid, (*from_strides, *to_strides), NUMBERS=num_numbers, CHUNK=chunk)
