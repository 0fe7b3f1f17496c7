"""Sampling on a CPU: what reference.py defines, for all rows at once.

numpy finds the largest of a vocabulary of 150,000 in 6 us, where torch takes 80, and sorts it in 0.3 ms, where torch
takes 10; only rows with top_k or top_p are sorted. To add it up as one goes (cumsum) takes 0.09 ms, to sum it 0.01 ms:
so the id where the cumulative mass crosses its target is found in two levels, sum tiles, look into one.
Shape letters: ops.py, and  R sampled rows   J tiles of a row   I ids in a tile.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.kernels.ops import NO_TOKEN, BadWords, LogitControls, SamplingBatch, TokenMasks
from aserve.kernels.philox import random_words
from aserve.kernels.reference import LARGEST_PENALIZED, MASS_UNIT

FloatArray = npt.NDArray[np.float32]

_TILE = 1024
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_PENALTY = np.where(_BITS == 1, 0, -np.inf).astype(np.float32)
"""What a byte of a mask adds to the logits of its eight tokens."""


def sample(logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
    """One token id a row, int64 [S]."""
    logits_SV = logits_SV.float()
    if batch.banned_SC is not None:
        logits_SV = _ban(logits_SV, batch.banned_SC)
    logits = logits_SV.numpy()
    tokens = logits.argmax(-1)  # the first of equals, or of NaNs
    is_finite = np.isfinite(np.take_along_axis(logits, tokens[:, None], -1)[:, 0])
    tokens_S = torch.from_numpy(np.where(is_finite, tokens, NO_TOKEN))
    if batch.all_greedy:
        return tokens_S
    rows_R = torch.from_numpy(np.flatnonzero(is_finite & (batch.columns_S.temperature.numpy() > 0)))
    if not len(rows_R):
        return tokens_S
    weights_RV = logits_SV.index_select(0, rows_R)
    weights_RV.sub_(weights_RV.gather(1, tokens_S[rows_R, None]))
    weights_RV.div_(batch.columns_S.temperature[rows_R, None]).exp_()
    if batch.any_filter:
        _filter(weights_RV, batch, rows_R)
    words_R = random_words(batch.columns_S.seed[rows_R], batch.positions_S[rows_R])
    return tokens_S.index_copy(0, rows_R, _draw(weights_RV.mul_(MASS_UNIT).floor_(), words_R))


def mask_logits(logits_SV: Tensor, masks: TokenMasks) -> None:
    """Add what each byte of a mask stands for: 13 us for 32,000 tokens, where to unpack bits and choose takes 180."""
    logits, words = logits_SV.numpy(), masks.words_QW.numpy()
    for row, words_W in zip(masks.rows_Q.tolist(), words, strict=True):
        logits[row] += _PENALTY.take(words_W.view(np.uint8), axis=0).reshape(-1)[: logits.shape[1]]


def control_logits(logits_SV: Tensor, controls: LogitControls) -> None:
    """Bans, biases and penalties into the rows that have them; float32 logits, in place."""
    logits_QV = logits_SV.index_select(0, controls.rows_Q)
    if controls.banned_QC is not None:
        logits_QV = _ban(logits_QV, controls.banned_QC)
    if controls.bad_words is not None:
        _ban_words(logits_QV, controls.bad_words, controls.table_rows_Q)
    if controls.bias_RV is not None:
        logits_QV += controls.bias_RV.index_select(0, controls.table_rows_Q)
    if controls.counts_RV is not None:
        _penalize(logits_QV, controls.counts_RV.index_select(0, controls.table_rows_Q), controls)
    has_choice_Q = logits_QV.amax(-1) != -math.inf
    logits_SV.index_copy_(0, controls.rows_Q[has_choice_Q], logits_QV[has_choice_Q])


def _penalize(logits_QV: Tensor, counts_QV: Tensor, controls: LogitControls) -> None:
    """Penalties where they are due, in place: N tokens of rows that have had them, few of Q vocabularies."""
    rows_N, ids_N = counts_QV.nonzero(as_tuple=True)
    logits_N, penalties_Q = logits_QV[rows_N, ids_N], controls.penalties_Q
    repetition_N = penalties_Q.repetition_penalty[rows_N]
    bounded_N = logits_N.clamp(-LARGEST_PENALIZED, LARGEST_PENALIZED)
    repeated_N = torch.where(bounded_N > 0, bounded_N / repetition_N, bounded_N * repetition_N)
    logits_N = torch.where(logits_N.isfinite(), repeated_N, logits_N)
    num_generated_N = counts_QV[rows_N, ids_N].bitwise_right_shift_(1)
    logits_N -= penalties_Q.frequency_penalty[rows_N] * num_generated_N
    logits_N -= penalties_Q.presence_penalty[rows_N] * (num_generated_N > 0)
    logits_QV.index_put_((rows_N, ids_N), logits_N)


def _ban_words(logits_QV: Tensor, words: BadWords, table_rows_Q: Tensor) -> None:
    """-inf at the last token of each word whose others were just generated, in place."""
    num_before = words.words_WM.shape[1] - 1
    wanted_WM, last_W = words.words_WM[:, :num_before], words.words_WM[:, num_before]
    recent_WH = words.recent_RH.index_select(0, table_rows_Q[words.word_rows_W])
    found_WM = recent_WH[:, recent_WH.shape[1] - num_before :]
    matches_W = ((wanted_WM < 0) | (wanted_WM == found_WM)).all(-1)
    logits_QV[words.word_rows_W[matches_W], last_W[matches_W]] = -math.inf


def _ban(logits_SV: Tensor, banned_SC: Tensor) -> Tensor:
    """A copy with -inf at the banned ids."""
    rows, columns = (banned_SC >= 0).nonzero(as_tuple=True)
    return logits_SV.index_put((rows, banned_SC[rows, columns]), logits_SV.new_tensor(-math.inf))


def _draw(mass_RV: Tensor, words_R: Tensor) -> Tensor:
    """The first id whose cumulative mass exceeds word / 2^32 of the total. Whole numbers: the sums are exact."""
    tile_mass_RJ = torch.cat([tiles.sum(-1, dtype=torch.float64) for tiles in _tiles(mass_RV)], dim=1)
    cumulative_RJ = tile_mass_RJ.cumsum(-1)
    target_R1 = (words_R.double() * 2.0**-32 * cumulative_RJ[:, -1]).floor_()[:, None]
    tile_R1 = (cumulative_RJ <= target_R1).sum(-1, keepdim=True)
    before_R1 = (cumulative_RJ - tile_mass_RJ).gather(1, tile_R1)
    ids_RI = _ids_of(tile_R1, mass_RV.shape[1])
    inside_RI = mass_RV.gather(1, ids_RI).cumsum(-1, dtype=torch.float64)
    return ids_RI.gather(1, (inside_RI <= target_R1 - before_R1).sum(-1, keepdim=True)).squeeze(1)


def _tiles(x_SV: Tensor) -> list[Tensor]:
    """Views [S, J, I] that cover a row in order: the full tiles, then the rest as one shorter tile."""
    full = x_SV.shape[1] // _TILE * _TILE
    parts = (x_SV[:, :full].unflatten(1, (-1, _TILE)), x_SV[:, None, full:])
    return [part for part in parts if part.numel()]


def _ids_of(tile_S1: Tensor, vocab_size: int) -> Tensor:
    """The ids of one tile a row. The last tile is padded with its last id, which no search from the left reaches."""
    return (tile_S1 * _TILE + torch.arange(min(_TILE, vocab_size))).clamp_(max=vocab_size - 1)


def _filter(weights_RV: Tensor, batch: SamplingBatch, rows_R: Tensor) -> None:
    """Zero the weights that the filters do not keep, in place; rows without a filter are not read."""
    columns_S = batch.columns_S
    top_ks, top_ps, min_ps = (x[rows_R].tolist() for x in (columns_S.top_k, columns_S.top_p, columns_S.min_p))
    for weights_V, top_k, top_p, min_p in zip(weights_RV, top_ks, top_ps, min_ps, strict=True):
        floor = max(_weight_floor(weights_V.numpy(), top_k, top_p), np.float32(min_p))
        if floor > 0:
            # Ten times the speed of masked_fill_; it zeroes what is at most the threshold.
            F.threshold_(weights_V, float(np.nextafter(floor, np.float32(0))), 0.0)


def _weight_floor(weights_V: FloatArray, top_k: int, top_p: float) -> np.float32:
    """The smallest weight that top_k and top_p keep."""
    floor = np.float32(0)
    has_top_k = 0 < top_k < weights_V.size
    if not has_top_k and top_p >= 1:
        return floor
    ascending_V = np.sort(weights_V)
    if has_top_k:
        floor = ascending_V[-top_k]
        ascending_V = ascending_V[np.searchsorted(ascending_V, floor) :]
    if top_p < 1:
        cumulative_V = np.floor(ascending_V[::-1] * np.float32(MASS_UNIT)).cumsum(dtype=np.float64)
        needed = max(math.ceil(top_p * cumulative_V[-1]), 1)
        floor = ascending_V[::-1][np.searchsorted(cumulative_V, needed)]
    return floor
