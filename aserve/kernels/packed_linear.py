"""Linear layers on a CPU with the weight reordered once for oneDNN: the same products, read as vector units like.

torch multiplies by a plain weight through a copy that it reorders at every call; decoding, where a step reads each
weight for a few rows only, then spends most of its time on that. The operators are those that torch's own compiler
emits. They are private, hence `can_pack`, and the plain layer wherever that says no.
"""

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_PLAIN_ELEMENTS = 1 << 21
_TRIED_ROWS = (1, 2, 3, 17, 64, 200)
_MAX_PLAIN_RUN = 384
"""Inputs that MKL and oneDNN add up one after the other, in float32; more, each in its own way."""
_MAX_RUN = 1024
"""Inputs that oneDNN adds up in one way, however many rows there are."""
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


def can_be_plain(weight_OI: Tensor) -> bool:
    """Whether `plain_linear` gives the same bits, and the processor's cache has the weight, in float32.

    To call a packed product takes 10 us more.
    """
    num_outputs, num_inputs = weight_OI.shape
    is_small = weight_OI.numel() <= _MAX_PLAIN_ELEMENTS and num_inputs <= _MAX_PLAIN_RUN
    return weight_OI.dtype == torch.float32 and is_small and _plain_equals_packed(num_outputs, num_inputs)


@cache
def _plain_equals_packed(num_outputs: int, num_inputs: int) -> bool:
    """Try it, since other processors may have other orders."""
    draw = torch.Generator().manual_seed(0)
    x_TI = torch.randn(max(_TRIED_ROWS), num_inputs, generator=draw)
    weight_OI = torch.randn(num_outputs, num_inputs, generator=draw)
    packed_TO = packed_linear(x_TI, pack(weight_OI), None)
    weight_IO = weight_OI.t().contiguous()
    return all(torch.equal(plain_linear(x_TI[:n], weight_IO, None), packed_TO[:n]) for n in _TRIED_ROWS)


@cache
def plain_is_fast() -> bool:
    """Whether torch's plain products take no longer for several rows: MKL uses all vector units of Intel's alone."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def pack(weight_OI: Tensor) -> Tensor:
    """The weight in oneDNN's own layout: opaque, and good for `packed_linear` alone."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)  # None: for any number of rows


def packed_linear(x_TI: Tensor, packed_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W^T + b, [T, O]. Equal to torch's linear in bfloat16, but for rounding: sums are taken in another order.

    A row has the same bits with any number of others.
    """
    num_rows, num_inputs = x_TI.shape
    if num_rows == 1 and num_inputs > _MAX_RUN:
        # oneDNN adds up a single row's inputs in shorter runs.
        return _product(F.pad(x_TI, (0, 0, 0, 1)), packed_OI, bias_O)[:1]
    if _TILE_ROWS < num_rows <= 2 * _TILE_ROWS and x_TI.dtype == torch.bfloat16 and _has_amx():
        # oneDNN takes 1.4 times as long for 17 to 32 rows, in two tiles, as for 33 to 48, in three.
        x_TI = F.pad(x_TI, (0, 0, 0, 2 * _TILE_ROWS + 1 - num_rows))
        return _product(x_TI, packed_OI, bias_O)[:num_rows]
    return _product(x_TI, packed_OI, bias_O)


def plain_linear(x_TI: Tensor, weight_IO: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W + b, [T, O], W by rows of inputs, as vector units read it best; a single row as one of two.

    A product with a vector is another function of MKL's, which adds up in another order.
    """
    num_rows = x_TI.shape[0]
    out_TO = torch.mm(x_TI if num_rows > 1 else x_TI.expand(2, -1), weight_IO)
    if bias_O is not None:
        out_TO += bias_O
    return out_TO if num_rows > 1 else out_TO[:1]


def _product(x_TI: Tensor, packed_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TI, packed_OI, bias_O, "none", [], "")


@cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()
