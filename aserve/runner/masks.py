"""Masks of a step's tokens, made beside its forward pass: on a GPU while kernels run.

A mask depends on the row's last token, which the step before has sampled. So it is the runner that tells a row's mask
of its tokens, as soon as they are on the host, and a masked row is launched ahead of its tokens like any other:

    runner's thread | forward pass t ......... | sample t | forward pass t+1 ...... upload, mask | sample t+1
    mask thread                                           | tokens t -> masks t+1 |
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from aserve.core.ids import Row, SeqId
from aserve.core.plan import StepPlan, StepResult, TokenMask
from aserve.kernels.ops import TokenMasks
from aserve.runner.device import Array, StepDevice
from aserve.runner.flight import Landed

WORD_BYTES = 4


def num_mask_words(vocab_size: int) -> int:
    """Of a row's mask."""
    return -(-vocab_size // (8 * WORD_BYTES))


def num_mask_bytes(vocab_size: int) -> int:
    """Of a row's mask: whole words."""
    return num_mask_words(vocab_size) * WORD_BYTES


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks of a step that are to be made, or are being made. places: which of the step's N samples have one."""

    places: Array
    words: Callable[[], Array]
    device: StepDevice

    def made(self) -> TokenMasks:
        """Wait for them, and upload. Raises what making one of them raised."""
        return TokenMasks(*self.device.upload([self.places, self.words()]))


class _Masked(NamedTuple):
    """A slice that samples, in a row that has a mask.

    number: of the slice, among those that sample. place: of its first sample, among all.
    """

    mask: TokenMask
    seq_id: SeqId
    number: int
    place: int
    draft_ids: tuple[int, ...]


class MaskMaker:
    """Keeps the rows' masks, and makes a step's. Used by the runner's thread alone, in launch order.

    Beside a device they are made in a thread of its own, which starts with the first of them. Where the host computes
    the steps there is nothing beside which they could be made: each would take a core from the forward pass, and they
    are made behind it, in the runner's thread.
    """

    def __init__(self, vocab_size: int, device: StepDevice) -> None:
        self._num_bytes = num_mask_bytes(vocab_size)
        self._device = device
        self._of_row: dict[Row, TokenMask] = {}
        self._untold: tuple[Sequence[_Masked], Landed] | None = None
        """The last step that had masks, of whose tokens they have not been told."""
        self._worker = None if device.is_host else ThreadPoolExecutor(1, thread_name_prefix="aserve-masks")

    def start(self, plan: StepPlan, landed: Landed) -> PendingMasks | None:
        """Begin with a plan's masks; None where it has none. landed: how the step will end. Must see every plan."""
        for init in plan.inits:
            self._of_row.pop(init.row, None)
            if init.mask is not None:
                self._of_row[init.row] = init.mask
        masked = self._masked(plan) if self._of_row else []
        if not masked:
            return None
        places = [each.place + k for each in masked for k in range(len(each.draft_ids) + 1)]
        make = partial(self._make, masked, self._untold)
        self._untold = masked, landed
        words = make if self._worker is None else self._worker.submit(make).result
        return PendingMasks(np.array(places, np.int64), words, self._device)

    def close(self) -> None:
        """End the thread when it has done what it is at. Idempotent."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)

    def _masked(self, plan: StepPlan) -> list[_Masked]:
        sampling = [piece for piece in plan.slices if piece.num_samples]
        places = accumulate((piece.num_samples for piece in sampling), initial=0)
        return [
            _Masked(mask, piece.seq_id, number, place, piece.draft_ids)
            for number, (piece, place) in enumerate(zip(sampling, places, strict=False))
            if (mask := self._of_row.get(piece.row)) is not None
        ]

    def _make(self, masked: Sequence[_Masked], untold: tuple[Sequence[_Masked], Landed] | None) -> Array:
        if untold is not None:
            _tell(*untold)
        made = b"".join([each.mask.masks(each.draft_ids) for each in masked])
        num_masks = sum(len(each.draft_ids) + 1 for each in masked)
        assert len(made) == num_masks * self._num_bytes, "a mask has a bit for each token"
        return np.frombuffer(bytearray(made), "<i4").reshape(num_masks, -1)


def _tell(masked: Sequence[_Masked], landed: Landed) -> None:
    """Wait for a step, and tell the masks of its tokens. After one that failed, rows come with masks of their own."""
    result = landed.result()
    if not isinstance(result, StepResult):
        return
    firsts = list(accumulate((num + 1 for num in result.num_accepted), initial=0))
    for each in masked:
        first, last = firsts[each.number : each.number + 2] if result.num_accepted else (each.number, each.number + 1)
        if each.seq_id not in result.failed:
            each.mask.advance(result.token_ids[first:last])
