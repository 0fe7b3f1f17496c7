"""Which architectures aserve computes by its own formulas, and which formula each is."""

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

from aserve.kernels.ops import Ops
from aserve.models.interface import CausalLM
from aserve.models.layers import LinearMethod
from aserve.models.llama import Llama
from aserve.models.qwen3 import qwen3
from aserve.models.spec import ModelSpec
from aserve.models.weights import Weights

NativeModel = Callable[[ModelSpec, Ops, Weights, LinearMethod, Tensor], CausalLM]

NATIVE: Final[Mapping[str, NativeModel]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,  # with windows
    "Qwen2ForCausalLM": Llama,  # with biases
    "Qwen3ForCausalLM": qwen3,
}
"""Keys as in `spec.FAMILIES`. Every other architecture runs through transformers_backend.py."""
