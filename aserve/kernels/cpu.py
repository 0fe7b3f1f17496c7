"""CpuOps: the operations on a CPU, written for few torch calls and little memory traffic.

It knows that a small step costs more in calls (about 2 microseconds each) than in arithmetic, that torch's attention
reads strided keys without a copy, and that fresh megabytes cost page faults, so that gathered context goes to a buffer
that is kept. It does not know what the operations mean beyond `ReferenceOps`, its twin. One instance serves one thread.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.kernels.cpu_attention import ContextGather, attend_decodes, attend_prefill
from aserve.kernels.cpu_sampling import control_logits, sample
from aserve.kernels.ops import AttentionBatch, LogitControls, SamplingBatch, Scores
from aserve.kernels.top_tokens import with_top_tokens


class CpuOps:
    """`Ops` for a CPU; bfloat16, float16 and float32."""

    def __init__(self) -> None:
        self._gather = ContextGather()

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """torch's own norm computes in float32."""
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Two calls."""
        total_TE = x_TE + residual_TE
        return F.rms_norm(total_TE, weight_E.shape, weight_E, eps), total_TE

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """In half precision silu(gate) is rounded before the product, which the twin does not do."""
        gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
        return F.silu(gate_TF).mul_(up_TF)

    def gelu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """In half precision gelu(gate) is rounded before the product, which the twin does not do."""
        gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
        return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)

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
        """q and k are turned as one tensor: one set of calls instead of two."""
        num_tokens, num_heads, head_dim = q_THD.shape
        cos_sin_T12d = cos_sin_LD.index_select(0, positions_T).view(num_tokens, 1, 2, head_dim // 2)
        sin_T1d = cos_sin_T12d[:, :, 1]
        x_TN2d = torch.cat((q_THD, k_TKD), dim=1).float().view(num_tokens, -1, 2, head_dim // 2)
        first_TNd, second_TNd = x_TN2d.unbind(2)
        turned_TN2d = x_TN2d * cos_sin_T12d[:, :, :1]
        turned_TN2d[:, :, 0].addcmul_(second_TNd, sin_T1d, value=-1)
        turned_TN2d[:, :, 1].addcmul_(first_TNd, sin_T1d)
        turned_TND = turned_TN2d.view(num_tokens, -1, head_dim).to(q_THD.dtype)
        self.write_kv(turned_TND[:, num_heads:], v_TKD, k_cache_BPKD, v_cache_BPKD, slots_T)
        return turned_TND[:, :num_heads]

    def write_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor, slots_T: Tensor
    ) -> None:
        """A slot is a row of the cache seen flat."""
        k_cache_BPKD.flatten(0, 1).index_copy_(0, slots_T, k_TKD)
        v_cache_BPKD.flatten(0, 1).index_copy_(0, slots_T, v_TKD)

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
        """Decoding sequences together, the others one by one."""
        context = self._gather.over(k_cache_BPKD, v_cache_BPKD, batch.block_table_SM)
        limits = (scale, sliding_window, soft_cap)
        seq_lens = batch.seq_lens_S.tolist()
        num_decodes = batch.num_decodes
        if num_decodes == len(seq_lens):
            return attend_decodes(q_THD, context, seq_lens, *limits)
        out_THD = torch.empty_like(q_THD)
        if num_decodes:
            out_THD[:num_decodes] = attend_decodes(q_THD[:num_decodes], context, seq_lens[:num_decodes], *limits)
        starts = batch.query_starts_S1.tolist()
        for s in range(num_decodes, len(seq_lens)):
            tokens = slice(starts[s], starts[s + 1])
            attend_prefill(q_THD[tokens], out_THD[tokens], context, s, seq_lens[s], *limits)
        return out_THD

    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
        """One token id a row."""
        return sample(logits_SV, batch)

    def control_logits(self, logits_SV: Tensor, controls: LogitControls) -> None:
        """All rows at once."""
        control_logits(logits_SV, controls)

    def score(self, logits_SV: Tensor, targets_S: Tensor, num_top: int) -> Scores:
        """All rows at once; nothing is sorted."""
        ranks_S = (logits_SV >= logits_SV.gather(1, targets_S[:, None])).sum(-1)
        return with_top_tokens(logits_SV, targets_S, logits_SV.logsumexp(-1), ranks_S, num_top)

    def copy_blocks(self, planes_YBX: Tensor, sources_N: Tensor, targets_N: Tensor) -> None:
        """Through a buffer."""
        planes_YBX.index_copy_(1, targets_N, planes_YBX.index_select(1, sources_N))

    def gather_blocks(self, planes_YBX: Tensor, blocks_N: Tensor, packed_NYX: Tensor) -> None:
        """Through a buffer."""
        packed_NYX.copy_(planes_YBX.index_select(1, blocks_N).transpose(0, 1))

    def scatter_blocks(self, packed_NYX: Tensor, planes_YBX: Tensor, blocks_N: Tensor) -> None:
        """At once."""
        planes_YBX.index_copy_(1, blocks_N, packed_NYX.transpose(0, 1))
