"""Linear layers on a CPU whose weights are int8, by our own product: src/int8.cpp.

A weight takes half of the memory of bfloat16, and few rows take the time of reading it. Rows are quantized as they
come, each by itself, so that a row has the same bits whatever else is in the step.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from aserve.kernels.native.library import Library
from aserve.kernels.native.native_linear import Layer, gated_layer, rows_and_room
from aserve.kernels.native.weight_memory import WeightMemory

INT8_DTYPES: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""What rows may be, by the names of the kernels."""
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Int8Linear:
    """x W^T + b, [T, I] to [T, O], in the type of W as it came, of which nothing is kept but its int8 numbers.

    group: inputs that share a scale, 32 or 128; 0 for all of an output's.
    """

    __slots__ = ("_address", "_bias_O", "_dtype", "_layer", "_library", "_packed", "_product", "_row_bytes")

    def __init__(
        self,
        library: Library,
        memory: WeightMemory,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        group: int = 0,
    ) -> None:
        name, self._dtype = INT8_DTYPES[weight_OI.dtype], weight_OI.dtype
        weight_OI = weight_OI.contiguous()
        self._library = library
        self._bias_O = None if bias_O is None else bias_O.contiguous()
        bias = None if self._bias_O is None else self._bias_O.data_ptr()
        num_outputs, num_inputs = weight_OI.shape
        self._layer = Layer(None, bias, num_inputs, num_outputs, group)
        self._address = ctypes.addressof(self._layer)
        num_words, row_bytes = _INT(), _INT()
        library.function("int8_sizes", [_POINTER] * 3)(
            self._address, ctypes.addressof(num_words), ctypes.addressof(row_bytes)
        )
        self._row_bytes = row_bytes.value
        self._packed = memory.empty((num_words.value,), torch.int32)
        self._layer.weights = self._packed.data_ptr()
        library.function(f"pack_int8_{name}", [_POINTER] * 3)(
            self._address, weight_OI.data_ptr(), self._packed.data_ptr()
        )
        arguments = [_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER]
        self._product = library.function(f"product_int8_{name}", arguments)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        return self._multiply(self._layer, self._address, x_TI)

    def silu_and_mul(self) -> Callable[[Tensor], Tensor] | None:
        """As of `NativeLinear`."""
        gated = gated_layer(self._library, self._layer)
        return None if gated is None else partial(self._multiply, gated, ctypes.addressof(gated))

    def _multiply(self, layer: Layer, address: int, x_TI: Tensor) -> Tensor:
        x_TI, out_TO = rows_and_room(x_TI, layer, self._dtype)
        rows_TB = torch.empty(len(x_TI), self._row_bytes, dtype=torch.uint8)
        self._product(address, x_TI.data_ptr(), x_TI.stride(0), out_TO.data_ptr(), len(x_TI), rows_TB.data_ptr())
        return out_TO
