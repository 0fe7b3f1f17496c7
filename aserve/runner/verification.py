"""Drafts of a step: where they stand among what is sampled, which of them are accepted, and what is sampled after them.

On the host this tells what has landed; on the device, which must not wait for the host, what a row's last token is.
Both accept the longest run that agrees with what was sampled (core/plan.py). A token's random number is a function of
the row's seed and the token's position alone, so that what is sampled behind accepted drafts is what would have been
sampled without them: no draft changes any token, at whatever temperature.
Letters: kernels/ops.py and rows.py; here S slices that sample   K samples of each, the most of any   J = K - 1 drafts.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from torch import Tensor

from aserve.core.plan import SeqSlice, num_agreeing
from aserve.runner.device import StepDevice
from aserve.runner.rows import Ints

NO_DRAFT: Final = -2
"""Pads draft ids: no sampled id, nor NO_TOKEN, is equal to it."""


class Drafts(NamedTuple):
    """Of a step some slice of which has drafts: those of all slices that sample, in the plan's order.

    rows_S: int64. samples_SK: which of the step's N samples are a slice's, its last one repeated to fill the row.
    draft_ids_SJ: int64, padded with NO_DRAFT.
    """

    rows_S: Tensor
    samples_SK: Tensor
    draft_ids_SJ: Tensor


class Verified(NamedTuple):
    """Of N samples: the places of those that count, and how many drafts of each slice that samples are accepted."""

    places: list[int]
    num_accepted: tuple[int, ...]


def upload_drafts(slices: Sequence[SeqSlice], device: StepDevice) -> Drafts | None:
    """What `newest` reads; None where no slice has drafts."""
    sampling = [piece for piece in slices if piece.num_samples]
    most = max((piece.num_samples for piece in sampling), default=0)
    if most < 2:
        return None
    samples_SK = np.zeros((len(sampling), most), np.int64)
    draft_ids_SJ = np.full((len(sampling), most - 1), NO_DRAFT, np.int64)
    first = 0
    for s, piece in enumerate(sampling):
        last = first + piece.num_samples - 1
        samples_SK[s] = np.minimum(np.arange(first, first + most), last)
        draft_ids_SJ[s, : piece.num_samples - 1] = piece.draft_ids
        first = last + 1
    return Drafts(*device.upload([np.array([piece.row for piece in sampling], np.int64), samples_SK, draft_ids_SJ]))


def newest(ids_N: Tensor, drafts: Drafts) -> Tensor:
    """The token sampled behind the accepted drafts of each slice, int64 [S]; on the device. `verify` is its twin."""
    ids_SK = ids_N.take(drafts.samples_SK)
    num_accepted_S = (ids_SK[:, :-1] == drafts.draft_ids_SJ).cumprod(1).sum(1)
    return ids_SK.gather(1, num_accepted_S[:, None])[:, 0]


def verify(slices: Sequence[SeqSlice], sampled_ids: Sequence[int]) -> Verified:
    """Which of a step's samples count; on the host. sampled_ids: [N], NO_TOKEN where logits were not finite."""
    places: list[int] = []
    num_accepted: list[int] = []
    first = 0
    for piece in slices:
        if piece.num_samples:
            num = num_agreeing(piece.draft_ids, sampled_ids[first : first + piece.num_samples])
            places.extend(range(first, first + num + 1))
            num_accepted.append(num)
            first += piece.num_samples
    return Verified(places, tuple(num_accepted))


def num_samples_back(slices: Sequence[SeqSlice], sampled: Sequence[int]) -> tuple[Ints, Ints]:
    """For each of N samples: which of the `sampled` slices is its own, and how far before the slice's end it stands."""
    counts = np.array([slices[i].num_samples for i in sampled], np.int64)
    ends = counts.cumsum()
    return np.repeat(np.arange(len(counts)), counts), np.repeat(ends, counts) - 1 - np.arange(counts.sum())
