"""Log-probabilities and ranks in Triton, and the likeliest tokens by torch. Twin: ReferenceOps.score.

A program takes one row and sums it in a fixed order, so that a token's score does not depend on the batch.
Shape letters: ops.py.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch
from aserve.kernels.ops import Scores
from aserve.kernels.top_tokens import with_top_tokens

_MAX_TILE = 4096


@triton.jit(do_not_specialize_on_alignment=["targets_ptr"])
def _score_kernel(
    logits_ptr, targets_ptr, normalizer_ptr, rank_ptr, logits_stride, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """log(sum(exp(logits))) of a row, and how many of its logits are not under the target's. Two passes."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    target = tl.load(row_ptr + tl.load(targets_ptr + row))
    maxima = tl.full([TILE], float("-inf"), tl.float32)
    num_above = tl.zeros([TILE], dtype=tl.int32)
    for start in range(0, VOCAB_SIZE, TILE):
        ids = start + tl.arange(0, TILE)
        mask = ids < VOCAB_SIZE
        logits = tl.load(row_ptr + ids, mask=mask, other=float("-inf"))
        maxima = tl.maximum(maxima, logits)
        num_above += (mask & (logits >= target)).to(tl.int32)
    largest = tl.max(maxima, axis=0)
    sums = tl.zeros([TILE], dtype=tl.float32)
    for start in range(0, VOCAB_SIZE, TILE):
        ids = start + tl.arange(0, TILE)
        sums += tl.exp(tl.load(row_ptr + ids, mask=ids < VOCAB_SIZE, other=float("-inf")) - largest)
    tl.store(normalizer_ptr + row, largest + tl.log(tl.sum(sums, axis=0)))
    tl.store(rank_ptr + row, tl.sum(num_above, axis=0).to(tl.int64))


def score(logits_SV: Tensor, targets_S: Tensor, num_top: int) -> Scores:
    """One kernel, and torch.topk where any of the likeliest are asked for."""
    num_rows, vocab_size = logits_SV.shape
    normalizer_S = torch.empty(num_rows, dtype=torch.float32, device=logits_SV.device)
    ranks_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    if num_rows:
        _shaped(num_rows, vocab_size, logits_SV.stride(0))(logits_SV, targets_S, normalizer_S, ranks_S)
    return with_top_tokens(logits_SV, targets_S, normalizer_S, ranks_S, num_top)


@lru_cache(maxsize=SHAPES)
def _shaped(num_rows: int, vocab_size: int, stride: int) -> Launch:
    tile = min(_MAX_TILE, triton.next_power_of_2(vocab_size))
    return Launch(_score_kernel, (num_rows,), (stride,), VOCAB_SIZE=vocab_size, TILE=tile)
