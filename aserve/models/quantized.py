"""Linear layers whose weights are quantized as they are read: int8 on a CPU (ADR 0017), float8 on a GPU (ADR 0035).

Shape letters: kernels/ops.py, and I, O for the inputs and outputs of a linear layer.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aserve.core.errors import ConfigError
from aserve.core.quantization import QUANTIZATIONS
from aserve.kernels.cpu import CpuOps
from aserve.kernels.native.int8_linear import Int8Linear
from aserve.kernels.native.library import Library
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.native.weight_memory import WeightMemory
from aserve.kernels.ops import Fp8Ops, Ops
from aserve.kernels.reference_fp8 import FP8_MULTIPLE
from aserve.models.layers import DenseMethod, Embedding, Linear, LinearMethod, LinearShape, embedding, load_fused
from aserve.models.sharding import Split
from aserve.models.weights import Weights


class Int8Method:
    """Each weight quantized to int8 as soon as it is read, for our own product. Embeddings stay in the model's type.

    group: inputs that share a scale, 32 or 128; 0 for all of an output's.
    """

    def __init__(self, library: Library, group: int) -> None:
        self._memory = WeightMemory()
        self._quantize = partial(Int8Linear, library, self._memory, group=group)

    def load(self, weights: Weights, shape: LinearShape) -> Linear:
        """One matrix for all that is fused; it is read into memory that the next one takes over."""
        scratch = partial(self._memory.scratch, dtype=weights.empty(0).dtype)
        return self._quantize(*load_fused(weights, shape, scratch))

    def tie(self, table_VE: Tensor) -> tuple[Embedding, Linear]:
        """The table as it is, of which a step reads a row a token, and a head of int8, which a step reads whole."""
        return embedding(table_VE), self._quantize(table_VE)


class Fp8Linear:
    """x W^T + b, [T, I] to [T, O], of a weight of float8 and a scale for each output."""

    __slots__ = ("_bias_O", "_ops", "_scale_O", "_weight_OI")

    def __init__(self, ops: Fp8Ops, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._ops = ops
        self._weight_OI, self._scale_O = ops.quantize_weight(weight_OI)
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        return self._ops.linear(x_TI, self._weight_OI, self._bias_O, self._scale_O)

    def silu_and_mul(self) -> Callable[[Tensor], Tensor] | None:
        """As `GatingLinear` says."""
        product = self._ops.linear_silu_and_mul
        return partial(product, weight_OI=self._weight_OI, bias_O=self._bias_O, scale_O=self._scale_O)


class Fp8Method:
    """Each weight quantized to float8 as soon as it is read; embeddings and the output head stay in the model's type.

    Raises `ConfigError` for a layer whose sizes no product in float8 takes.
    """

    def __init__(self, ops: Fp8Ops) -> None:
        self._ops = ops
        self._dense = DenseMethod(ops)
        self.tie = self._dense.tie

    def load(self, weights: Weights, shape: LinearShape) -> Linear:
        """One matrix for all that is fused."""
        if shape.split is Split.VOCABULARY:
            return self._dense.load(weights, shape)
        sizes = (sum(shape.outputs.values()), shape.num_inputs)
        if any(size % FP8_MULTIPLE for size in sizes):
            raise ConfigError(
                f"quantization fp8: {', '.join(shape.outputs)} is {sizes[0]} x {sizes[1]}, outputs and inputs, which "
                f"have to be multiples of {FP8_MULTIPLE}"
            )
        return Fp8Linear(self._ops, *load_fused(weights, shape))


def quantizing_method(ops: Ops, quantization: str, device: torch.device) -> LinearMethod:
    """Of `QUANTIZATIONS`, where `why_not` knows of nothing. Raises `ConfigError` where there are no products of it."""
    reason: str | None = "these operations have no products of it"
    if quantization == "fp8":
        if isinstance(ops, Fp8Ops) and (reason := ops.why_no_fp8(device)) is None:
            return Fp8Method(ops)
    elif isinstance(ops, NativeOps):
        return Int8Method(ops.library, QUANTIZATIONS[quantization].group)
    elif isinstance(ops, CpuOps):
        reason = f"it needs aserve's own CPU kernels: {ops.why_plain}"
    raise ConfigError(f"quantization {quantization}: {reason}")
