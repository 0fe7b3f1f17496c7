"""float8 (e4m3) in plain torch: how numbers are quantized and kept, and the twin of products of such weights
(fp8_linear.py).
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
"""The largest number of that type."""
FP8_MULTIPLE: Final = 16
"""Of the inputs and outputs of a weight: what torch's products of many rows ask for."""
ROWS_AT_ONCE: Final = 4096
LEAST: Final = 1e-12
"""What a row of smaller numbers counts as, so that its scale is not 0."""


def as_kept(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as a cache of this type keeps them. Of float8, without a scale: what is too large for it becomes its
    largest, and what is not a number stays so.
    """
    return (numbers.clamp(-LARGEST, LARGEST) if dtype == FP8 else numbers).to(dtype)


def quantize(numbers_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float8, [T, I], each divided by a scale, [T], float32, by which its largest number becomes the type's."""
    scale_T = numbers_TI.abs().amax(1).float().clamp_(min=LEAST).div_(LARGEST)
    return (numbers_TI / scale_T[:, None]).clamp_(-LARGEST, LARGEST).to(FP8), scale_T


def quantize_weight(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize`, some rows after others: what lies in between is of float32."""
    quantized, scales = zip(*map(quantize, weight_OI.split(ROWS_AT_ONCE)), strict=True)
    return torch.cat(quantized), torch.cat(scales)


def fp8_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O: Tensor, *, quantizes_rows: bool
) -> Tensor:
    """x W^T + b, [T, O], in the type of x, computed in float32 of numbers that are what float8 has made of them."""
    rows_TI = x_TI.float()
    if quantizes_rows:
        quantized_TI, scale_T = quantize(x_TI)
        rows_TI = quantized_TI.float() * scale_T[:, None]
    bias_O = None if bias_O is None else bias_O.float()
    return F.linear(rows_TI, weight_OI.float() * scale_O[:, None], bias_O).to(x_TI.dtype)
