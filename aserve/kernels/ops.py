"""The operations a model is made of, as one Protocol, and the two batch descriptions they take.

Three implementations: `reference.ReferenceOps` (plain torch, the oracle), `cpu.CpuOps` (fast on a CPU) and
`triton_ops.TritonOps`. `dispatch.select_ops` is the only place that asks which device it is.

Shape letters, here and in all of kernels/, models/ and runner/:
  T tokens of the step   S sequences of the step   B blocks of the cache   P positions in a block
  H query heads   K key-value heads   D head dimension   E hidden size   F feed-forward size   V vocabulary
  M blocks per sequence (width of the block table)   L positions a rope table covers
  Y planes of the cache: the keys of a layer, or its values   X numbers in a block of a plane (P * K * D)
"""

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from aserve.core.columns import PenaltyColumns, SamplingColumns

NO_TOKEN: Final = -1
"""Stands, on the device and on its way to the host, for the token of a row that cannot be sampled."""
PADDING_ID: Final = -1
"""Fills lists of token ids up to the longest of them: banned ids, bad words, recent tokens. No token equals it."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the step's T tokens sit. Sequences are ordered so that those with one token come first.

    num_decodes: how many of the S sequences have exactly one token in this step; they are first.
    slots_T: int64, block_id * P + position in block: where each token's key and value are written.
    block_table_SM: int32, the blocks of each sequence, padded with 0 (the null block).
    seq_lens_S: int32, the length of each sequence's context, this step's tokens included.
    query_starts_S1: int32, S + 1 offsets into T.
    max_query_len, max_seq_len: host integers, upper bounds for grids and buffers.
    groups: where layers are in groups with blocks of their own (core/layout.py), the batch of each; else empty.
    """

    num_decodes: int
    slots_T: Tensor
    block_table_SM: Tensor
    seq_lens_S: Tensor
    query_starts_S1: Tensor
    max_query_len: int
    max_seq_len: int
    groups: tuple["AttentionBatch", ...] = ()

    def of(self, kv: "KVLayer") -> "AttentionBatch":
        """The batch with the slots and blocks of a layer."""
        return self.groups[kv.group] if self.groups else self


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each of S rows of logits is sampled. columns_S: the parameters that are one number a row.

    positions_S: int64, the position that the sampled token will take; the random number is a pure
    function of (seed, position), so batch, chunking and preemption cannot change it.
    banned_SC: int64 token ids that may not be sampled, rows padded with PADDING_ID; None when no row bans any.
    all_greedy, any_filter (some row leaves out unlikely tokens): host booleans, so that no kernel is launched in vain.
    """

    columns_S: SamplingColumns[Tensor]
    positions_S: Tensor
    banned_SC: Tensor | None
    all_greedy: bool
    any_filter: bool


@dataclass(frozen=True, slots=True)
class BadWords:
    """W words of tokens that Q rows may not say.

    words_WM: int64, a word in the last columns of its row, PADDING_ID before it; its last token is the one to ban.
    word_rows_W: int64, which of the Q rows a word belongs to.
    recent_RH: int64, the newest generated tokens of each row of the tables, the last one last, PADDING_ID before them.
        H is at least M - 1.
    """

    words_WM: Tensor
    word_rows_W: Tensor
    recent_RH: Tensor


@dataclass(frozen=True, slots=True)
class LogitControls:
    """What changes the logits of Q of a step's S rows before they are sampled. Letters: R rows of the tables.

    rows_Q, table_rows_Q: int64, which of the S rows, and which row of the tables.
    bias_RV: float32, added to the logits; -inf where a token is not allowed.
    counts_RV: int32, twice the number of times that a token was generated, plus one if it is in the prompt.
    penalties_Q: read with counts_RV.
    banned_QC: int64 token ids, padded with PADDING_ID.
    """

    rows_Q: Tensor
    table_rows_Q: Tensor
    bias_RV: Tensor | None
    counts_RV: Tensor | None
    penalties_Q: PenaltyColumns[Tensor]
    banned_QC: Tensor | None
    bad_words: BadWords | None


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens Q of a step's S rows may take, one bit each; W words of 32 bits cover the vocabulary.

    rows_Q: int64, which of the S rows. words_QW: int32; token i is allowed where bit i % 32 of word i // 32 is 1.
    """

    rows_Q: Tensor
    words_QW: Tensor


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which of a step's T tokens are computed with which of G adapters.

    tokens_N: int64, tokens by adapter, those of the first one first; behind the last offset are tokens without one.
    starts_G1: int32, G + 1 offsets into tokens_N.
    """

    tokens_N: Tensor
    starts_G1: Tensor


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """What G adapters add to a linear layer of P parts side by side, of which each has factors of its own.

    Part p gains x A B, with A of [I, R] and B of [R, outputs of p]. R is a multiple of 16. Letters: I inputs, O outputs
    of all parts, G adapters' slots, R rank.
    a_GPIR, b_GRO: contiguous but for their first dimension. b has the scale in it.
    ranks_G: int32, how many of the R are used; the others are 0.
    sizes: outputs of each part; three at most.
    """

    a_GPIR: Tensor
    b_GRO: Tensor
    ranks_G: Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one token a row, and of the K likeliest tokens of each: K may be 0.

    logprobs_S, top_logprobs_SK: float32. ranks_S: int64, how many tokens are at least as likely, itself included.
    top_ids_SK: int64, best first, and the lowest of equals first. normalizers_S: float32, log(sum(exp(logits))), which
    a logit less is its token's log-probability.
    """

    logprobs_S: Tensor
    ranks_S: Tensor
    top_ids_SK: Tensor
    top_logprobs_SK: Tensor
    normalizers_S: Tensor


