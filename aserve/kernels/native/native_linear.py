"""Linear layers on a CPU by our own product: one packed weight, read as fast as memory gives it where rows are few.

A row has the same bits whatever else is in the step. Wide rows are computed in tiles that stay in registers, as in
BLIS (Van Zee and van de Geijn, 2015).
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Final

import torch
from torch import Tensor

from aserve.kernels.native.library import Library
from aserve.kernels.native.weight_memory import WeightMemory
from aserve.kernels.packed_linear import is_intel

_NAMES: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Layer(ctypes.Structure):
    """`Layer` of products.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("weights", "bias")),
        *((n, _INT) for n in ("inputs", "outputs", "group", "gated")),
    )


def can_be_native(dtype: torch.dtype) -> bool:
    """Whether our product is the one to take: not for float16."""
    return dtype in _NAMES


class NativeLinear:
    """x W^T + b. Keeps the weight packed and not as it came; `embed` gives rows of it back."""

    __slots__ = ("_address", "_bias_O", "_dtype", "_layer", "_library", "_packed", "_product", "_unpack_rows")

    def __init__(self, library: Library, memory: WeightMemory, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        name = _NAMES[weight_OI.dtype]
        (num_outputs, num_inputs), self._dtype = weight_OI.shape, weight_OI.dtype
        self._library = library
        self._packed = _pack(library, memory, weight_OI.contiguous())
        self._bias_O = None if bias_O is None else bias_O.contiguous()
        bias = None if self._bias_O is None else self._bias_O.data_ptr()
        self._layer = Layer(self._packed.data_ptr(), bias, num_inputs, num_outputs)
        self._address = ctypes.addressof(self._layer)
        self._product = library.function(_product_name(library, name), [_POINTER, _POINTER, _INT, _POINTER, _INT])
        self._unpack_rows = library.function(f"unpack_rows_{name}", [_POINTER, _POINTER, _POINTER, _INT])

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        return self._multiply(self._layer, self._address, x_TI)

    def _multiply(self, layer: Layer, address: int, x_TI: Tensor) -> Tensor:
        x_TI, out_TO = rows_and_room(x_TI, layer, self._dtype)
        self._product(address, x_TI.data_ptr(), x_TI.stride(0), out_TO.data_ptr(), out_TO.shape[0])
        return out_TO

    def silu_and_mul(self) -> Callable[[Tensor], Tensor] | None:
        """What gives silu(a) * b, [T, O / 2], of [T, I], a and b being halves of the outputs, which it writes nowhere.

        None where the halves are not whole panels. It has the same bits as our own operation of that name behind this.
        """
        gated = gated_layer(self._library, self._layer)
        return None if gated is None else partial(self._multiply, gated, ctypes.addressof(gated))

    def embed(self, ids_T: Tensor) -> Tensor:
        """Rows of W, [T, I], by their int64 numbers. One that is out of bounds gives a row that is not a number."""
        assert ids_T.dtype == torch.int64
        ids_T = ids_T.contiguous()
        out_TI = torch.empty(ids_T.shape[0], self._layer.inputs, dtype=self._dtype)
        self._unpack_rows(self._address, ids_T.data_ptr(), out_TI.data_ptr(), ids_T.shape[0])
        return out_TI


def rows_and_room(x_TI: Tensor, layer: Layer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows, each in one piece, [T, I], and where the products of a layer go, [T, O], which holds nothing yet."""
    num_rows, num_inputs = x_TI.shape
    assert num_inputs == layer.inputs
    assert x_TI.dtype == dtype
    num_outputs = layer.outputs // 2 if layer.gated else layer.outputs
    return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous(), x_TI.new_empty(num_rows, num_outputs)


def gated_layer(library: Library, layer: Layer) -> Layer | None:
    """The same weights, of whose outputs the first half are gates of the second; None where no panel ends between."""
    num_panels, rest = divmod(layer.outputs, 2 * _panel_outputs(library))
    return None if rest else Layer(layer.weights, layer.bias, layer.inputs, layer.outputs, layer.group, num_panels)


def with_dots(kernel: str, name: str) -> str:
    """The kernel of a type, by the processor's own product of bfloat16, but on Intel's: there to widen is faster."""
    return f"{kernel}_dots_bf16" if name == "bf16" and not is_intel() else f"{kernel}_{name}"


def _product_name(library: Library, name: str) -> str:
    """By matrix units where the processor has them (Intel's AMX)."""
    return "product_dots_bf16" if name == "bf16" and library.variant == "amx" else with_dots("product", name)


def _pack(library: Library, memory: WeightMemory, weight_OI: Tensor) -> Tensor:
    """By whole panels, and in whole words of 4 bytes."""
    num_outputs, num_inputs = weight_OI.shape
    panel, per_word = _panel_outputs(library), 4 // weight_OI.itemsize
    shape = -(-num_outputs // panel) * panel, -(-num_inputs // per_word) * per_word
    packed = memory.empty(shape, weight_OI.dtype)
    pack = library.function(f"pack_{_NAMES[weight_OI.dtype]}", [_POINTER, _POINTER, _INT, _INT])
    pack(weight_OI.data_ptr(), packed.data_ptr(), num_outputs, num_inputs)
    return packed


@cache
def _panel_outputs(library: Library) -> int:
    outputs = _INT()
    library.function("panel_outputs", [_POINTER])(ctypes.addressof(outputs))
    return outputs.value
