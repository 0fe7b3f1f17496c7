"""Masks of a step's tokens, made beside its forward pass: on a GPU while kernels run, on a CPU beside torch's own.

runner's thread | start | build, forward pass ............ | made: upload, mask | sample
mask thread             | mask of row a | mask of row b |
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from aserve.core.plan import StepPlan, TokenMask
from aserve.kernels.ops import TokenMasks
from aserve.runner.device import Array, StepDevice

WORD_BYTES = 4


def num_mask_bytes(vocab_size: int) -> int:
    """Of a row's mask: whole words."""
    return -(-vocab_size // (8 * WORD_BYTES)) * WORD_BYTES


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks of a step that are being made. rows: which of the step's sampled rows have one."""

    rows: Array
    words: "Future[Array]"
    device: StepDevice

    def made(self) -> TokenMasks:
        """Wait for them, and upload. Raises what making one of them raised."""
        return TokenMasks(*self.device.upload([self.rows, self.words.result()]))


class MaskMaker:
    """Makes masks in a thread of its own, which starts with the first of them."""

    def __init__(self, vocab_size: int, device: StepDevice) -> None:
        self._num_bytes = num_mask_bytes(vocab_size)
        self._device = device
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="aserve-masks")

    def start(self, plan: StepPlan) -> PendingMasks:
        """Begin with a plan's masks."""
        ends = accumulate(piece.num_samples for piece in plan.slices)
        places = {piece.row: end - 1 for piece, end in zip(plan.slices, ends, strict=True) if piece.num_samples == 1}
        rows = np.array([places[row] for row, _ in plan.masks], np.int64)
        words = self._worker.submit(self._make, [mask for _, mask in plan.masks])
        return PendingMasks(rows, words, self._device)

    def close(self) -> None:
        """End the thread when it has done what it is at. Idempotent."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _make(self, masks: Sequence[TokenMask]) -> Array:
        made = [mask.mask() for mask in masks]
        assert all(len(bits) == self._num_bytes for bits in made), "a mask has a bit for each token"
        return np.frombuffer(bytearray(b"".join(made)), "<i4").reshape(len(made), -1)