class Ops(Protocol):
    """Every method returns new tensors unless it says that it writes; inputs are contiguous in their last dimension."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32, returned in x's dtype."""
        ...

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """silu(x[:, :F]) * x[:, F:], [T, F]."""
        ...

    def gelu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """gelu_tanh(x[:, :F]) * x[:, F:], [T, F]."""
        ...

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
        """Rotate q and k (half-split pairs: i with i + D/2), write k and v to their slots, return the rotated q.

        cos_sin_LD: float32, cosines in [:, :D/2] and sines in [:, D/2:]. The cache may be of a smaller type: float8 or
        bfloat16, to which what is written is rounded, and from which `attend` widens it.
        """
        ...

    def write_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor, slots_T: Tensor
    ) -> None:
        """Write k and v to their slots, neither turned nor normed."""
        ...

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
        """Causal attention of each token to its sequence's cached context, [T, H, D]; the cache holds this step too.

        sliding_window w: a token sees itself and the w - 1 before it. soft_cap c: scores become c * tanh(scores / c).
        """
        ...

    def add_lora(self, out_TO: Tensor, x_TI: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
        """Add to the rows of out that `batch` names what their adapters make of x; in float32, rounded once.

        A row has the same bits whatever else is in the batch.
        """
        ...

    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
        """One token id a row, int64 [S]; NO_TOKEN for a row whose largest logit is not finite, which alters no other.

        Rows without a filter skip it.
        """
        ...

    def control_logits(self, logits_SV: Tensor, controls: LogitControls) -> None:
        """Write bans, biases and penalties into the float32 rows that `controls` names; see reference.py."""
        ...

    def mask_logits(self, logits_SV: Tensor, masks: TokenMasks) -> None:
        """Write -inf into the float32 rows that `masks` names, at the tokens that these may not take."""
        ...

    def score(self, logits_SV: Tensor, targets_S: Tensor, num_top: int) -> Scores:
        """Score one token a row, and min(num_top, V) likeliest, under softmax(logits), float32."""
        ...

    def copy_blocks(self, planes_YBX: Tensor, sources_N: Tensor, targets_N: Tensor) -> None:
        """Write planes[:, targets[n]] = planes[:, sources[n]], ids int64; no block is both source and target."""
        ...

    def gather_blocks(self, planes_YBX: Tensor, blocks_N: Tensor, packed_NYX: Tensor) -> None:
        """Write packed[n] = planes[:, blocks[n]], ids int64."""
        ...

    def scatter_blocks(self, packed_NYX: Tensor, planes_YBX: Tensor, blocks_N: Tensor) -> None:
        """Write planes[:, blocks[n]] = packed[n], ids int64; blocks differ."""
        ...


@runtime_checkable
class HeadNormOps(Protocol):
    """What operations may offer beyond `Ops`: norms of heads fused with what follows them, for models such as Qwen3."""

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
        """`rms_norm` of each head of q and k by itself, then `Ops.rope_and_write_kv`."""
        ...


@runtime_checkable
class LinearOps(Protocol):
    """What operations may offer beyond `Ops`: products of their own, in place of torch's."""

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + b, [T, O]."""
        ...

    def linear_silu_and_mul(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """`Ops.silu_and_mul` of that, [T, O / 2]."""
        ...


@runtime_checkable
class Fp8Ops(Protocol):
    """`LinearOps` that multiply weights of float8 (e4m3) too. scale_O: what multiplies each of its outputs, float32."""

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O: Tensor | None = None) -> Tensor:
        """As of `LinearOps`."""
        ...

    def linear_silu_and_mul(
        self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O: Tensor | None = None
    ) -> Tensor:
        """As of `LinearOps`."""
        ...

    def quantize_weight(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """The weight in float8, and its scales, [O]."""
        ...

    def why_no_fp8(self, device: torch.device) -> str | None:
        """What keeps the device from such products, None if nothing does."""
        ...


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's cache: keys and values, [B, P, K, D] each. A slot is block * P + position.

    group: which of its sequence's blocks are the layer's; see `AttentionBatch.groups`.
    """

    k_BPKD: Tensor
    v_BPKD: Tensor
    group: int = 0
