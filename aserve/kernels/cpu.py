"""CpuOps: the operations on a CPU, written for few torch calls and little memory traffic.

It knows that a small step costs more in calls (about 2 microseconds each) than in arithmetic, that torch's attention
reads strided keys without a copy, and that fresh megabytes cost page faults, so that gathered context goes to a buffer
that is kept. It does not know what the operations mean beyond `ReferenceOps`, its twin. One instance serves one thread,
and tensors that describe a step are not changed while it runs: what one layer worked out of them serves the next.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.kernels.cpu_attention import ContextGather, Layer, Read, attend_all, computed_in, plan_reads
from aserve.kernels.cpu_lora import add_lora
from aserve.kernels.cpu_sampling import control_logits, mask_logits, sample
from aserve.kernels.ops import (
    AttentionBatch,
    LogitControls,
    LoraBatch,
    LoraWeights,
    SamplingBatch,
    Scores,
    TokenMasks,
)
from aserve.kernels.top_tokens import with_top_tokens

_MAX_LAYER_KINDS = 16
"""Layer groups times windows, so many of which are remembered for the layers of a step."""


_GRAIN = 32768
"""Elements that torch gives to one thread at least."""


@lru_cache
def _scalar(x: float) -> Tensor:
    return torch.tensor(x)


def _by_whole_rows(function: Callable[[Tensor], Tensor], x_TF: Tensor) -> Tensor:
    """function(x), of each element by itself, without two threads in one row.

    torch deals elements out in equal shares, and computes what of a share fills no vector by scalar instructions, whose
    exponential rounds in another way. A row that nobody shares always has the same of them.
    """
    shares = _shares(*x_TF.shape, torch.get_num_threads())
    return function(x_TF) if len(shares) < 2 else torch.cat([function(part_TF) for part_TF in x_TF.split(shares)])


@lru_cache(maxsize=4096)
def _shares(num_rows: int, width: int, num_threads: int) -> list[int]:
    """Rows to take at once, so that torch's threads have whole rows each: all, but for some of the last."""

    def is_dealt_by_rows(num_rows: int) -> bool:
        num_shares = max(1, min(num_threads, -(-num_rows * width // _GRAIN)))
        return num_rows % num_shares == 0

    shares = []
    while num_rows:
        shares.append(next(filter(is_dealt_by_rows, range(num_rows, 0, -1)), 1))
        num_rows -= shares[-1]
    return shares


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Turns:
    """The rotary embedding's factors at a step's positions, which its layers ask for one after the other."""

    def __init__(self) -> None:
        self._asked: tuple[Tensor, Tensor] | None = None
        self._factors = torch.empty(0), torch.empty(0)

    def at(self, positions_T: Tensor, cos_sin_LD: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, cos) and (-sin, sin), [T, 1, D] each. The same two tensors, unchanged, are answered from memory."""
        if self._asked is None or positions_T is not self._asked[0] or cos_sin_LD is not self._asked[1]:
            cos_T1d, sin_T1d = cos_sin_LD.index_select(0, positions_T).unsqueeze(1).chunk(2, dim=-1)
            self._factors = torch.cat((cos_T1d, cos_T1d), -1), torch.cat((-sin_T1d, sin_T1d), -1)
            self._asked = positions_T, cos_sin_LD
        return self._factors


class CpuOps:
    """`Ops` for a CPU; bfloat16, float16 and float32. why_plain: why it is these, and not `NativeOps`, for people."""

    def __init__(self, why_plain: str = "they were asked for") -> None:
        self.why_plain = why_plain
        self._gather = ContextGather()
        self._turns = Turns()
        self._planned: deque[tuple[AttentionBatch, int | None, Sequence[Read]]] = deque(maxlen=_MAX_LAYER_KINDS)

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """x / sqrt(|x|^2 / E + eps) * weight, in float32: the same number in half as many passes.

        Not by hypot, which rounds differently where it is not vectorized.
        """
        x32_TE = x_TE.float()
        norm_T1 = torch.linalg.vector_norm(x32_TE, dim=-1, keepdim=True)
        rms_T1 = torch.addcmul(_scalar(eps), norm_T1, norm_T1, value=1 / weight_E.shape[0]).sqrt_()
        return (x32_TE / rms_T1).mul_(weight_E).to(x_TE.dtype)

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum first, in the model's type."""
        total_TE = x_TE + residual_TE
        return self.rms_norm(total_TE, weight_E, eps), total_TE

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """In half precision silu(gate) is rounded before the product, which the twin does not do."""
        gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
        return _by_whole_rows(F.silu, gate_TF).mul_(up_TF)

    def gelu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """In half precision gelu(gate) is rounded before the product, which the twin does not do."""
        gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
        return _by_whole_rows(_gelu_tanh, gate_TF).mul_(up_TF)

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
        """q and k are turned as one tensor: x cos + (x's halves exchanged) (-sin, sin)."""
        cos_T1D, sin_T1D = self._turns.at(positions_T, cos_sin_LD)
        x_TND = torch.cat((q_THD, k_TKD), dim=1).float()
        turned_TND = x_TND.roll(x_TND.shape[-1] // 2, -1).mul_(sin_T1D).addcmul_(x_TND, cos_T1D).to(q_THD.dtype)
        q_THD, k_TKD = turned_TND.split_with_sizes((q_THD.shape[1], k_TKD.shape[1]), 1)
        self.write_kv(k_TKD, v_TKD, k_cache_BPKD, v_cache_BPKD, slots_T)
        return q_THD

    def write_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor, slots_T: Tensor
    ) -> None:
        """A slot is a row of the cache seen flat."""
        for x_TKD, cache_BPKD in ((k_TKD, k_cache_BPKD), (v_TKD, v_cache_BPKD)):
            cache_BPKD.flatten(0, 1).index_copy_(0, slots_T, x_TKD.to(cache_BPKD.dtype))

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
        dtype = computed_in(q_THD.dtype)
        reads = self._reads(batch, k_cache_BPKD.shape[1], sliding_window, dtype)
        return attend_all(reads, q_THD, Layer(k_cache_BPKD, v_cache_BPKD, self._gather, dtype), scale, soft_cap)

    def _reads(
        self, batch: AttentionBatch, block_size: int, sliding_window: int | None, dtype: torch.dtype
    ) -> Sequence[Read]:
        """As the layers of this step before, if one had the same batch and window."""
        for known, window, reads in self._planned:
            if known is batch and window == sliding_window:
                return reads
        reads = plan_reads(batch, block_size, sliding_window, dtype)
        self._planned.append((batch, sliding_window, reads))
        return reads

    def add_lora(self, out_TO: Tensor, x_TI: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
        """Adapter by adapter, in tiles of as many rows each."""
        add_lora(out_TO, x_TI, weights, batch)

    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
        """One token id a row."""
        return sample(logits_SV, batch)

    def control_logits(self, logits_SV: Tensor, controls: LogitControls) -> None:
        """All rows at once."""
        control_logits(logits_SV, controls)

    def mask_logits(self, logits_SV: Tensor, masks: TokenMasks) -> None:
        """Row by row."""
        mask_logits(logits_SV, masks)

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
