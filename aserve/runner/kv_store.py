"""The memory of the KV cache, on the device and swapped out. Knows its shape, not which block belongs to whom.

All layers lie in one piece of memory, plane by plane, so that a block can be moved in all of them at once:

    planes_YBX   | keys of layer 0 | values of layer 0 | keys of layer 1 | ...     each B blocks of X numbers

Where layers are in groups (core/layout.py), a block holds the layers of one of them: the first layers of all groups lie
in the same two planes, in different blocks.
"""

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import torch
from torch import Tensor

from aserve.core.layout import KVLayout, one_group
from aserve.kernels.ops import KVLayer
from aserve.models.spec import ModelSpec

PLANE_ALIGNMENT_BYTES: Final = 256
CACHE_LINE_BYTES: Final = 64
HUGE_PAGE_BYTES: Final = 2 * 2**20
SMALL_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class KVStore:
    """A KV cache: the layers that a model reads and writes, and the same memory as planes of blocks, [Y, B, X].

    num_groups: blocks that a span of positions takes.
    """

    layers: tuple[KVLayer, ...]
    planes_YBX: Tensor
    num_groups: int = 1

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self.layers[0].k_BPKD.shape[1]

    def scrub(self, block_ids: Iterable[int]) -> None:
        """Make what is not finite in these blocks 0, for whoever gets them next; all else stays as it is."""
        for block_id in block_ids:
            self.planes_YBX[:, block_id].nan_to_num_(0.0, 0.0, 0.0)


def allocate_kv(
    spec: ModelSpec,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: KVLayout | None = None,
) -> KVStore:
    """A cache of zeros; block 0 is the null block, written by warm-up and padding only.

    layout: which layers share a block; None for all of them.
    Zero and not merely empty: a kernel that multiplies a masked position by 0 would turn leftover NaNs into NaN.
    """
    layout = layout or one_group(spec.num_layers)
    shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    plane_numbers = math.prod(shape)
    alignment = PLANE_ALIGNMENT_BYTES // dtype.itemsize
    padded_numbers = -(-plane_numbers // alignment) * alignment
    planes = zeros((2 * layout.layers_per_group, padded_numbers), dtype, device)[:, :plane_numbers]
    layers = tuple(
        KVLayer(planes[2 * place].view(shape), planes[2 * place + 1].view(shape), group)
        for group, place in layout.places
    )
    planes_YBX = planes.unflatten(1, (num_blocks, -1))  # type: ignore[no-untyped-call]  # torch has none
    return KVStore(layers, planes_YBX, layout.num_groups)


def allocate_swap(kv: KVStore, num_host_blocks: int) -> Tensor:
    """Room in host memory for so many blocks, [num_host_blocks, Y, X]: a block's planes are side by side.

    In pages of its own, so that they can be locked (`Cuda.page_lock`); they are taken as they are written.
    """
    num_planes, _, num_numbers = kv.planes_YBX.shape
    shape, dtype = (num_host_blocks, num_planes, num_numbers), kv.planes_YBX.dtype
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


class Pages:
    """The first pages of a KV cache in host memory, taken from the system before a sequence writes to them.

    A page is taken at its first write, which for 2 MiB is 0.3 ms, and 10 where a virtual machine has to ask its host: a
    prompt that is the first to write to the next pages of all planes would wait ten times as long as others. Blocks
    are given out in order at first, so these are the pages that the first sequences get. num_bytes: of all planes.
    """

    def __init__(self, planes_YBX: Tensor, num_bytes: int) -> None:
        planes = planes_YBX.flatten(1).view(torch.uint8) if planes_YBX.device.type == "cpu" else ()
        pieces = [plane[: num_bytes // len(planes)].split(HUGE_PAGE_BYTES) for plane in planes]
        self._pieces = chain.from_iterable(zip(*pieces, strict=True))

    def take_next(self) -> bool:
        """Take some 2 MiB more, unless they are; whatever they hold stays as it is. False if there are none left."""
        if (piece := next(self._pieces, None)) is None:
            return False
        piece[::SMALL_PAGE_BYTES].bitwise_or_(0)
        return True


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; in host memory its pages are taken as they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks calloc, whose zero pages take no memory until they are written; torch.zeros would write them all now.
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + CACHE_LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
