"""Linear layers on a CPU with the weight reordered once for oneDNN: the same products, read as vector units like.

torch multiplies by a plain weight through a copy that it reorders at every call; decoding, where a step reads each
weight for a few rows only, then spends most of its time on that. The operators are those that torch's own compiler
emits. They are private, hence `can_pack`, and the plain layer wherever that says no.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_BOTH_ELEMENTS = 1 << 21
_TILE_ROWS = 16
"""Rows of a tile of AMX, a matrix unit of Intel's (Xeon, from Sapphire Rapids on)."""


def can_pack(weight_OI: Tensor) -> bool:
    """Whether this build of torch has the operators, and this processor is faster with them for such a weight."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight_OI.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_OI.dtype == torch.float32


def pays_unpacked_too(weight_OI: Tensor) -> bool:
    """Whether to keep a plain copy for single rows as well.

    In float32 a small weight is in the processor's cache as it is, and a packed product takes 7 us more to call: worth
    a copy of a few megabytes at most, where for two rows and more packing already wins.
    """
    return weight_OI.dtype == torch.float32 and weight_OI.numel() <= _MAX_BOTH_ELEMENTS


def pack(weight_OI: Tensor) -> Tensor:
    """The weight in oneDNN's own layout: opaque, and good for `packed_linear` alone."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)  # None: for any number of rows


def packed_linear(x_TI: Tensor, packed_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W^T + b, [T, O]. Equal to torch's linear in bfloat16; in float32 sums may be taken in another order."""
    num_rows = x_TI.shape[0]
    if _TILE_ROWS < num_rows <= 2 * _TILE_ROWS and x_TI.dtype == torch.bfloat16 and _has_amx():
        # oneDNN takes 1.4 times as long for 17 to 32 rows, in two tiles, as for 33 to 48, in three.
        x_TI = F.pad(x_TI, (0, 0, 0, 2 * _TILE_ROWS + 1 - num_rows))
        return _product(x_TI, packed_OI, bias_O)[:num_rows]
    return _product(x_TI, packed_OI, bias_O)


def _product(x_TI: Tensor, packed_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TI, packed_OI, bias_O, "none", [], "")


@cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()
