"""Readings: what who looks on is told of a scheduler between two of its calls. Changes nothing that it decides by.

Sequences are shown as they are: whoever reads them copies what it wants to keep, and writes nothing.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from typing import NamedTuple

from aserve.core.ids import BlockId, RequestId, SeqId
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.planner import Planner
from aserve.scheduler.residents import Residents
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.states import Hold

Grown = tuple[SeqId, tuple[BlockId, ...]]
"""Blocks that a sequence's table has got."""


class NewBlocks(NamedTuple):
    """Of tables that have grown, in that order; and those that got or lost a hash, and whether each bears one now."""

    grown: Several[Grown]
    rehashed: Mapping[BlockId, bool]


class Readings:
    """Of one scheduler. sequences: all that have not ended, by id. cache: who holds what is in their tables."""

    def __init__(
        self, sequences: Mapping[SeqId, Sequence], cache: PagedCache, residents: Residents, planner: Planner
    ) -> None:
        self._sequences = sequences
        self.cache = cache
        self._residents = residents
        self._planner = planner

    def sequence(self, seq_id: SeqId) -> Sequence | None:
        """The one with that id, if it has not ended."""
        return self._sequences.get(seq_id)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """All that have not ended."""
        return self._sequences.values()

    def of_request(self, request_id: RequestId) -> list[Sequence]:
        """Those of a request that have not ended, by index. Cost: all that there are."""
        return [sequence for sequence in self._sequences.values() if sequence.request_id == request_id]

    @property
    def num_moves(self) -> int:
        """How often a sequence has gone from one state to another, but for a restart."""
        return self._residents.num_moves

    def note_blocks(self, *, on: bool) -> None:
        """From now on note which blocks tables get, and which get or lose a hash; or note nothing any more."""
        self._residents.grown = [] if on else None
        self.cache.note_hashes(on=on)

    def take_grown(self) -> Several[Grown]:
        """Blocks that tables of those who run have got since the last call, and whose; in the order of that."""
        if not (grown := self._residents.grown):
            return ()
        self._residents.grown = []
        return grown

    def take_if_still(self, num_moves: int, num_kept_on_host: int) -> NewBlocks | None:
        """What blocks are news, where nobody waits, and these numbers are as they were: taken, as `take_grown` does and
        `PagedCache.take_rehashed`. None, and nothing is taken, where that is not so.
        """
        residents, cache = self._residents, self.cache
        if residents.num_moves != num_moves or residents.waiting:
            return None
        if residents.has_host_memory and cache.num_kept_on_host != num_kept_on_host:
            return None
        return NewBlocks(self.take_grown(), cache.take_rehashed())

    @property
    def num_running(self) -> int:
        """How many have a row."""
        return len(self._residents.running)

    @property
    def num_swapped(self) -> int:
        """How many are swapped out."""
        return len(self._residents.swapped)

    def num_ahead(self, sequence: Sequence) -> int:
        """Of the other requests' that wait, whom the policy has before one; where tenants take turns, of its tenant."""
        takes_turns, request = self._residents.waiting.takes_turns, sequence.request
        return sum(
            other.sort_key < sequence.sort_key
            for other in self._residents.waiting
            if other.request_id != request.id and (not takes_turns or other.request.tenant == request.tenant)
        )

    @property
    def num_waiting(self) -> int:
        """How many wait to be admitted."""
        return len(self._residents.waiting)

    @property
    def waiting(self) -> Iterable[Sequence]:
        """They, in the queue's order; where tenants take turns, those of one behind those of another."""
        return self._residents.waiting

    @property
    def hold(self) -> Hold | None:
        """Why the last plan did not admit the first of them; None where nobody was left waiting."""
        return self._planner.hold if self._planner.leaves_waiting else None
