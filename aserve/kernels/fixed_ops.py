"""FixedOps: TritonOps that give a row the same bits in any batch. What is not here, TritonOps compute row by row."""

from torch import Tensor

from aserve.kernels.fixed_attention import fixed_attention
from aserve.kernels.fixed_linear import fixed_linear
from aserve.kernels.ops import AttentionBatch
from aserve.kernels.triton_ops import TritonOps


class FixedOps(TritonOps):
    """`Ops` and `LinearOps`: attention and products in tiles and splits that no batch changes."""

    def attend(
        self,
        q_THD: Tensor,
        k_cache_BPKD: Tensor,
        v_cache_BPKD: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Decoding sequences by two kernels, the others by the first of them."""
        return fixed_attention(
            q_THD,
            k_cache_BPKD,
            v_cache_BPKD,
            batch,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            capability=self._capability,
        )

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O: Tensor | None = None) -> Tensor:
        """One kernel. Rows stay as they are beside a weight of float8."""
        return fixed_linear(x_TI, weight_OI, bias_O, scale_O)

    def linear_silu_and_mul(
        self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O: Tensor | None = None
    ) -> Tensor:
        """Two kernels."""
        return self.silu_and_mul(self.linear(x_TI, weight_OI, bias_O, scale_O))
