"""The memory of the KV cache. Knows its shape; which block belongs to whom is the scheduler's business."""

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from aserve.kernels.ops import KVLayer
from aserve.models.spec import ModelSpec

CACHE_LINE_BYTES: Final = 64


def allocate_kv(
    spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVLayer]:
    """One KVLayer per layer, all zero; block 0 is the null block, written by warm-up and padding only.

    Zero and not merely empty: a kernel that multiplies a masked position by 0 would turn leftover NaNs into NaN.
    """
    shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    return [KVLayer(_zeros(shape, dtype, device), _zeros(shape, dtype, device)) for _ in range(spec.num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks calloc, whose zero pages take no memory until they are written; torch.zeros would write them all now.
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + CACHE_LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
