"""ReferenceOps: every operation in plain torch, one sequence and one row at a time. The oracle of the fast ones.

It knows what each operation means and nothing of speed. All arithmetic is float32, and results return in the input's
type. Shape letters: ops.py.

How a row is sampled, here and in every implementation, unless its largest logit, after the bans, is not finite:
  1. Banned ids get -inf. At temperature 0 the token is the largest logit, the lowest id among equals.
  2. weight = exp((logit - max) / temperature), float32; the likeliest token's is 1.
  3. A weight counts as floor(weight * 2^32) units of mass. Sums of integers are exact in any order, so the result does
     not depend on how a kernel splits a row. (A float32 running sum is coarser than this: it has 24 bits.)
  4. The filters are floors under the weight, and equal weights share one fate: the top_k-th largest weight; then the
     largest weight such that those not under it have top_p of the mass that is left (nucleus sampling: Holtzman et al.,
     "The curious case of neural text degeneration", ICLR 2020); and min_p itself (Nguyen et al., "Turning up the heat:
     min-p sampling", ICLR 2025).
  5. One random word r in [0, 2^32), by philox.py; the token is the first id whose cumulative mass exceeds
     r / 2^32 of the kept total.

What `control_logits` does to a row before that, in vLLM's order:
  1. Bans: ids that are not allowed, banned ids, and the last token of each bad word whose others were just generated.
  2. logit_bias is added.
  3. Repetition penalty (Keskar et al., "CTRL", 2019): logits of tokens in prompt or output are divided by it where they
     are positive and multiplied where they are not. Then OpenAI's penalties, on generated tokens alone: frequency for
     each time that a token was generated, presence once.
A row whose every token would be banned keeps its logits: the bans are void, rather than the answer not a number.
Masks (`mask_logits`) come before all of it and are never void: a row that they leave nothing has no token.
What is finite stays finite: a logit counts as at most LARGEST_PENALIZED in the product or quotient. What was not finite
before is not finite after, so that it is found.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.core.columns import PenaltyColumns
from aserve.kernels.ops import (
    NO_TOKEN,
    AttentionBatch,
    LogitControls,
    LoraBatch,
    LoraWeights,
    SamplingBatch,
    Scores,
    TokenMasks,
)
from aserve.kernels.philox import random_words
from aserve.kernels.reference_fp8 import as_kept

LARGEST_PENALIZED = 2.0**120
"""A hundredth of the largest float32, or less: times or over a repetition penalty, in [0.01, 100], it stays finite."""
MASS_UNIT = 2.0**32
"""Units of mass of the likeliest token. Totals stay under 2^53, exact as int64 and as float64, up to 2M tokens."""


class ReferenceOps:
    """The torch twin of everything in `Ops`: plain, and slow."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        x32 = x_TE.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (x32 * scale * weight_E.float()).to(x_TE.dtype)

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm reads the sum as it is stored, rounded to x's type."""
        total_TE = x_TE + residual_TE
        return self.rms_norm(total_TE, weight_E, eps), total_TE

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """silu(gate) * up, [T, F]."""
        gate_TF, up_TF = gate_up_TF2.float().chunk(2, dim=-1)
        return (F.silu(gate_TF) * up_TF).to(gate_up_TF2.dtype)

    def gelu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """gelu_tanh(gate) * up, [T, F]."""
        gate_TF, up_TF = gate_up_TF2.float().chunk(2, dim=-1)
        return (F.gelu(gate_TF, approximate="tanh") * up_TF).to(gate_up_TF2.dtype)

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
        """Rotate q and k, write k and v, return the rotated q."""
        cos_sin_TD = cos_sin_LD[positions_T]
        self.write_kv(_rotate(k_TKD, cos_sin_TD), v_TKD, k_cache_BPKD, v_cache_BPKD, slots_T)
        return _rotate(q_THD, cos_sin_TD)

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
        """One after the other."""
        q_THD, k_TKD = self.rms_norm(q_THD, q_norm_D, eps), self.rms_norm(k_TKD, k_norm_D, eps)
        return self.rope_and_write_kv(q_THD, k_TKD, v_TKD, cos_sin_LD, positions_T, k_cache_BPKD, v_cache_BPKD, slots_T)

    def write_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor, slots_T: Tensor
    ) -> None:
        """cache[slot // P, slot % P] = k, v, in the type of the cache."""
        num_positions = k_cache_BPKD.shape[1]
        blocks_T, offsets_T = slots_T // num_positions, slots_T % num_positions
        for x_TKD, cache_BPKD in ((k_TKD, k_cache_BPKD), (v_TKD, v_cache_BPKD)):
            cache_BPKD[blocks_T, offsets_T] = as_kept(x_TKD, cache_BPKD.dtype)

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
        """One sequence after the other; its queries are the last positions of its context."""
        out_THD = torch.zeros_like(q_THD)
        starts = batch.query_starts_S1.tolist()
        for s, context_len in enumerate(batch.seq_lens_S.tolist()):
            tokens = slice(starts[s], starts[s + 1])
            first = 0  # of the positions that any of the queries sees; blocks before it may be others' by now
            if sliding_window is not None:
                first = max(0, context_len - (starts[s + 1] - starts[s]) - sliding_window + 1)
            k_CKD, v_CKD = (
                cache[batch.block_table_SM[s].long()].flatten(0, 1)[first:context_len]
                for cache in (k_cache_BPKD, v_cache_BPKD)
            )
            out_THD[tokens] = _attend_one(q_THD[tokens], k_CKD, v_CKD, scale, sliding_window, soft_cap)
        return out_THD

    def add_lora(self, out_TO: Tensor, x_TI: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
        """out += x A B, part by part."""
        for adapter, (start, end) in enumerate(pairwise(batch.starts_G1.tolist())):
            parts_RO = weights.b_GRO[adapter].float().split(weights.sizes, 1)
            for token in batch.tokens_N[start:end].tolist():
                x_I = x_TI[token].float()
                shrunk_PR = [x_I @ a_IR.float() for a_IR in weights.a_GPIR[adapter]]
                added_O = torch.cat([s_R @ b_RO for s_R, b_RO in zip(shrunk_PR, parts_RO, strict=True)])
                out_TO[token] = (out_TO[token].float() + added_O).to(out_TO.dtype)

    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
        """One token id a row."""
        logits_SV = logits_SV.float().clone()
        columns_S = batch.columns_S
        words = random_words(columns_S.seed, batch.positions_S).tolist()
        tokens = []
        for s, logits_V in enumerate(logits_SV):
            if batch.banned_SC is not None:
                banned_C = batch.banned_SC[s]
                logits_V[banned_C[banned_C >= 0]] = -math.inf
            if not logits_V.max().isfinite():
                tokens.append(NO_TOKEN)
                continue
            temperature = columns_S.temperature[s].item()
            if temperature == 0:
                tokens.append(int(logits_V.argmax()))
                continue
            weights_V = torch.exp((logits_V - logits_V.max()) / temperature)
            filters = columns_S.top_k[s].item(), columns_S.top_p[s].item(), columns_S.min_p[s].item()
            tokens.append(_draw(weights_V, _weight_floor(weights_V, *filters), words[s]))
        return torch.tensor(tokens, dtype=torch.int64, device=logits_SV.device)

    def control_logits(self, logits_SV: Tensor, controls: LogitControls) -> None:
        """One row after the other."""
        for q, (row, table_row) in enumerate(
            zip(controls.rows_Q.tolist(), controls.table_rows_Q.tolist(), strict=True)
        ):
            logits_V = logits_SV[row].clone()
            logits_V[_banned_ids(controls, q)] = -math.inf
            if controls.bias_RV is not None:
                logits_V += controls.bias_RV[table_row]
            if controls.counts_RV is not None:
                penalties = PenaltyColumns(*(penalty_Q[q] for penalty_Q in controls.penalties_Q))
                logits_V = _penalized(logits_V, controls.counts_RV[table_row], penalties)
            if logits_V.max() != -math.inf:
                logits_SV[row] = logits_V

    def mask_logits(self, logits_SV: Tensor, masks: TokenMasks) -> None:
        """One token after the other."""
        for row, words_W in zip(masks.rows_Q.tolist(), masks.words_QW.tolist(), strict=True):
            for token_id in range(logits_SV.shape[1]):
                if not words_W[token_id // 32] >> token_id % 32 & 1:
                    logits_SV[row, token_id] = -math.inf

    def score(self, logits_SV: Tensor, targets_S: Tensor, num_top: int) -> Scores:
        """By sorting the row."""
        logprobs_SV = logits_SV.log_softmax(-1)
        target_S1 = logits_SV.gather(1, targets_S[:, None])
        top_ids_SK = logits_SV.argsort(dim=-1, descending=True, stable=True)[:, :num_top]
        return Scores(
            logprobs_S=logprobs_SV.gather(1, targets_S[:, None]).squeeze(1),
            ranks_S=(logits_SV >= target_S1).sum(-1),
            top_ids_SK=top_ids_SK,
            top_logprobs_SK=logprobs_SV.gather(1, top_ids_SK),
            normalizers_S=logits_SV.logsumexp(-1),
        )

    def copy_blocks(self, planes_YBX: Tensor, sources_N: Tensor, targets_N: Tensor) -> None:
        """One pair after the other."""
        for source, target in zip(sources_N.tolist(), targets_N.tolist(), strict=True):
            planes_YBX[:, target] = planes_YBX[:, source]

    def gather_blocks(self, planes_YBX: Tensor, blocks_N: Tensor, packed_NYX: Tensor) -> None:
        """One block after the other."""
        for n, block in enumerate(blocks_N.tolist()):
            packed_NYX[n] = planes_YBX[:, block]

    def scatter_blocks(self, packed_NYX: Tensor, planes_YBX: Tensor, blocks_N: Tensor) -> None:
        """One block after the other."""
        for n, block in enumerate(blocks_N.tolist()):
            planes_YBX[:, block] = packed_NYX[n]


def _rotate(x_TND: Tensor, cos_sin_TD: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) by its position's angle (Su et al., "RoFormer", 2021)."""
    cos_T1d, sin_T1d = cos_sin_TD[:, None].chunk(2, dim=-1)
    first_TNd, second_TNd = x_TND.float().chunk(2, dim=-1)
    turned = (first_TNd * cos_T1d - second_TNd * sin_T1d, second_TNd * cos_T1d + first_TNd * sin_T1d)
    return torch.cat(turned, dim=-1).to(x_TND.dtype)


def _attend_one(
    q_QHD: Tensor, k_CKD: Tensor, v_CKD: Tensor, scale: float, sliding_window: int | None, soft_cap: float | None
) -> Tensor:
    """Attention of one sequence's Q queries to its C context positions."""
    group = q_QHD.shape[1] // k_CKD.shape[1]
    k_CHD, v_CHD = (x.float().repeat_interleave(group, dim=1) for x in (k_CKD, v_CKD))
    scores_HQC = torch.einsum("qhd,chd->hqc", q_QHD.float(), k_CHD) * scale
    if soft_cap is not None:
        scores_HQC = soft_cap * torch.tanh(scores_HQC / soft_cap)
    num_queries, context_len = scores_HQC.shape[1:]
    key_C = torch.arange(context_len, device=q_QHD.device)
    query_Q1 = key_C[context_len - num_queries :, None]
    visible_QC = key_C <= query_Q1
    if sliding_window is not None:
        visible_QC &= key_C > query_Q1 - sliding_window
    probs_HQC = scores_HQC.masked_fill(~visible_QC, -math.inf).softmax(-1)
    return torch.einsum("hqc,chd->qhd", probs_HQC, v_CHD).to(q_QHD.dtype)


def _banned_ids(controls: LogitControls, q: int) -> list[int]:
    """Token ids, of banned_QC and of bad words, that row q may not take now."""
    ids = [] if controls.banned_QC is None else [i for i in controls.banned_QC[q].tolist() if i >= 0]
    if (words := controls.bad_words) is not None:
        recent = words.recent_RH[controls.table_rows_Q[q]].tolist()
        for word_row, padded in zip(words.word_rows_W.tolist(), words.words_WM.tolist(), strict=True):
            *before, last = (token_id for token_id in padded if token_id >= 0)
            if word_row == q and recent[len(recent) - len(before) :] == before:
                ids.append(last)
    return ids


def _penalized(logits_V: Tensor, counts_V: Tensor, penalties: PenaltyColumns[Tensor]) -> Tensor:
    """Step 3; counts as in LogitControls."""
    bounded_V = logits_V.clamp(-LARGEST_PENALIZED, LARGEST_PENALIZED)
    repetition = penalties.repetition_penalty
    repeated_V = torch.where(bounded_V > 0, bounded_V / repetition, bounded_V * repetition)
    logits_V = torch.where((counts_V > 0) & logits_V.isfinite(), repeated_V, logits_V)
    num_generated_V = counts_V >> 1
    presence_V = torch.where(num_generated_V > 0, penalties.presence_penalty, 0.0)
    return logits_V - penalties.frequency_penalty * num_generated_V - presence_V


def _mass(weights_V: Tensor) -> Tensor:
    """Weights in [0, 1] as integers."""
    return (weights_V * MASS_UNIT).long()


def _weight_floor(weights_V: Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest weight that the filters keep."""
    sorted_V = weights_V.sort(descending=True).values
    floor = 0.0
    if 0 < top_k < sorted_V.numel():
        floor = sorted_V[top_k - 1].item()
        sorted_V = sorted_V[sorted_V >= floor]
    if top_p < 1:
        cumulative_V = _mass(sorted_V).cumsum(0)
        needed = max(math.ceil(top_p * float(cumulative_V[-1])), 1)
        floor = max(floor, sorted_V[int((cumulative_V < needed).sum())].item())
    return max(floor, min_p)


def _draw(weights_V: Tensor, floor: float, word: int) -> int:
    """The first id whose cumulative mass, of weights not under the floor, exceeds word / 2^32 of the total."""
    cumulative_V = torch.where(weights_V >= floor, _mass(weights_V), 0).cumsum(0)
    target = math.floor(word * 2.0**-32 * float(cumulative_V[-1]))
    return int((cumulative_V <= target).sum())
