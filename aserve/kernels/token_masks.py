"""Masks of tokens in Triton: -inf where a row's bit says that the token is not allowed. Twin: ReferenceOps.mask_logits.

Shape letters: ops.py, and those of TokenMasks.
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch
from aserve.kernels.ops import TokenMasks

_MAX_TILE = 4096


@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["rows_ptr", "words_ptr"])
def _mask_kernel(
    logits_ptr, rows_ptr, words_ptr, logits_stride, num_words, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """One tile of one row. Only what is not allowed is written, and no logit is read."""
    q = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = ids < VOCAB_SIZE
    words = tl.load(words_ptr + q * num_words + (ids >> 5), mask=mask, other=0)
    is_allowed = ((words >> (ids & 31)) & 1) == 1
    row = tl.load(rows_ptr + q)
    infinities = tl.full([TILE], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * logits_stride + ids, infinities, mask=mask & ~is_allowed)


def mask_logits(logits_SV: Tensor, masks: TokenMasks) -> None:
    """Change the rows named in `masks`, in place."""
    num_rows, num_words = masks.words_QW.shape
    _shaped(num_rows, num_words, logits_SV.shape[1], logits_SV.stride(0))(logits_SV, masks.rows_Q, masks.words_QW)


@lru_cache(maxsize=SHAPES)
def _shaped(num_rows: int, num_words: int, vocab_size: int, stride: int) -> Launch:
    tile = min(_MAX_TILE, triton.next_power_of_2(vocab_size))
    grid = (num_rows, triton.cdiv(vocab_size, tile))
    return Launch(_mask_kernel, grid, (stride, num_words), VOCAB_SIZE=vocab_size, TILE=tile)
