"""AdapterPlaces: no more adapters run, or are swapped out, than the runner has slots for.

    slots 2    running a a b    waiting c a - b c      a, - and b are admitted; c waits until a or b runs no more

Who would bring one more is passed by others: by those without an adapter always, by those of adapters that run so many
times, and then no more of them are admitted until it has been. So it waits for a bounded number of answers (I15).
Sequences that are swapped out count, for they come back without being asked about.
"""

from itertools import chain
from typing import Final

from aserve.core.ids import AdapterId, SeqId
from aserve.scheduler.queue import SequenceQueue
from aserve.scheduler.sequence import Sequence

MOST_PASSING: Final = 64
"""Sequences with adapters that go before one that was ahead of them."""


class AdapterPlaces:
    """most: adapters that run at once."""

    def __init__(self, most: int, running: SequenceQueue, swapped: SequenceQueue) -> None:
        self._most = most
        self._running = running
        self._swapped = swapped
        self._taken: set[AdapterId | None] = set()
        self._first: Sequence | None = None
        """Who was held back first since `settle`."""
        self._passed: SeqId | None = None
        """Who was held back first when somebody passed."""
        self._num_passing = 0

    def settle(self) -> None:
        """Another step is being planned: look who runs."""
        self._taken = self._adapters()
        self._first = None

    def _adapters(self) -> set[AdapterId | None]:
        return {sequence.request.adapter for sequence in chain(self._running, self._swapped)} - {None}

    @property
    def holds_back(self) -> bool:
        """Whether somebody was held back since the last admission of this step."""
        return self._first is not None

    def allows(self, sequence: Sequence) -> bool:
        """Whether one that waits may run now. To be asked in the order of the queue."""
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        first = self._first
        is_to_wait = first is not None and first.id == self._passed and self._num_passing >= MOST_PASSING
        if not is_to_wait and (adapter in self._taken or len(self._taken) < self._most):
            return True
        if first is None:
            self._first = sequence
        return False

    def admitted(self, sequence: Sequence) -> None:
        """It runs."""
        adapter = sequence.request.adapter
        if adapter is None:
            return
        self._taken.add(adapter)
        if self._first is not None and self._first is not sequence:
            self._num_passing = self._num_passing + 1 if self._first.id == self._passed else 1
            self._passed = self._first.id
        self._first = None  # the queue is asked again, from its beginning

    def running(self) -> tuple[AdapterId, ...]:
        """Those of sequences that run or are swapped out."""
        return tuple(adapter for adapter in self._adapters() if adapter is not None)

    def check(self) -> None:
        """Assert I7."""
        assert len(self._adapters()) <= self._most, f"I7: {self._adapters()} run"
