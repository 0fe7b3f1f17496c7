"""SequenceQueue: sequences in the order of a policy, which is nothing but a sort key; and who waits.

A key never changes during a sequence's life, so running and waiting sequences keep one order: who was ahead before a
preemption is ahead after it (I14, I16). Where tenants share, see fairness.py, the key orders those of one tenant.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, Protocol

from aserve.core.ids import SeqId
from aserve.core.request import Request, Terms
from aserve.scheduler.sequence import Sequence, SortKey
from aserve.scheduler.step_cost import Allowance

Arrival = Request | Terms
"""Who comes: a request, or, before its prompt is known, the terms on which it will be one."""

Policy = Callable[[Arrival, SeqId], SortKey]

Allows = Callable[[Sequence], bool]
"""Says whether one that waits may run now, but for rows and blocks; asked in the order of the queue."""

_sort_key = attrgetter("sort_key")


def first_come_first_served(request: Arrival, seq_id: SeqId) -> SortKey:
    """The earlier arrival first; of equals the one added first."""
    return (request.arrival_s, seq_id)


def priority_with_ageing(ageing_s: float) -> Policy:
    """Lower `Request.priority` first, where a level is worth `ageing_s` seconds of waiting.

    A request goes before all that arrive later than `ageing_s` seconds times the levels between them: nobody waits
    for ever, and as all age at one rate, a key need not change.
    """
    assert ageing_s > 0, "without ageing somebody may wait for ever"

    def sort_key(request: Arrival, seq_id: SeqId) -> SortKey:
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

    def first_of(self, allows: Allows | None) -> Sequence | None:
        """The first of those that may run; None for any."""
        if allows is None:
            return self[0] if self else None
        return next(filter(allows, self), None)

    def holds(self, sequence: Sequence) -> bool:
        """Whether it is in."""
        index = self._index(sequence)
        return index < len(self) and self[index] is sequence

    def num_before(self, sequence: Sequence) -> int:
        """How many go before one, whether it is in or not."""
        return self._index(sequence)

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


class Ahead(NamedTuple):
    """What a newcomer finds. num_queued: requests that count against the bound of the queue that it would join.

    num_sequences, num_prompt_tokens: of those who would be served before it; shares of them, where those are estimates.
    """

    num_queued: int
    num_sequences: float
    num_prompt_tokens: float


class Backlog:
    """Who waits for a first admission. The prompt of several choices counts once."""

    __slots__ = ("num_prompt_tokens", "num_requests", "num_sequences")

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_sequences = 0
        self.num_prompt_tokens = 0

    def count(self, sequence: Sequence, times: int) -> None:
        """One more (times 1), or one less (times -1). One that was admitted before counts as nothing."""
        if sequence.num_preemptions:
            return
        self.num_sequences += times
        if sequence.index == 0:
            self.num_requests += times
            self.num_prompt_tokens += times * sequence.num_prompt


class Waiting(Protocol):
    """Those who wait, and who of them is next. Told who runs, as what they get may decide that."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def add(self, sequence: Sequence) -> None:
        """One more waits: for the first time, or again."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        ...

    takes_turns: bool
    """Whether `next_step` matters."""

    def next_step(self, now: float) -> None:
        """Another step is being planned."""
        ...

    def allowance(self, sequence: Sequence) -> Allowance | None:
        """Prompt tokens that this one and those like it may compute in this step; None for any number."""
        ...

    def next_up(self, num_free_rows: int, allows: Allows | None = None) -> Sequence | None:
        """Who is to be admitted next, if anybody is, of those that may run; None lets all."""
        ...

    def settle(self) -> None:
        """Take in what those who run have got so far; before `next_up`, once a step."""
        ...

    def began(self, sequence: Sequence) -> None:
        """It runs from now on."""
        ...

    def ceased(self, sequence: Sequence) -> None:
        """It runs no longer."""
        ...

    def num_before(self, sequence: Sequence) -> int:
        """How many the policy has before one that waits; where tenants take turns, of its tenant."""
        ...

    def ahead_of(self, arrival: Arrival, sort_key: SortKey) -> Ahead:
        """What somebody with these terms and that key would find, coming now."""
        ...

    def check(self) -> None:
        """Assert I14."""
        ...


class WaitingQueue(SequenceQueue):
    """One queue for all: the first goes first."""

    __slots__ = ("_backlog",)
    takes_turns = False

    def __init__(self) -> None:
        super().__init__()
        self._backlog = Backlog()

    def add(self, sequence: Sequence) -> None:
        """As `SequenceQueue`."""
        super().add(sequence)
        self._backlog.count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """As `SequenceQueue`."""
        super().remove(sequence)
        self._backlog.count(sequence, -1)

    def next_up(self, num_free_rows: int, allows: Allows | None = None) -> Sequence | None:
        """The first, if there is a row for it."""
        return self.first_of(allows) if num_free_rows else None

    def next_step(self, now: float) -> None:
        """Changes nothing."""

    def allowance(self, sequence: Sequence) -> Allowance | None:
        """None: a step is for who comes first."""
        del sequence
        return None

    def settle(self) -> None:
        """What others got changes nothing."""

    def began(self, sequence: Sequence) -> None:
        """Changes nothing."""

    def ceased(self, sequence: Sequence) -> None:
        """Changes nothing."""

    def ahead_of(self, arrival: Arrival, sort_key: SortKey) -> Ahead:
        """Those with smaller keys, taken for as large as all are on average."""
        del arrival
        share = bisect_left(self, sort_key, key=_sort_key) / len(self) if self else 0.0
        backlog = self._backlog
        return Ahead(backlog.num_requests, share * backlog.num_sequences, share * backlog.num_prompt_tokens)
