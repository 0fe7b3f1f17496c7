"""TritonOps: the operations on CUDA, one kernel file each. Launches only: nothing here waits for the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.kernels import activation, block_copy, logit_controls, lora, norm, rope, sampling, scores, token_masks
from aserve.kernels.attention_tiles import Capability
from aserve.kernels.decode_attention import decode_attention
from aserve.kernels.few_rows_linear import few_rows_linear, is_few
from aserve.kernels.fp8_linear import fp8_linear, why_no_fp8
from aserve.kernels.ops import (
    AttentionBatch,
    LogitControls,
    LoraBatch,
    LoraWeights,
    SamplingBatch,
    Scores,
    TokenMasks,
)
from aserve.kernels.prefill_attention import prefill_attention
from aserve.kernels.reference_fp8 import quantize_weight
from aserve.kernels.thin_linear import is_thin, thin_linear, thin_silu_and_mul


class TritonOps:
    """`Ops`, `HeadNormOps` and `Fp8Ops` in Triton; bfloat16, float16 and float32.

    num_sms: how many processors the device has; decode attention splits contexts so as to fill them.
    capability: what kind of device it is, for the shapes of attention's tiles.
    """

    def __init__(self, num_sms: int, capability: Capability = (9, 0)) -> None:
        self._num_sms = num_sms
        self._capability = capability
        self._is_hopper = capability[0] == 9

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """One kernel."""
        return norm.rms_norm(x_TE, weight_E, eps)

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """One kernel."""
        return norm.add_rms_norm(x_TE, residual_TE, weight_E, eps)

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """One kernel."""
        return activation.silu_and_mul(gate_up_TF2)

    def gelu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """One kernel."""
        return activation.gelu_and_mul(gate_up_TF2)

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O: Tensor | None = None) -> Tensor:
        """One kernel for a row or two, one or two for some more on Hopper, else cuBLAS; one more quantizes rows."""
        if is_thin(x_TI, weight_OI):
            return thin_linear(x_TI, weight_OI, bias_O, scale_O)
        if scale_O is not None:
            return fp8_linear(x_TI, weight_OI, bias_O, scale_O, self._num_sms if self._is_hopper else None)
        if self._is_hopper and is_few(x_TI, weight_OI, self._num_sms):
            return few_rows_linear(x_TI, weight_OI, bias_O, self._num_sms)
        return F.linear(x_TI, weight_OI, bias_O)

    def linear_silu_and_mul(
        self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O: Tensor | None = None
    ) -> Tensor:
        """Likewise; one kernel more for many rows."""
        if is_thin(x_TI, weight_OI):
            return thin_silu_and_mul(x_TI, weight_OI, bias_O, scale_O)
        return self.silu_and_mul(self.linear(x_TI, weight_OI, bias_O, scale_O))

    def quantize_weight(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """By torch."""
        return quantize_weight(weight_OI)

    def why_no_fp8(self, device: torch.device) -> str | None:
        """As the smallest product of many rows shows."""
        return why_no_fp8(device)

    def rope_and_write_kv(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_sin_LD: Tensor,
        positions_T: Tensor,
        k_cache_BPKD: Tensor,
        v_cache_BPKD: Tensor,
        slots_T: Tensor,
    ) -> Tensor:
        """One kernel."""
        return rope.rope_and_write_kv(q_THD, k_TKD, v_TKD, cos_sin_LD, positions_T, k_cache_BPKD, v_cache_BPKD, slots_T)

    def norm_rope_and_write_kv(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        q_norm_D: Tensor,
        k_norm_D: Tensor,
        eps: float,
        cos_sin_LD: Tensor,
        positions_T: Tensor,
        k_cache_BPKD: Tensor,
        v_cache_BPKD: Tensor,
        slots_T: Tensor,
    ) -> Tensor:
        """One kernel."""
        return rope.norm_rope_and_write_kv(
            q_THD, k_TKD, v_TKD, q_norm_D, k_norm_D, eps, cos_sin_LD, positions_T, k_cache_BPKD, v_cache_BPKD, slots_T
        )

    def write_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor, slots_T: Tensor
    ) -> None:
        """One kernel."""
        rope.write_kv(k_TKD, v_TKD, k_cache_BPKD, v_cache_BPKD, slots_T)

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
        """Decoding sequences by one kernel, or two when contexts are split; the others by another."""
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if batch.num_decodes:
            decode_attention(
                q_THD,
                k_cache_BPKD,
                v_cache_BPKD,
                batch,
                out_THD,
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                num_sms=self._num_sms,
                capability=self._capability,
            )
        if batch.num_decodes < batch.seq_lens_S.shape[0]:
            prefill_attention(
                q_THD,
                k_cache_BPKD,
                v_cache_BPKD,
                batch,
                out_THD,
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                capability=self._capability,
            )
        return out_THD

    def add_lora(self, out_TO: Tensor, x_TI: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
        """Two kernels, however many adapters."""
        lora.add_lora(out_TO, x_TI, weights, batch)

    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
        """Two kernels for a greedy batch, five at most."""
        return sampling.sample(logits_SV, batch)

    def control_logits(self, logits_SV: Tensor, controls: LogitControls) -> None:
        """Two kernels and a reduction; bad words take one more."""
        logit_controls.control_logits(logits_SV, controls)

    def mask_logits(self, logits_SV: Tensor, masks: TokenMasks) -> None:
        """One kernel."""
        token_masks.mask_logits(logits_SV, masks)

    def score(self, logits_SV: Tensor, targets_S: Tensor, num_top: int) -> Scores:
        """One kernel; the likeliest tokens by torch."""
        return scores.score(logits_SV, targets_S, num_top)

    def copy_blocks(self, planes_YBX: Tensor, sources_N: Tensor, targets_N: Tensor) -> None:
        """One kernel."""
        block_copy.copy_blocks(planes_YBX, sources_N, targets_N)

    def gather_blocks(self, planes_YBX: Tensor, blocks_N: Tensor, packed_NYX: Tensor) -> None:
        """One kernel."""
        block_copy.gather_blocks(planes_YBX, blocks_N, packed_NYX)

    def scatter_blocks(self, packed_NYX: Tensor, planes_YBX: Tensor, blocks_N: Tensor) -> None:
        """One kernel."""
        block_copy.scatter_blocks(packed_NYX, planes_YBX, blocks_N)
