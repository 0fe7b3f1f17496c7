"""Attention of rotary models over the paged cache, and the projections around it.

Knows one layer's heads, window and rope table. Does not know blocks: `AttentionBatch` and the operations do. Shape
letters: kernels/ops.py.
"""

from typing import NamedTuple

from torch import Tensor

from aserve.kernels.ops import HeadNormOps, KVLayer, Ops
from aserve.models.interface import ForwardBatch
from aserve.models.layers import LinearMethod, LinearShape, Projection
from aserve.models.sharding import Split
from aserve.models.spec import ModelSpec
from aserve.models.weights import Weights


class HeadNorms(NamedTuple):
    """RMS norms of each head of the queries and of the keys by itself."""

    q_norm_D: Tensor
    k_norm_D: Tensor
    eps: float


class RotaryAttention:
    """Rotate queries and keys, write keys and values to the cache, attend to all of it. Has no weights."""

    def __init__(self, spec: ModelSpec, ops: Ops, cos_sin_LD: Tensor, window: int | None) -> None:
        self._ops = ops
        self._cos_sin_LD = cos_sin_LD
        self._window = window
        self._scale = spec.head_dim**-0.5
        self._norm_rope_and_write_kv = ops.norm_rope_and_write_kv if isinstance(ops, HeadNormOps) else None

    def __call__(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        kv: KVLayer,
        batch: ForwardBatch,
        head_norms: HeadNorms | None = None,
    ) -> Tensor:
        """The heads' outputs side by side, [T, H * D]. Norms of q and k, where there are any, come first."""
        places = batch.attention.of(kv)
        cache = (self._cos_sin_LD, batch.positions_T, kv.k_BPKD, kv.v_BPKD, places.slots_T)
        if head_norms is None:
            q_THD = self._ops.rope_and_write_kv(q_THD, k_TKD, v_TKD, *cache)
        elif self._norm_rope_and_write_kv is not None:
            q_THD = self._norm_rope_and_write_kv(q_THD, k_TKD, v_TKD, *head_norms, *cache)
        else:
            q_norm_D, k_norm_D, eps = head_norms
            q_THD, k_TKD = self._ops.rms_norm(q_THD, q_norm_D, eps), self._ops.rms_norm(k_TKD, k_norm_D, eps)
            q_THD = self._ops.rope_and_write_kv(q_THD, k_TKD, v_TKD, *cache)
        out_THD = self._ops.attend(q_THD, kv.k_BPKD, kv.v_BPKD, places, scale=self._scale, sliding_window=self._window)
        return out_THD.reshape(-1, out_THD.shape[1] * out_THD.shape[2])


class QKV:
    """Queries, keys and values of one matrix product."""

    def __init__(self, spec: ModelSpec, weights: Weights, linear: LinearMethod, prefix: str) -> None:
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._head_dim = spec.head_dim
        outputs = {
            f"{prefix}.{name}_proj": heads * spec.head_dim for name, heads in zip("qkv", self._heads, strict=True)
        }
        self._projection = Projection(
            linear, weights, LinearShape(outputs, spec.hidden_size, spec.qkv_bias, Split.OUTPUTS)
        )

    def __call__(self, x_TE: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, K, D]: views of one tensor."""
        heads_TND = self._projection(x_TE, batch).view(-1, sum(self._heads), self._head_dim)
        q_THD, k_TKD, v_TKD = heads_TND.split_with_sizes(self._heads, 1)
        return q_THD, k_TKD, v_TKD


def output_projection(spec: ModelSpec, weights: Weights, linear: LinearMethod, prefix: str) -> Projection:
    """[T, H * D] to [T, E]."""
    outputs = {f"{prefix}.o_proj": spec.hidden_size}
    shape = LinearShape(outputs, spec.num_heads * spec.head_dim, spec.out_bias, Split.INPUTS)
    return Projection(linear, weights, shape)
