"""Readings: what who looks on is told of a scheduler between two of its calls. Changes nothing that it decides by.

Sequences are shown as they are: whoever reads them copies what it wants to keep, and writes nothing.
"""

from collections.abc import Iterable
from typing import NamedTuple

from aserve.core.ids import BlockId, RequestId, SeqId
from aserve.core.plan import StepPlan
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.planner import Planner
from aserve.scheduler.queue import SequenceQueue
from aserve.scheduler.residents import Residents
from aserve.scheduler.roster import Roster
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.states import Hold

Grown = tuple[SeqId, tuple[BlockId, ...]]
"""Blocks that a sequence's table has got."""
Rehashed = tuple[BlockId, bool]
"""A block that has got a hash, or has lost its own."""


class Noted(NamedTuple):
    """What became of blocks and of sequences, each in its order. moved: whose state is another, but for a restart."""

    grown: list[Grown]
    rehashed: list[Rehashed]
    moved: list[SeqId]


class Readings:
    """Of one scheduler. roster: of all that have not ended. cache: who holds what is in their tables.

    residents, noted: who runs and waits, and what was noted and not taken, as it is now: read at every step.
    """

    def __init__(self, roster: Roster, cache: PagedCache, residents: Residents, planner: Planner) -> None:
        self._roster = roster
        self.cache = cache
        self.residents = residents
        self._planner = planner
        self.has_host_memory = residents.has_host_memory
        self.noted = Noted([], [], [])

    def sequence(self, seq_id: SeqId) -> Sequence | None:
        """The one with that id, if it has not ended."""
        return self._roster.sequences.get(seq_id)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """All that have not ended."""
        return self._roster.sequences.values()

    def of_request(self, request_id: RequestId) -> list[Sequence]:
        """Those of a request that have not ended, by index."""
        return [*self._roster.requests.get(request_id, ())]

    def note(self, *, on: bool) -> None:
        """From now on note what is `Noted`, or nothing any more. What was noted and not taken is forgotten."""
        residents, self.noted = self.residents, Noted([], [], [])
        residents.grown, rehashed, residents.moved = self.noted if on else (None, None, None)
        self.cache.note_hashes(rehashed)

    def take_noted(self) -> Noted:
        """All that was noted since the last call."""
        grown, rehashed, moved = self.noted
        taken = Noted([*grown], [*rehashed], [*moved])
        grown.clear()
        rehashed.clear()
        moved.clear()
        return taken

    def take_blocks(self, num_grown: int, num_rehashed: int) -> Noted:
        """Of what was noted of blocks the first."""
        grown, rehashed, _ = self.noted
        taken = Noted(grown[:num_grown], rehashed[:num_rehashed], [])
        del grown[:num_grown], rehashed[:num_rehashed]
        return taken

    def take_moved(self) -> list[SeqId]:
        """Those who have moved since the last call."""
        moved = self.noted.moved
        taken = [*moved]
        moved.clear()
        return taken

    def all_who_decode(self, plan: StepPlan) -> SequenceQueue | None:
        """Those who run, in the order of its slices, if the plan just made computes the next token of each of them and
        nothing else; else None.
        """
        running = self.residents.running
        return running if self._planner.last_long_id != plan.step_id and len(plan.slices) == len(running) else None

    @property
    def num_running(self) -> int:
        """How many have a row."""
        return len(self.residents.running)

    @property
    def num_swapped(self) -> int:
        """How many are swapped out."""
        return len(self.residents.swapped)

    def num_ahead(self, sequence: Sequence) -> int:
        """Of those that wait, whom the policy has before one; where tenants take turns, of its tenant."""
        return self.residents.waiting.num_before(sequence)

    @property
    def num_waiting(self) -> int:
        """How many wait to be admitted."""
        return len(self.residents.waiting)

    @property
    def waiting(self) -> Iterable[Sequence]:
        """They, in the queue's order; where tenants take turns, those of one behind those of another."""
        return self.residents.waiting

    @property
    def hold(self) -> Hold | None:
        """Why the last plan did not admit the first of them; None where nobody was left waiting."""
        return self._planner.hold if self._planner.leaves_waiting else None
