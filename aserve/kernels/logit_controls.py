"""Bans, biases and penalties in Triton, for the rows that have them. Twin: ReferenceOps.control_logits.

    logits rows --> controlled [Q, V] --> bad words' last tokens to -inf --> is a token left? --> back into the rows

A row of which nothing would be left keeps its logits, so the controlled ones have to be complete before any is written
back. Shape letters: ops.py, and those of LogitControls.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch
from aserve.kernels.ops import LogitControls
from aserve.kernels.reference import LARGEST_PENALIZED

_MAX_TILE = 4096
_LARGEST_PENALIZED = tl.constexpr(LARGEST_PENALIZED)
_ROW_POINTERS = ["rows_ptr", "table_rows_ptr"]


@triton.jit(
    do_not_specialize=["num_banned"],
    do_not_specialize_on_alignment=[*_ROW_POINTERS, "banned_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr"],
)
def _control_kernel(
    logits_ptr,
    out_ptr,
    rows_ptr,
    table_rows_ptr,
    bias_ptr,
    counts_ptr,
    banned_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    logits_stride,
    num_banned,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of one controlled row."""
    q = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = ids < VOCAB_SIZE
    table_row = tl.load(table_rows_ptr + q)
    logits = tl.load(logits_ptr + tl.load(rows_ptr + q) * logits_stride + ids, mask=mask)
    if banned_ptr is not None:
        for i in range(num_banned):
            logits = tl.where(ids == tl.load(banned_ptr + q * num_banned + i), float("-inf"), logits)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + table_row * VOCAB_SIZE + ids, mask=mask)
    if counts_ptr is not None:
        code = tl.load(counts_ptr + table_row * VOCAB_SIZE + ids, mask=mask, other=0)
        repetition = tl.load(repetition_ptr + q)
        is_finite = (logits > float("-inf")) & (logits < float("inf"))
        bounded = tl.minimum(tl.maximum(logits, -_LARGEST_PENALIZED), _LARGEST_PENALIZED)
        penalized = tl.where(bounded > 0, tl.div_rn(bounded, tl.zeros_like(bounded) + repetition), bounded * repetition)
        logits = tl.where((code > 0) & is_finite, penalized, logits)
        count = code >> 1
        logits -= tl.load(frequency_ptr + q) * count.to(tl.float32)
        logits -= tl.where(count > 0, tl.load(presence_ptr + q), 0.0)
    tl.store(out_ptr + q * VOCAB_SIZE + ids, logits, mask=mask)


@triton.jit(
    do_not_specialize=["word_len", "history_len"],
    do_not_specialize_on_alignment=["words_ptr", "word_rows_ptr", "table_rows_ptr", "recent_ptr"],
)
def _bad_words_kernel(
    out_ptr,
    words_ptr,
    word_rows_ptr,
    table_rows_ptr,
    recent_ptr,
    word_len,
    history_len,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One word: ban its last token where the row's recent tokens are the others. Pads of a word match anything."""
    word_ptr = words_ptr + tl.program_id(0).to(tl.int64) * word_len
    q = tl.load(word_rows_ptr + tl.program_id(0))
    recent_end_ptr = recent_ptr + (tl.load(table_rows_ptr + q) + 1) * history_len
    num_before = word_len - 1
    differs = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_before, BLOCK):
        places = start + tl.arange(0, BLOCK)
        mask = places < num_before
        wanted = tl.load(word_ptr + places, mask=mask, other=-1)
        found = tl.load(recent_end_ptr - num_before + places, mask=mask, other=-1)
        differs += ((wanted >= 0) & (wanted != found)).to(tl.int32)
    if tl.sum(differs, axis=0) == 0:
        tl.store(out_ptr + q * VOCAB_SIZE + tl.load(word_ptr + num_before), float("-inf"))


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _write_back_kernel(
    out_ptr, logits_ptr, rows_ptr, largest_ptr, logits_stride, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """One tile of one controlled row, if a token of the row is left."""
    q = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if tl.load(largest_ptr + q) != float("-inf"):
        mask = ids < VOCAB_SIZE
        logits = tl.load(out_ptr + q * VOCAB_SIZE + ids, mask=mask)
        tl.store(logits_ptr + tl.load(rows_ptr + q) * logits_stride + ids, logits, mask=mask)


def control_logits(logits_SV: Tensor, controls: LogitControls) -> None:
    """Change the rows named in `controls`, in place: two kernels, or three with bad words."""
    vocab_size, num_rows = logits_SV.shape[1], len(controls.rows_Q)
    out_QV = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits_SV.device)
    banned_QC = controls.banned_QC
    num_banned = 0 if banned_QC is None else banned_QC.shape[1]
    control, write_back = _shaped(num_rows, vocab_size, logits_SV.stride(0), num_banned)
    control(
        logits_SV,
        out_QV,
        controls.rows_Q,
        controls.table_rows_Q,
        controls.bias_RV,
        controls.counts_RV,
        banned_QC,
        controls.penalties_Q.repetition_penalty,
        controls.penalties_Q.presence_penalty,
        controls.penalties_Q.frequency_penalty,
    )
    if (words := controls.bad_words) is not None:
        ban = _shaped_words(vocab_size, words.words_WM.shape, words.recent_RH.shape[1])
        ban(out_QV, words.words_WM, words.word_rows_W, controls.table_rows_Q, words.recent_RH)
    write_back(out_QV, logits_SV, controls.rows_Q, out_QV.amax(1))


@lru_cache(maxsize=SHAPES)
def _shaped(num_rows: int, vocab_size: int, stride: int, num_banned: int) -> tuple[Launch, Launch]:
    """What controls the logits, and what writes them back."""
    tile = min(_MAX_TILE, triton.next_power_of_2(vocab_size))
    grid = (num_rows, triton.cdiv(vocab_size, tile))
    return (
        Launch(_control_kernel, grid, (stride, num_banned), VOCAB_SIZE=vocab_size, TILE=tile),
        Launch(_write_back_kernel, grid, (stride,), VOCAB_SIZE=vocab_size, TILE=tile),
    )


@lru_cache(maxsize=SHAPES)
def _shaped_words(vocab_size: int, words_shape: torch.Size, history_len: int) -> Launch:
    num_words, word_len = words_shape
    return Launch(_bad_words_kernel, (num_words,), (word_len, history_len), VOCAB_SIZE=vocab_size, BLOCK=32)
