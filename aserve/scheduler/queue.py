"""SequenceQueue: sequences in the order of a policy, which is nothing but a sort key.

A key never changes during a sequence's life, so running and waiting sequences keep one order: who was ahead before a
preemption is ahead after it (I14, I16).
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from aserve.core.ids import SeqId
from aserve.core.request import Request
from aserve.scheduler.sequence import Sequence, SortKey

_sort_key = attrgetter("sort_key")


def first_come_first_served(request: Request, seq_id: SeqId) -> SortKey:
    """The earlier arrival first; of equals the one added first."""
    return (request.arrival_s, seq_id)


class SequenceQueue:
    """A sorted list. Finding is O(log n); the memory moved by an insertion is 8 bytes a sequence."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """First to last. The last may be removed meanwhile: the iteration then ends before it."""
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        """The one that goes first."""
        return self._sequences[0]

    @property
    def last(self) -> Sequence:
        """The newest, or otherwise the least deserving."""
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        """Insert in order."""
        self._sequences.insert(self._index(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is in."""
        index = self._index(sequence)
        assert self._sequences[index] is sequence, f"I14: {sequence!r} is not where its key says"
        del self._sequences[index]

    def _index(self, sequence: Sequence) -> int:
        return bisect_left(self._sequences, sequence.sort_key, key=_sort_key)

    def check(self) -> None:
        """Assert I14: strictly in order."""
        keys = [sequence.sort_key for sequence in self._sequences]
        assert all(a < b for a, b in pairwise(keys)), f"I14: out of order: {keys}"
