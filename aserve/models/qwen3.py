"""Qwen3 (arXiv 2505.09388): Llama whose queries and keys are normed, head by head, before they are rotated."""

from torch import Tensor

from aserve.kernels.ops import KVLayer, Ops
from aserve.models.attention import QKV, HeadNorms, RotaryAttention, output_projection
from aserve.models.interface import ForwardBatch
from aserve.models.layers import LinearMethod, load_tensor
from aserve.models.llama import Llama
from aserve.models.spec import ModelSpec
from aserve.models.weights import Weights


class Qwen3Attention:
    """out(attend(rope(norm(q)), rope(norm(k)), v))."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        weights: Weights,
        linear: LinearMethod,
        prefix: str,
        attend: RotaryAttention,
    ) -> None:
        self._qkv = QKV(spec, weights, linear, prefix)
        q_norm_D = load_tensor(weights, f"{prefix}.q_norm.weight", spec.head_dim)
        k_norm_D = load_tensor(weights, f"{prefix}.k_norm.weight", spec.head_dim)
        self._head_norms = HeadNorms(q_norm_D, k_norm_D, spec.norm_eps)
        self._attend = attend
        self._out = output_projection(spec, weights, linear, prefix)

    def __call__(self, x_TE: Tensor, kv: KVLayer, batch: ForwardBatch) -> Tensor:
        """[T, E] to [T, E]."""
        return self._out(self._attend(*self._qkv(x_TE, batch), kv, batch, self._head_norms), batch)


def qwen3(spec: ModelSpec, ops: Ops, weights: Weights, linear: LinearMethod, cos_sin_LD: Tensor) -> Llama:
    """The decoder, a `CausalLM`."""
    return Llama(spec, ops, weights, linear, cos_sin_LD, attention=Qwen3Attention)
