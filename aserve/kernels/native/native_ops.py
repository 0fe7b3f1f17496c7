"""NativeOps: the operations on a CPU by our own kernels, each in one pass over its numbers.

What a kernel does not take (half precision, other strides) goes to `CpuOps`, its parent, as everything does where
nothing can be compiled. A row has the same bits whatever else is in the step: rows are computed one by one, in vectors
of as many numbers as a register holds, which begin at the row.
"""

import ctypes
from typing import Any, Final

import torch
from torch import Tensor

from aserve.core.columns import PenaltyColumns, SamplingColumns
from aserve.kernels.cpu import CpuOps
from aserve.kernels.native.attention import CACHE_NAMES, NativeAttention
from aserve.kernels.native.library import Library
from aserve.kernels.native.lora import NativeLora
from aserve.kernels.native.moves import NativeMoves
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

_NAMES: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_MAX_HEAD_DIM: Final = 1024
_MAX_TOP: Final = 256
"""So many of the likeliest tokens are found by putting each in its place."""
_SCRATCH: Final = 3
"""Numbers that sampling needs room for, for each of the vocabulary, in each thread."""


class _Heads(ctypes.Structure):
    """`Heads` of rows.cpp."""

    _fields_ = (
        *((name, _INT) for name in ("tokens", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _INT) for name in ("q_stride", "k_stride", "v_stride", "k_slot_stride", "v_slot_stride")),
        ("eps", _FLOAT),
    )


class _Sampling(ctypes.Structure):
    """`Sampling` of sampling.cpp."""

    _fields_ = (
        *((name, _INT) for name in ("rows", "vocab", "stride", "num_banned")),
        *((name, _POINTER) for name in SamplingColumns._fields),
        *((name, _POINTER) for name in ("positions", "banned", "scratch")),
    )


class _Controls(ctypes.Structure):
    """`Controls` of sampling.cpp."""

    _fields_ = (
        *((n, _INT) for n in ("rows", "vocab", "stride", "num_banned", "num_words", "word_length", "num_recent")),
        *((name, _POINTER) for name in ("row_ids", "table_rows", "bias", "counts", *PenaltyColumns._fields)),
        *((name, _POINTER) for name in ("banned", "words", "word_rows", "recent", "scratch")),
    )


_ARGUMENTS: Final[dict[str, list[Any]]] = {
    "rms_norm": [_POINTER, _INT, *[_POINTER] * 4, _INT, _INT, _FLOAT],
    "silu_and_mul": [_POINTER, _POINTER, _INT, _INT],
    "gelu_and_mul": [_POINTER, _POINTER, _INT, _INT],
    "sample": [ctypes.POINTER(_Sampling), _POINTER, _POINTER],
}


