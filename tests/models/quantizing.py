"""Writes checkpoints as AutoGPTQ, AutoAWQ, compressed-tensors and DeepSeek's tools do, number by number.

Each function takes a weight [O, I], float32, and gives its tensors by the ends of their names, and the matrix that they
stand for. The loops are those of the tools' own `pack`, which aserve's reader does not share.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Quantized = tuple[dict[str, Tensor], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight numbers is the first in a word, the second, ..."""


class Rounded(NamedTuple):
    """numbers and zero_points are whole, the weight is (numbers - zero_points) * scales, by groups of inputs."""

    numbers_OI: Tensor
    zero_points_OG: Tensor
    scales_OG: Tensor
    groups_I: Tensor

    @property
    def matrix_OI(self) -> Tensor:
        zero_points, scales = (t[:, self.groups_I].float() for t in (self.zero_points_OG, self.scales_OG))
        return (self.numbers_OI - zero_points) * scales


def round_groups(weight_OI: Tensor, bits: int, group: int, *, in_order: bool = True) -> Rounded:
    """Asymmetric, by groups; not in_order: of inputs that do not lie together (act-order)."""
    num_outputs, num_inputs = weight_OI.shape
    groups_I = torch.arange(num_inputs) // group
    if not in_order:
        groups_I = groups_I[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(5))]
    num_groups, top = -(-num_inputs // group), 2**bits - 1
    scales, zero_points = torch.empty(num_outputs, num_groups), torch.empty(num_outputs, num_groups)
    for g in range(num_groups):
        part = weight_OI[:, groups_I == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, g] = ((high - low) / top).half().float()
        zero_points[:, g] = (-low / scales[:, g]).round().clamp(1, top)  # of 0 GPTQ's files have none
    scaled = (weight_OI / scales[:, groups_I]).round() + zero_points[:, groups_I]
    return Rounded(scaled.clamp(0, top).int(), zero_points.int(), scales.half(), groups_I)


def pack_rows(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[R, n * W] to [R, W]: in each word, lowest bits first, the numbers in order."""
    in_word = 32 // bits
    words = torch.zeros(len(numbers), -(-numbers.shape[1] // in_word), dtype=torch.int64)
    for w in range(words.shape[1]):
        for i in range(in_word):
            column = w * in_word + (order or range(in_word))[i]
            if column < numbers.shape[1]:
                words[:, w] |= numbers[:, column].long() << bits * i
    return torch.where(words >= 2**31, words - 2**32, words).int()


def gptq(weight_OI: Tensor, bits: int = 4, group: int = 16, *, in_order: bool = True, less: int = 1) -> Quantized:
    rounded = round_groups(weight_OI, bits, group, in_order=in_order)
    tensors = {
        "qweight": pack_rows(rounded.numbers_OI, bits).T.contiguous(),
        "qzeros": pack_rows(rounded.zero_points_OG.T - less, bits),
        "scales": rounded.scales_OG.T.contiguous(),
        "g_idx": rounded.groups_I.int(),
        "bias": torch.zeros(len(weight_OI), dtype=torch.float16),
    }
    return tensors, rounded.matrix_OI


def awq(weight_OI: Tensor, group: int = 16) -> Quantized:
    rounded = round_groups(weight_OI, 4, group)
    tensors = {
        "qweight": pack_rows(rounded.numbers_OI.T, 4, AWQ_ORDER),
        "qzeros": pack_rows(rounded.zero_points_OG.T, 4, AWQ_ORDER),
        "scales": rounded.scales_OG.T.contiguous(),
    }
    return tensors, rounded.matrix_OI


def packed(
    weight_OI: Tensor, bits: int = 4, group: int = 16, *, symmetric: bool = False, in_order: bool = True
) -> Quantized:
    rounded = round_groups(weight_OI, bits, group, in_order=in_order)
    if symmetric:
        middle = torch.full_like(rounded.zero_points_OG, 2 ** (bits - 1))
        rounded = rounded._replace(zero_points_OG=middle)
    tensors = {
        "weight_packed": pack_rows(rounded.numbers_OI, bits),
        "weight_scale": rounded.scales_OG,
        "weight_shape": torch.tensor(weight_OI.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_rows(rounded.zero_points_OG.T, bits).T.contiguous()
    if not in_order:
        tensors["weight_g_idx"] = rounded.groups_I.int()
    return tensors, rounded.matrix_OI


def int8(weight_OI: Tensor) -> Quantized:
    """A scale for each output, of bfloat16, and scales for rows that nobody quantizes."""
    scale_O1 = (weight_OI.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers_OI = (weight_OI / scale_O1.float()).round().clamp(-128, 127).to(torch.int8)
    tensors = {"weight": numbers_OI, "weight_scale": scale_O1, "input_scale": torch.tensor([0.5])}
    return tensors, numbers_OI.float() * scale_O1.float()


def float8(weight_OI: Tensor, block: tuple[int, int] | None = None, name: str = "weight_scale") -> Quantized:
    """A scale for each block of outputs and inputs, or one for all."""
    rows, columns = block or weight_OI.shape
    num_rows, num_columns = (-(-size // step) for size, step in zip(weight_OI.shape, (rows, columns), strict=True))
    scales, numbers = torch.empty(num_rows, num_columns), torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn)
    matrix = torch.empty_like(weight_OI)
    for r in range(num_rows):
        for c in range(num_columns):
            piece = slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns)
            scales[r, c] = weight_OI[piece].abs().max() / 448
            numbers[piece] = (weight_OI[piece] / scales[r, c]).to(torch.float8_e4m3fn)
            matrix[piece] = numbers[piece].float() * scales[r, c]
    scale = scales if block else scales.reshape(())
    return {"weight": numbers, name: scale, "input_scale": torch.tensor(1.0)}, matrix


def compressed_config(name: str, **weights: Any) -> dict[str, Any]:
    """As `quantization_config` has it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}


class Case(NamedTuple):
    config: dict[str, Any]
    quantize: Callable[[Tensor], Quantized]


CASES: Mapping[str, Case] = {
    "gptq": Case({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq),
    "gptq, act-order": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        lambda weight: gptq(weight, in_order=False),
    ),
    "gptq, 8 bits, version 2": Case(
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, 8, weight.shape[1], less=0),
    ),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM", "zero_point": True}, awq),
    "packed": Case(
        compressed_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False),
        packed,
    ),
    "packed, symmetric": Case(
        compressed_config("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        lambda weight: packed(weight, 8, weight.shape[1], symmetric=True),
    ),
    "packed, act-order": Case(
        compressed_config(
            "pack-quantized",
            num_bits=4,
            type="int",
            strategy="group",
            group_size=16,
            symmetric=False,
            actorder="group",
        ),
        lambda weight: packed(weight, in_order=False),
    ),
    "int8": Case(compressed_config("int-quantized", num_bits=8, type="int", strategy="channel"), int8),
    "float8 of a tensor": Case(compressed_config("float-quantized", num_bits=8, type="float"), float8),
    "float8 of outputs": Case({"quant_method": "fbgemm_fp8"}, lambda weight: float8(weight, (1, weight.shape[1]))),
    "float8 of blocks": Case(
        {"quant_method": "fp8", "weight_block_size": [20, 12], "activation_scheme": "dynamic"},
        lambda weight: float8(weight, (20, 12), "weight_scale_inv"),
    ),
}


def write_quantized(source: Path, folder: Path, case: Case) -> dict[str, Tensor]:
    """A copy of a checkpoint whose layers' linear parts are quantized. Returns what its weights stand for, by name."""
    shutil.copytree(source, folder)
    tensors, stand_for = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or ".layers." not in name:
            tensors[name] = stand_for[name] = tensor
            continue
        parts, stand_for[name] = case.quantize(tensor.float())
        layer = name.removesuffix("weight")
        tensors = {layer + end: part for end, part in parts.items()} | tensors
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": case.config}))
    return stand_for
