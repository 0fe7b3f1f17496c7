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
MAX_PLAIN_RUN = 384
"""Inputs that MKL and oneDNN add up one after the other, in float32; more, each in its own way."""
_MAX_RUN = 1024
"""Inputs that oneDNN adds up in one way, however many rows there are."""
_TILE_ROWS = 16
"""Rows of a tile of Intel's matrix units (AMX). For more, oneDNN adds up bfloat16 otherwise, by rows and by threads."""


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
    """Whether the processor's cache has the weight, in float32, and `plain_linear` gives a row the same bits always.

    That is, with any number of others; and the bits of `packed_linear` where that is faster for several rows. To call a
    packed product takes 10 us more.
    """
    num_outputs, num_inputs = weight_OI.shape
    is_small = weight_OI.dtype == torch.float32 and weight_OI.numel() <= _MAX_PLAIN_ELEMENTS
    if not is_small or (num_inputs > MAX_PLAIN_RUN and not plain_is_fast()):
        return False
    return _plain_is_steady(num_outputs, num_inputs, like_packed=not plain_is_fast())


@cache
def _plain_is_steady(num_outputs: int, num_inputs: int, *, like_packed: bool) -> bool:
    """Try it, since other processors may have other orders."""
    draw = torch.Generator().manual_seed(0)
    x_TI = torch.randn(max(_TRIED_ROWS), num_inputs, generator=draw)
    weight_OI = torch.randn(num_outputs, num_inputs, generator=draw)
    weights_IO = columns(weight_OI)
    expected_TO = packed_linear(x_TI, pack(weight_OI), None) if like_packed else plain_linear(x_TI, weights_IO, None)
    return all(torch.equal(plain_linear(x_TI[:n], weights_IO, None), expected_TO[:n]) for n in _TRIED_ROWS)


def plain_is_fast() -> bool:
    """Whether torch's plain products take no longer for several rows: MKL uses all vector units of Intel's alone."""
    return is_intel()


@cache
def is_intel() -> bool:
    """Whether the processor is Intel's."""
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
    if x_TI.dtype == torch.bfloat16 and has_amx():
        padded_TI = F.pad(x_TI, (0, 0, 0, -num_rows % _TILE_ROWS))
        parts = [_product(part_TI, packed_OI, bias_O) for part_TI in padded_TI.split(_TILE_ROWS)]
        return torch.cat(parts)[:num_rows]
    if num_rows == 1 and num_inputs > _MAX_RUN:
        # oneDNN adds up a single row's inputs in shorter runs.
        return _product(F.pad(x_TI, (0, 0, 0, 1)), packed_OI, bias_O)[:1]
    return _product(x_TI, packed_OI, bias_O)


def columns(weight_OI: Tensor) -> tuple[Tensor, ...]:
    """The weight as `plain_linear` takes it: by inputs, in parts of as many as MKL adds up one after the other."""
    return tuple(part_OI.t().contiguous() for part_OI in weight_OI.chunk(-(-weight_OI.shape[1] // MAX_PLAIN_RUN), 1))


def plain_linear(x_TI: Tensor, weights_IO: tuple[Tensor, ...], bias_O: Tensor | None) -> Tensor:
    """x W^T + b, [T, O], W as `columns`, which vector units read best; a single row as one of two.

    A product with a vector is another function of MKL's, which adds up in another order.
    """
    num_rows = x_TI.shape[0]
    x_TI = x_TI if num_rows > 1 else torch.cat((x_TI, x_TI))
    first_IO, *others_IO = weights_IO
    if not others_IO:
        out_TO = torch.mm(x_TI, first_IO)
    else:
        first_TI, *others_TI = x_TI.split([len(part_IO) for part_IO in weights_IO], 1)
        out_TO = torch.mm(first_TI, first_IO)
        for part_TI, part_IO in zip(others_TI, others_IO, strict=True):
            out_TO.addmm_(part_TI, part_IO)
    if bias_O is not None:
        out_TO += bias_O
    return out_TO[:num_rows]


def _product(x_TI: Tensor, packed_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TI, packed_OI, bias_O, "none", [], "")


@cache
def has_amx() -> bool:
    """Whether the processor has matrix units, and the system lets them be used."""
    return torch.cpu._is_amx_tile_supported()