class NativeOps(CpuOps):
    """`Ops` and `HeadNormOps` for a CPU, float32 and bfloat16 by our own kernels."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library, self.variant = library, library.variant
        self._kernels = {
            dtype: {name: library.function(f"{name}_{suffix}", types) for name, types in _ARGUMENTS.items()}
            for dtype, suffix in _NAMES.items()
        }
        types = [ctypes.POINTER(_Heads), *[_POINTER] * 11]
        self._writers = {
            dtypes: library.function(f"rope_and_write_kv_{name}", types) for dtypes, name in CACHE_NAMES.items()
        }
        self.attention = NativeAttention(library)
        self._lora = NativeLora(library)
        self._score = library.function("score_f32", [_POINTER, _INT, _INT, _POINTER, _INT, *[_POINTER] * 5])
        self._mask = library.function("mask_f32", [_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT])
        self._control = library.function("control_f32", [ctypes.POINTER(_Controls), _POINTER])
        self.moves = NativeMoves(library)
        self.scratch = torch.empty(0)
        self._layout: tuple[Any, ...] | None = None
        """Of the heads that were written last: those of a step's layers are alike, and `_heads` says the same."""
        self._heads = _Heads()

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """A row at a time; heads of a token are rows."""
        kernels = self._kernels.get(x_TE.dtype)
        if kernels is None or weight_E.dtype != x_TE.dtype:
            return super().rms_norm(x_TE, weight_E, eps)
        width = x_TE.shape[-1]
        if x_TE.dim() != 2 or x_TE.stride(1) != 1:
            x_TE = x_TE.contiguous()
        out_TE = torch.empty_like(x_TE)
        rows, stride = out_TE.numel() // width, x_TE.stride(0) if x_TE.dim() == 2 else width
        x, weight, out = x_TE.data_ptr(), weight_E.data_ptr(), out_TE.data_ptr()
        kernels["rms_norm"](x, stride, None, weight, out, None, rows, width, eps)
        return out_TE

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum first, in the model's type."""
        kernels = self._kernels.get(x_TE.dtype)
        if kernels is None or weight_E.dtype != x_TE.dtype or residual_TE.dtype != x_TE.dtype:
            return super().add_rms_norm(x_TE, residual_TE, weight_E, eps)
        x_TE, residual_TE = x_TE.contiguous(), residual_TE.contiguous()
        out_TE, total_TE = torch.empty_like(x_TE), torch.empty_like(x_TE)
        rows, width = x_TE.numel() // x_TE.shape[-1], x_TE.shape[-1]
        x, residual, weight = x_TE.data_ptr(), residual_TE.data_ptr(), weight_E.data_ptr()
        kernels["rms_norm"](x, width, residual, weight, out_TE.data_ptr(), total_TE.data_ptr(), rows, width, eps)
        return out_TE, total_TE

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """Rounded once."""
        if gate_up_TF2.dtype not in self._kernels:
            return super().silu_and_mul(gate_up_TF2)
        return self._gated("silu_and_mul", gate_up_TF2)

    def gelu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """Rounded once."""
        if gate_up_TF2.dtype not in self._kernels:
            return super().gelu_and_mul(gate_up_TF2)
        return self._gated("gelu_and_mul", gate_up_TF2)

    def _gated(self, name: str, gate_up_TF2: Tensor) -> Tensor:
        gate_up_TF2 = gate_up_TF2.contiguous()
        rows, width = gate_up_TF2.shape[0], gate_up_TF2.shape[1] // 2
        out_TF = gate_up_TF2.new_empty(rows, width)
        self._kernels[out_TF.dtype][name](gate_up_TF2.data_ptr(), out_TF.data_ptr(), rows, width)
        return out_TF

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
        """A token at a time: keys are turned straight into the cache."""
        cache = (cos_sin_LD, positions_T, k_cache_BPKD, v_cache_BPKD, slots_T)
        if (q_THD.dtype, k_cache_BPKD.dtype) not in self._writers:
            return super().rope_and_write_kv(q_THD, k_TKD, v_TKD, *cache)
        return self._write(q_THD, k_TKD, v_TKD, None, None, 0.0, *cache)

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
        """The norm of each head on its way."""
        cache = (cos_sin_LD, positions_T, k_cache_BPKD, v_cache_BPKD, slots_T)
        if (q_THD.dtype, k_cache_BPKD.dtype) not in self._writers:
            q_THD, k_TKD = self.rms_norm(q_THD, q_norm_D, eps), self.rms_norm(k_TKD, k_norm_D, eps)
            return super().rope_and_write_kv(q_THD, k_TKD, v_TKD, *cache)
        return self._write(q_THD, k_TKD, v_TKD, q_norm_D, k_norm_D, eps, *cache)

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
        """Where the cache lies, decodes and prompts alike."""
        caches = (k_cache_BPKD, v_cache_BPKD)
        if not self.attention.takes(q_THD, *caches):
            options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
            return super().attend(q_THD, *caches, batch, **options)
        if not _are_together(q_THD):
            q_THD = q_THD.contiguous()
        return self.attention.attend(q_THD, *caches, batch, scale, sliding_window, soft_cap)

    def _write(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        eps: float,
        cos_sin_LD: Tensor,
        positions_T: Tensor,
        k_cache_BPKD: Tensor,
        v_cache_BPKD: Tensor,
        slots_T: Tensor,
    ) -> Tensor:
        num_tokens, num_heads, head_dim = q_THD.shape
        slot_strides = k_cache_BPKD.stride(1), v_cache_BPKD.stride(1)
        layout = q_THD.shape, k_TKD.shape, q_THD.stride(), k_TKD.stride(), v_TKD.stride(), slot_strides, eps
        if layout != self._layout:
            if not all(map(_are_together, (q_THD, k_TKD, v_TKD))):
                together = (x_THD.contiguous() for x_THD in (q_THD, k_TKD, v_TKD))
                cache = (cos_sin_LD, positions_T, k_cache_BPKD, v_cache_BPKD, slots_T)
                return self._write(*together, q_norm_D, k_norm_D, eps, *cache)
            assert head_dim <= _MAX_HEAD_DIM
            strides = q_THD.stride(0), k_TKD.stride(0), v_TKD.stride(0), *slot_strides
            self._heads = _Heads(num_tokens, num_heads, k_TKD.shape[1], head_dim, *strides, eps)
            self._layout = layout
        out_THD = q_THD.new_empty(num_tokens, num_heads, head_dim)
        self._writers[q_THD.dtype, k_cache_BPKD.dtype](
            self._heads,
            q_THD.data_ptr(),
            k_TKD.data_ptr(),
            v_TKD.data_ptr(),
            None if q_norm_D is None else q_norm_D.data_ptr(),
            None if k_norm_D is None else k_norm_D.data_ptr(),
            cos_sin_LD.data_ptr(),
            positions_T.data_ptr(),
            k_cache_BPKD.data_ptr(),
            v_cache_BPKD.data_ptr(),
            slots_T.data_ptr(),
            out_THD.data_ptr(),
        )
        return out_THD

    def add_lora(self, out_TO: Tensor, x_TI: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
        """All adapters in one call."""
        if self._lora.takes(out_TO, x_TI, weights):
            self._lora.add(out_TO, x_TI, weights, batch)
        else:
            super().add_lora(out_TO, x_TI, weights, batch)

    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
        """A row at a time, from logits as they are."""
        if logits_SV.dtype not in self._kernels or logits_SV.stride(-1) != 1:
            return super().sample(logits_SV, batch)
        num_rows, vocab_size = logits_SV.shape
        if not (batch.all_greedy and batch.banned_SC is None):
            self.make_room(min(num_rows, torch.get_num_threads()), vocab_size)
        banned_SC = None if batch.banned_SC is None else batch.banned_SC.contiguous()
        out_S = torch.empty(num_rows, dtype=torch.int64)
        how = _Sampling(
            num_rows,
            vocab_size,
            logits_SV.stride(0),
            0 if banned_SC is None else banned_SC.shape[1],
            *(column_S.data_ptr() for column_S in (*batch.columns_S, batch.positions_S)),
            None if banned_SC is None else banned_SC.data_ptr(),
            self.scratch.data_ptr(),
        )
        self._kernels[logits_SV.dtype]["sample"](how, logits_SV.data_ptr(), out_S.data_ptr())
        return out_S

    def make_room(self, num_threads: int, vocab_size: int) -> None:
        """Let so many threads sample at once."""
        num_numbers = _SCRATCH * vocab_size * num_threads
        if len(self.scratch) < num_numbers:
            self.scratch = torch.empty(num_numbers)

    def control_logits(self, logits_SV: Tensor, controls: LogitControls) -> None:
        """A row at a time, in one pass over what it has, and one that looks whether something is left of it."""
        tables = [table for table in (controls.bias_RV, controls.counts_RV) if table is not None]
        if logits_SV.dtype != torch.float32 or not all(x.is_contiguous() for x in (logits_SV, *tables)):
            super().control_logits(logits_SV, controls)
            return
        num_rows, vocab_size = len(controls.rows_Q), logits_SV.shape[1]
        self.make_room(min(num_rows, torch.get_num_threads()), vocab_size)
        banned_QC = None if controls.banned_QC is None else controls.banned_QC.contiguous()
        bad = controls.bad_words
        words = () if bad is None else (bad.words_WM.contiguous(), bad.word_rows_W, bad.recent_RH)
        how = _Controls(
            num_rows,
            vocab_size,
            logits_SV.stride(0),
            0 if banned_QC is None else banned_QC.shape[1],
            *((*words[0].shape, words[2].shape[1]) if words else (0, 0, 0)),
            controls.rows_Q.data_ptr(),
            controls.table_rows_Q.data_ptr(),
            _address(controls.bias_RV),
            _address(controls.counts_RV),
            *(penalty_Q.data_ptr() for penalty_Q in controls.penalties_Q),
            _address(banned_QC),
            *([x.data_ptr() for x in words] if words else (None, None, None)),
            self.scratch.data_ptr(),
        )
        self._control(how, logits_SV.data_ptr())

    def copy_blocks(self, planes_YBX: Tensor, sources_N: Tensor, targets_N: Tensor) -> None:
        """Without a buffer."""
        self.moves.move(planes_YBX, sources_N, planes_YBX, targets_N)

    def gather_blocks(self, planes_YBX: Tensor, blocks_N: Tensor, packed_NYX: Tensor) -> None:
        """Without a buffer."""
        self.moves.move(planes_YBX, blocks_N, packed_NYX.transpose(0, 1), None)

    def scatter_blocks(self, packed_NYX: Tensor, planes_YBX: Tensor, blocks_N: Tensor) -> None:
        """At once."""
        self.moves.move(packed_NYX.transpose(0, 1), None, planes_YBX, blocks_N)

    def mask_logits(self, logits_SV: Tensor, masks: TokenMasks) -> None:
        """A word of a mask at a time."""
        words_QW = masks.words_QW
        if logits_SV.dtype != torch.float32 or logits_SV.stride(1) != 1 or not words_QW.is_contiguous():
            super().mask_logits(logits_SV, masks)
            return
        self._mask(
            logits_SV.data_ptr(),
            logits_SV.stride(0),
            logits_SV.shape[1],
            masks.rows_Q.data_ptr(),
            words_QW.data_ptr(),
            words_QW.shape[1],
            words_QW.shape[0],
        )

    def score(self, logits_SV: Tensor, targets_S: Tensor, num_top: int) -> Scores:
        """A row at a time, in four passes over it; nothing is sorted, unless very many are asked for."""
        num_rows, vocab_size = logits_SV.shape
        num_top = min(num_top, vocab_size)
        if logits_SV.dtype != torch.float32:
            return super().score(logits_SV, targets_S, num_top)
        if num_top > _MAX_TOP:  # a row's scores are the same bits, however many it asks for
            found = self.score(logits_SV, targets_S, 0)
            return with_top_tokens(logits_SV, targets_S, found.normalizers_S, found.ranks_S, num_top)
        logits_SV, targets_S = logits_SV.contiguous(), targets_S.contiguous()
        scores = Scores(
            logprobs_S=torch.empty(num_rows),
            ranks_S=torch.empty(num_rows, dtype=torch.int64),
            top_ids_SK=torch.empty(num_rows, num_top, dtype=torch.int64),
            top_logprobs_SK=torch.empty(num_rows, num_top),
            normalizers_S=torch.empty(num_rows),
        )
        self._score(
            logits_SV.data_ptr(),
            num_rows,
            vocab_size,
            targets_S.data_ptr(),
            num_top,
            scores.logprobs_S.data_ptr(),
            scores.ranks_S.data_ptr(),
            scores.top_ids_SK.data_ptr(),
            scores.top_logprobs_SK.data_ptr(),
            scores.normalizers_S.data_ptr(),
        )
        return scores


def _address(x: Tensor | None) -> int | None:
    """Of its first number; None for nothing."""
    return None if x is None else x.data_ptr()


def _are_together(x_THD: Tensor) -> bool:
    """Whether a token's heads lie one behind the other."""
    _, num_heads, head_dim = x_THD.shape
    return x_THD.stride(2) == 1 and (num_heads == 1 or x_THD.stride(1) == head_dim)
