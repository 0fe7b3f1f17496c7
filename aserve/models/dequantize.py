"""A quantized weight of a checkpoint as the matrix that it stands for; quantized_formats.py has the formats.

Shape letters: I, O for the inputs and outputs of a linear layer, G for the groups of inputs that share a scale, W for
words of 32 bits.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from aserve.core.errors import CheckpointError
from aserve.models.quantized_formats import QuantizedWeight

PIECE: Final = 2**19
"""Numbers that are dequantized at once: their floats stay in a processor's caches from one operation to the next."""
_OUTPUTS: Final = 32
"""Pieces begin at multiples of so many outputs, which is a whole number of words in any format."""
_PLACES_OF_AWQ: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight numbers in a row lies."""


class _Numbers(NamedTuple):
    """Of some outputs, as they are stored: numbers [O, I], zero points [O, G] or None, and scales [O, G]."""

    numbers_OI: Tensor
    zero_points_OG: Tensor | None
    scales_OG: Tensor


_Piece = Callable[[int, int], _Numbers]
"""What makes those of outputs from the first number to before the second."""


def dequantize(weight: QuantizedWeight, tensors: Mapping[str, Tensor], out_OI: Tensor) -> None:
    """Write the weight into out, whose shape it has. tensors: as `QuantizedWeight.tensors` calls them.

    Computed in float32 on out's device, then rounded. Raises `CheckpointError` for groups that there are not.
    """
    there = {what: tensor.to(out_OI.device) for what, tensor in tensors.items()}
    num_outputs, num_inputs = weight.shape
    piece_of = {"gptq": _gptq, "awq": _awq, "packed": _packed, "plain": _plain}[weight.format.layout](weight, there)
    groups_I = _groups(weight, there)
    step = max(PIECE // max(num_inputs, 1) // _OUTPUTS, 1) * _OUTPUTS
    for begin in range(0, num_outputs, step):
        end = min(begin + step, num_outputs)
        numbers_OI, zero_points_OG, scales_OG = piece_of(begin, end)
        weight_OI = _floats(numbers_OI)
        if groups_I is None:  # those of a group lie together, and all groups are as large
            by_group = weight_OI.view(end - begin, scales_OG.shape[1], -1)
            zero_points, scales = None if zero_points_OG is None else zero_points_OG[..., None], scales_OG[..., None]
        else:
            by_group = weight_OI
            zero_points = None if zero_points_OG is None else zero_points_OG.index_select(1, groups_I)
            scales = scales_OG.index_select(1, groups_I)
        if zero_points is not None:
            by_group -= zero_points.float()
        by_group *= scales.float()
        out_OI[begin:end].copy_(weight_OI)


def _groups(weight: QuantizedWeight, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The group of each input, [I]; None where all groups are as large, and one lies behind the other."""
    (_, num_inputs), (_, share) = weight.shape, weight.share
    in_order_I = torch.arange(num_inputs, device=tensors["weight"].device) // max(share, 1)
    groups_I = tensors.get("group", in_order_I).long()
    num_groups = -(-num_inputs // max(share, 1))
    if num_inputs and not 0 <= int(groups_I.min()) <= int(groups_I.max()) < num_groups:
        raise CheckpointError(f"tensor {weight.tensors['group']} has groups other than 0 to {num_groups - 1}")
    return None if num_inputs % max(share, 1) == 0 and torch.equal(groups_I, in_order_I) else groups_I


def _floats(numbers_OI: Tensor) -> Tensor:
    """Of float8 by a table, which takes an eighth of the time of torch's conversion on a CPU."""
    if numbers_OI.dtype != torch.float8_e4m3fn:
        return numbers_OI.float()
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(numbers_OI.device)
    return table.index_select(0, numbers_OI.view(torch.uint8).flatten().int()).view(numbers_OI.shape)


def _unpack(words_RW: Tensor, bits: int) -> Tensor:
    """Words of 32 bits to the numbers in them, lowest bits first: [R, W] to [R, W * 32 / bits], of uint8."""
    bytes_RB = words_RW.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_RB
    return torch.stack([(bytes_RB >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1).flatten(1)


def _gptq(weight: QuantizedWeight, tensors: Mapping[str, Tensor]) -> _Piece:
    bits = weight.format.bits
    zero_words_GW = tensors["zero_point"]
    if weight.format.zero_points_less_one:
        # To each number of a word, carries too: what was taken from a 0 has been borrowed from the next.
        zero_words_GW = zero_words_GW + sum(1 << shift for shift in range(0, 32, bits))
    zero_points_GO = _unpack(zero_words_GW, bits)

    def piece(begin: int, end: int) -> _Numbers:
        return _Numbers(
            _unpack(tensors["weight"][:, begin:end].T, bits),
            zero_points_GO[:, begin:end].T,
            tensors["scale"][:, begin:end].T,
        )

    return piece


def _awq(weight: QuantizedWeight, tensors: Mapping[str, Tensor]) -> _Piece:
    bits = weight.format.bits
    in_word = 32 // bits

    def unpack(words_RW: Tensor) -> Tensor:
        """[R, W] to [O, R]."""
        words_WR = words_RW.T.contiguous()
        numbers_WNR = torch.empty(len(words_WR), in_word, len(words_RW), device=words_RW.device)
        for number, place in enumerate(_PLACES_OF_AWQ):
            numbers_WNR[:, number] = (words_WR >> bits * place) & (2**bits - 1)
        return numbers_WNR.flatten(0, 1)

    def piece(begin: int, end: int) -> _Numbers:
        words = slice(begin // in_word, end // in_word)
        return _Numbers(
            unpack(tensors["weight"][:, words]),
            unpack(tensors["zero_point"][:, words]),
            tensors["scale"][:, begin:end].T,
        )

    return piece


def _packed(weight: QuantizedWeight, tensors: Mapping[str, Tensor]) -> _Piece:
    """Numbers and zero points are signed, and kept as if the least of them were 0."""
    bits = weight.format.bits
    middle = torch.full((1, 1), 2 ** (bits - 1), dtype=torch.uint8, device=tensors["weight"].device)
    zero_points_GO = _unpack(tensors["zero_point"].T, bits) if "zero_point" in tensors else None

    def piece(begin: int, end: int) -> _Numbers:
        scales_OG = tensors["scale"][begin:end]
        zero_points_OG = middle.expand_as(scales_OG) if zero_points_GO is None else zero_points_GO[:, begin:end].T
        return _Numbers(_unpack(tensors["weight"][begin:end], bits), zero_points_OG, scales_OG)

    return piece


def _plain(weight: QuantizedWeight, tensors: Mapping[str, Tensor]) -> _Piece:
    (num_outputs, _), (share, _) = weight.shape, weight.share
    rows_O = torch.arange(num_outputs, device=tensors["weight"].device) // share

    def of_outputs(tensor: Tensor, begin: int, end: int) -> Tensor:
        """Scales or zero points, [O, G] where they were fewer, and of fewer dimensions."""
        return tensor.reshape(*tensor.shape, *(1,) * (2 - tensor.dim())).float()[rows_O[begin:end]]

    def piece(begin: int, end: int) -> _Numbers:
        zero_point = tensors.get("zero_point")
        return _Numbers(
            tensors["weight"][begin:end],
            None if zero_point is None else of_outputs(zero_point, begin, end),
            of_outputs(tensors["scale"], begin, end),
        )

    return piece
