"""What adapters add to a linear layer, by our own kernel: src/lora.cpp."""

import ctypes
from typing import Final

import torch
from torch import Tensor

from aserve.kernels.native.library import Library
from aserve.kernels.ops import LoraBatch, LoraWeights

_NAMES: Final = {torch.float32: "add_lora_f32", torch.bfloat16: "add_lora_bf16"}
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_MAX_PARTS: Final = 3


class _Lora(ctypes.Structure):
    """`Lora` of lora.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("tokens", "starts", "ranks", "sizes")),
        *((name, _INT) for name in ("adapters", "parts", "inputs", "outputs", "rank")),
        *((name, _INT) for name in ("a_stride", "b_stride", "x_stride", "out_stride")),
        ("shrunk", _POINTER),
    )


class NativeLora:
    """`Ops.add_lora` for float32 and bfloat16. One instance serves one thread."""

    def __init__(self, library: Library) -> None:
        arguments = [ctypes.POINTER(_Lora), *[_POINTER] * 4]
        self._kernels = {dtype: library.function(name, arguments) for dtype, name in _NAMES.items()}
        self._shrunk = torch.empty(0)

    def takes(self, out_TO: Tensor, x_TI: Tensor, weights: LoraWeights) -> bool:
        """Whether the kernel has these types and layouts."""
        return (
            out_TO.dtype in self._kernels
            and out_TO.dtype == x_TI.dtype == weights.a_GPIR.dtype == weights.b_GRO.dtype
            and out_TO.stride(1) == x_TI.stride(1) == 1
        )

    def add(self, out_TO: Tensor, x_TI: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
        """Write out += x A B."""
        num_slots, num_parts, num_inputs, rank = weights.a_GPIR.shape
        assert len(weights.sizes) == num_parts <= _MAX_PARTS
        num_numbers = len(batch.tokens_N) * num_parts * rank
        if len(self._shrunk) < num_numbers:
            self._shrunk = torch.empty(num_numbers)
        sizes = (_INT * num_parts)(*weights.sizes)
        lora = _Lora(
            batch.tokens_N.data_ptr(),
            batch.starts_G1.data_ptr(),
            weights.ranks_G.data_ptr(),
            ctypes.addressof(sizes),
            num_slots,
            num_parts,
            num_inputs,
            sum(weights.sizes),
            rank,
            weights.a_GPIR.stride(0),
            weights.b_GRO.stride(0),
            x_TI.stride(0),
            out_TO.stride(0),
            self._shrunk.data_ptr(),
        )
        self._kernels[out_TO.dtype](
            lora, weights.a_GPIR.data_ptr(), weights.b_GRO.data_ptr(), x_TI.data_ptr(), out_TO.data_ptr()
        )
