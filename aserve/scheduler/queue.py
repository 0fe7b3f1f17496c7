"""SequenceQueue: sequences in the order of a policy, which is nothing but a sort key.

A key never changes during a sequence's life, so running and waiting sequences keep one order: who was ahead before a
preemption is ahead after it (I14, I16).
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter

from aserve.core.ids import SeqId
from aserve.core.request import Request
from aserve.scheduler.sequence import Sequence, SortKey

Policy = Callable[[Request, SeqId], SortKey]

_sort_key = attrgetter("sort_key")


def first_come_first_served(request: Request, seq_id: SeqId) -> SortKey:
    """The earlier arrival first; of equals the one added first."""
    return (request.arrival_s, seq_id)


def priority_with_ageing(ageing_s: float) -> Policy:
    """Lower `Request.priority` first, where a level is worth `ageing_s` seconds of waiting.

    A request goes before all that arrive later than `ageing_s` seconds times the levels between them: nobody waits
    for ever, and as all age at one rate, a key need not change.
    """
    assert ageing_s > 0, "without ageing somebody may wait for ever"

    def sort_key(request: Request, seq_id: SeqId) -> SortKey:
        return (request.arrival_s + request.priority * ageing_s, seq_id)

    return sort_key


class SequenceQueue(list[Sequence]):
    """Sequences in order, for `add` and `remove` alone to change. Finding is O(log n).

    A list, so that every step may ask whether it is empty, and walk it, at no cost. The last may be removed meanwhile:
    the walk then ends before it.
    """

    __slots__ = ()

    @property
    def first(self) -> Sequence:
        """The one that goes first."""
        return self[0]

    @property
    def last(self) -> Sequence:
        """The newest, or otherwise the least deserving."""
        return self[-1]

    def add(self, sequence: Sequence) -> None:
        """Insert in order."""
        self.insert(self._index(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is in."""
        index = self._index(sequence)
        assert self[index] is sequence, f"I14: {sequence!r} is not where its key says"
        del self[index]

    def _index(self, sequence: Sequence) -> int:
        return bisect_left(self, sequence.sort_key, key=_sort_key)

    def check(self) -> None:
        """Assert I14: strictly in order."""
        keys = [sequence.sort_key for sequence in self]
        assert all(a < b for a, b in pairwise(keys)), f"I14: out of order: {keys}"
