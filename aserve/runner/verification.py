"""Drafts of a step: where they stand among what is sampled, which of them are accepted, and what is sampled after them.

The longest run of drafts is accepted that agrees with what was sampled (core/plan.py). A token's random number is a
function of the row's seed and the token's position alone, and its logits are controlled as if the drafts before it were
tokens of the answer. So what is sampled behind accepted drafts is what would have been sampled without them: no draft
changes any token, at whatever temperature, under whatever penalty.

    drafts of a row    -    a    b    c        samples    a    b    x    y        2 accepted, and x
    history of each    h    h a  h a b  h a b c           h a b x is the row's history from now on

All of it happens on the device, which must not wait for the host; that a step has landed says how many were accepted.
Letters: kernels/ops.py and rows.py; here S slices that sample   K samples of each, the most of any   J = K - 1 drafts
   Q controlled samples   H recent tokens   D drafts that a draft model makes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aserve.core.ids import Row, SeqId
from aserve.core.plan import TO_COME, SeqSlice
from aserve.kernels.ops import BadWords, LogitControls
from aserve.runner.device import StepDevice
from aserve.runner.rows import Ints

NO_DRAFT: Final = -2
"""Pads draft ids: no sampled id, nor NO_TOKEN, is equal to it."""


class Drafts(NamedTuple):
    """Of a step some slice of which has drafts: those of all slices that sample, in the plan's order.

    rows_S: int64. samples_SK: which of the step's N samples are a slice's, its last one repeated to fill the row.
    draft_ids_SJ: int64, padded with NO_DRAFT. slices_N, places_N: int64, whose each sample is, and which of its.
    """

    rows_S: Tensor
    samples_SK: Tensor
    draft_ids_SJ: Tensor
    slices_N: Tensor
    places_N: Tensor


class MadeDrafts(NamedTuple):
    """What a draft model has made of a plan's drafting: [R, J], and which of its R rows is a sequence's."""

    ids_RJ: Tensor
    rows: Mapping[SeqId, Row]


def upload_drafts(slices: Sequence[SeqSlice], device: StepDevice) -> Drafts | None:
    """Where the drafts of a plan stand; None where no slice has any. Those that a draft model makes are TO_COME."""
    sampling = [piece for piece in slices if piece.num_samples]
    most = max((piece.num_samples for piece in sampling), default=0)
    if most < 2:
        return None
    counts_S = np.array([piece.num_samples for piece in sampling], np.int64)
    firsts_S = counts_S.cumsum() - counts_S
    places_K = np.arange(most)
    draft_ids_SJ = np.full((len(sampling), most - 1), NO_DRAFT, np.int64)
    for s, piece in enumerate(sampling):
        draft_ids_SJ[s, : piece.num_samples - 1] = piece.draft_ids
    slices_N = np.repeat(np.arange(len(sampling)), counts_S)
    on_host = [
        np.array([piece.row for piece in sampling], np.int64),
        firsts_S[:, None] + np.minimum(places_K, counts_S[:, None] - 1),
        draft_ids_SJ,
        slices_N,
        np.arange(len(slices_N)) - firsts_S[slices_N],
    ]
    return Drafts(*device.upload(on_host))


def fill_in(
    made: MadeDrafts, drafts: Drafts, slices: Sequence[SeqSlice], tokens: tuple[Ints, Tensor], device: StepDevice
) -> None:
    """Write what a draft model has made to a step's tokens, and to its drafts, in place of what is TO_COME.

    tokens: which of the T tokens each of N samples stands on, on the host, and the T tokens.
    """
    sampled_tokens_N, token_ids_T = tokens
    width = drafts.draft_ids_SJ.shape[1]
    sources: list[int] = []
    targets: list[int] = []
    places: list[int] = []
    first = 0
    for s, piece in enumerate(piece for piece in slices if piece.num_samples):
        if TO_COME in piece.draft_ids:
            num_drafts = piece.num_samples - 1
            sources += range(start := made.rows[piece.seq_id] * made.ids_RJ.shape[1], start + num_drafts)
            targets += range(s * width, s * width + num_drafts)
            places += sampled_tokens_N[first + 1 : first + piece.num_samples].tolist()
        first += piece.num_samples
    if sources:
        sources_D, targets_D, places_D = device.upload([np.array(x, np.int64) for x in (sources, targets, places)])
        ids_D = made.ids_RJ.take(sources_D)
        drafts.draft_ids_SJ.view(-1).index_copy_(0, targets_D, ids_D)
        token_ids_T.index_copy_(0, places_D, ids_D)


def count_accepted(ids_N: Tensor, drafts: Drafts) -> Tensor:
    """How many drafts of each slice agree with what was sampled, up to the first that does not: int64 [S]."""
    ids_SK = ids_N.take(drafts.samples_SK)
    return (ids_SK[:, :-1] == drafts.draft_ids_SJ).cumprod(1).sum(1)


def newest(ids_N: Tensor, num_accepted_S: Tensor, drafts: Drafts) -> Tensor:
    """The token sampled behind the accepted drafts of each slice, int64 [S]."""
    return ids_N.take(drafts.samples_SK.gather(1, num_accepted_S[:, None])[:, 0])


def with_history(controls: LogitControls, drafts: Drafts) -> LogitControls:
    """The controls of Q samples, each with tables of its own, in which the drafts before it are tokens of the answer.

    R rows become Q: some logits' worth of memory for the step, and no kernel knows of drafts.
    """
    table_rows_Q, width = controls.table_rows_Q, drafts.draft_ids_SJ.shape[1]
    places_Q1 = drafts.places_N.index_select(0, controls.rows_Q)[:, None]
    draft_ids_QJ = drafts.draft_ids_SJ.index_select(0, drafts.slices_N.index_select(0, controls.rows_Q))
    is_before_QJ = torch.arange(width, device=places_Q1.device) < places_Q1
    counts_QV = bias_QV = bad_words = None
    if controls.counts_RV is not None:
        counts_QV = controls.counts_RV.index_select(0, table_rows_Q)
        counts_QV.scatter_add_(1, draft_ids_QJ.clamp(min=0), 2 * is_before_QJ.int())
    if controls.bias_RV is not None:
        bias_QV = controls.bias_RV.index_select(0, table_rows_Q)
    if (words := controls.bad_words) is not None:
        recent_QH = _later(words.recent_RH.index_select(0, table_rows_Q), draft_ids_QJ, places_Q1)
        bad_words = BadWords(words.words_WM, words.word_rows_W, recent_QH)
    return replace(
        controls,
        table_rows_Q=torch.arange(len(table_rows_Q), device=table_rows_Q.device),
        bias_RV=bias_QV,
        counts_RV=counts_QV,
        bad_words=bad_words,
    )


def record_accepted(controls: LogitControls, drafts: Drafts, ids_N: Tensor, num_accepted_S: Tensor) -> None:
    """Add what counts of a step's samples, [N], to the tables of the rows that have controls, and nothing else."""
    rows_Q, table_rows_Q = controls.rows_Q, controls.table_rows_Q
    slices_Q = drafts.slices_N.index_select(0, rows_Q)
    num_accepted_Q = num_accepted_S.index_select(0, slices_Q)
    if (counts_RV := controls.counts_RV) is not None:
        twos_Q = 2 * (drafts.places_N.index_select(0, rows_Q) <= num_accepted_Q).int()
        ids_Q = ids_N.index_select(0, rows_Q)
        counts_RV.view(-1).index_add_(0, ids_Q + table_rows_Q * counts_RV.shape[1], twos_Q)
    if (words := controls.bad_words) is not None:
        ids_QK = ids_N.take(drafts.samples_SK.index_select(0, slices_Q))
        recent_QH = words.recent_RH.index_select(0, table_rows_Q)  # the samples of one row write the same to it
        words.recent_RH.index_copy_(0, table_rows_Q, _later(recent_QH, ids_QK, num_accepted_Q[:, None] + 1))


def _later(recent_QH: Tensor, ids_QK: Tensor, num_Q1: Tensor) -> Tensor:
    """The newest H tokens, once the first so many of `ids_QK` have followed."""
    places_QH = torch.arange(recent_QH.shape[1], device=recent_QH.device) + num_Q1
    return torch.cat((recent_QH, ids_QK), dim=1).gather(1, places_QH)


def counting_places(slices: Sequence[SeqSlice], num_accepted: Sequence[int]) -> list[int]:
    """Which of a step's N samples count: of each slice those of its accepted drafts, and the one after them."""
    places: list[int] = []
    first = 0
    sampling = (piece for piece in slices if piece.num_samples)
    for piece, num in zip(sampling, num_accepted, strict=True):
        places.extend(range(first, first + num + 1))
        first += piece.num_samples
    return places


def num_samples_back(slices: Sequence[SeqSlice], sampled: Sequence[int]) -> tuple[Ints, Ints]:
    """For each of N samples: which of the `sampled` slices is its own, and how far before the slice's end it stands."""
    counts = np.array([slices[i].num_samples for i in sampled], np.int64)
    ends = counts.cumsum()
    return np.repeat(np.arange(len(counts)), counts), np.repeat(ends, counts) - 1 - np.arange(counts.sum())
