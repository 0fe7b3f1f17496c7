"""The twin of native/src/int8.cpp in plain torch, to the bit: what is rounded there is rounded here, at the same place.

Products of a run of inputs are whole numbers below 2^24, exact in any type. Elsewhere float64 takes the place of a
product and a sum that are rounded once (FMA).
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

RUN: Final = 128
"""Inputs that are added up before they join a float, where all inputs share a scale."""


class Quantized(NamedTuple):
    """Numbers of rows times scales. Letters: R rows, I inputs, G groups."""

    numbers_RI: Tensor
    scales_RG: Tensor


def quantize(x_RI: Tensor, group: int) -> Quantized:
    """Whole numbers from -127 to 127, by the largest of each group; group 0 for one of all inputs."""
    parts = x_RI.float().split(group or x_RI.shape[1], dim=1)
    largest_RG = torch.stack([part.abs().amax(1) for part in parts], dim=1)
    # 127 / largest would be 127 times a rounded reciprocal.
    factors_RG = torch.where(largest_RG > 1e-30, torch.full_like(largest_RG, 127) / largest_RG, 0.0)
    numbers = [
        (part.double() * factor_R[:, None].double()).round() for part, factor_R in zip(parts, factors_RG.T, strict=True)
    ]
    return Quantized(torch.cat(numbers, 1), largest_RG / 127)


def int8_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, group: int) -> Tensor:
    """x W^T + b of quantized rows and weights, [T, O], in the type of x."""
    x, weight = quantize(x_TI, group), quantize(weight_OI, group)
    total_TO = torch.zeros(len(x_TI), len(weight_OI))
    run = group or RUN
    for begin in range(0, x_TI.shape[1], run):
        inputs, g = slice(begin, begin + run), begin // group if group else 0
        sums_TO = x.numbers_RI[:, inputs] @ weight.numbers_RI[:, inputs].T
        scales_TO = weight.scales_RG[:, g] * x.scales_RG[:, g, None]
        total_TO = (total_TO.double() + sums_TO * scales_TO.double()).float()
    if bias_O is not None:
        total_TO += bias_O.float()
    return total_TO.to(x_TI.dtype)
