"""Mirror: what whoever looks on has been told, held against what is there: the difference is what to tell next.

    told     tables {4: [7, 3]}     cached {7}        state of 4: running
    there    tables {4: [7, 3, 9]}  cached {7, 3}     state of 4: running
    change   Splice(4, 2, (9,)), cached (3,)

The cost of a look is that of the blocks that have changed; of the sequences that run, too, where one of them has gone
from one state to another, or its table may do more than grow. A whole pool is read when the mirror is made, and host
blocks when some have moved.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from itertools import islice

from aserve.core.ids import BlockId, ChoiceId, HostBlockId, SeqId
from aserve.core.outputs import SeqDelta
from aserve.observe.records import (
    MAX_CARD_TOKENS,
    MAX_QUEUED,
    NO_CHANGE,
    BlockChange,
    Card,
    Held,
    Move,
    Queue,
    Snapshot,
    Splice,
)
from aserve.scheduler.readings import NewBlocks, Readings
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.states import State

ON_HOST_NULL = -1
"""In a table on the host: no block."""


class _Told:
    """What was told of a sequence. only_grows: its table does, until it gives it back: no beam's, and no window's."""

    __slots__ = ("blocks", "card", "host_blocks", "num_preemptions", "only_grows", "sequence", "state")

    def __init__(self, sequence: Sequence, card: Card, *, only_grows: bool) -> None:
        self.only_grows = only_grows
        self.sequence = sequence
        self.card = card
        self.state = sequence.state
        self.num_preemptions = sequence.num_preemptions
        self.blocks: list[BlockId] = []
        self.host_blocks: list[HostBlockId | None] = []


class Change:
    """What is to be told: the fields are those of `Record`, and of its `blocks`."""

    __slots__ = ("blocks", "cards", "host_tables", "moves", "queue", "tables")

    def __init__(self) -> None:
        self.tables: list[Splice] = []
        self.host_tables: list[Splice] = []
        self.cards: list[Card] = []
        self.moves: list[Move] = []
        self.queue: Queue | None = None
        self.blocks = NO_CHANGE


class Mirror:
    """Of one scheduler, which notes from now on what changes. Begins with everything as it is told."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._has_windows = readings.cache.footprint.has_windows
        self._told: dict[SeqId, _Told] = {}
        self._num_moves = -1
        """Of the scheduler's, when all sequences were looked at."""
        self._num_shifting = 0
        """Of those told: whose tables do more than grow."""
        self._new_cards: list[Card] = []
        self._queue = _NOBODY
        cache = readings.cache
        readings.note_blocks(on=True)
        self._cached = set(map(int, cache.hashed_blocks()))
        self._kept = cache.kept_on_host()
        for sequence in readings.sequences:
            if sequence.state is not State.WAITING or sequence.num_preemptions:
                self.meet(sequence)
        self.change((), has_swapped=True)

    def meet(self, sequence: Sequence) -> _Told:
        """A sequence is to be told of; its card goes out with the next change, if it has not yet."""
        told = self._told.get(sequence.id)
        if told is None:
            card = card_of(sequence)
            only_grows = card.shows_tokens and not self._has_windows
            told = self._told[sequence.id] = _Told(sequence, card, only_grows=only_grows)
            self._num_shifting += not only_grows
            self._new_cards.append(told.card)
        return told

    def was_swapped(self, seq_id: SeqId) -> bool:
        """Whether a sequence was swapped out, as far as has been told."""
        told = self._told.get(seq_id)
        return told is not None and told.state is State.SWAPPED

    def card(self, seq_id: SeqId) -> Card | None:
        """A sequence's, if it has not been told to have ended."""
        told = self._told.get(seq_id)
        return None if told is None else told.card

    def take_if_still(self) -> NewBlocks | None:
        """What blocks are news, where nothing else is; None, and nothing is taken, where something may be."""
        if self._new_cards or self._num_shifting or self._queue is not _NOBODY:
            return None
        return self._readings.take_if_still(self._num_moves, len(self._kept))

    def grow(self, new: NewBlocks) -> BlockChange:
        """What to tell of such blocks."""
        if not new.grown and not new.rehashed:
            return NO_CHANGE
        tables: list[Splice] = []
        for seq_id, new_blocks in new.grown:
            told = self._told.get(seq_id)
            if told is not None:
                tables.append(Splice(seq_id, len(told.blocks), new_blocks))
                told.blocks += new_blocks
        return self._blocks_changed(tables, (), new.rehashed, has_swapped=False)

    def change(self, deltas: Several[SeqDelta], grown: Several[SeqId] | None = None, *, has_swapped: bool) -> Change:
        """What to tell now, which counts as told from then on.

        deltas: those of the step, which say why choices have ended. grown: whose tables have become longer since the
        last look, where no block was moved; None where anything may have happened. has_swapped: whether blocks have
        gone to the host or come from it.
        """
        readings = self._readings
        change = Change()
        self._look_at_queue(change)
        looked_at: Iterable[_Told] = self._told.values()
        if grown is not None and not self._num_shifting and readings.num_moves == self._num_moves:
            looked_at = [told for seq_id in grown if (told := self._told.get(seq_id)) is not None]
        self._num_moves = readings.num_moves
        ends = _ends(deltas)
        for told in looked_at:
            self._look_at(told, change, ends)
        for move in change.moves:
            if move.what == "ended":
                self._num_shifting -= not self._told.pop(SeqId(move.seq)).only_grows
        change.cards, self._new_cards = self._new_cards, []
        rehashed = readings.cache.take_rehashed()
        has_swapped = has_swapped or readings.cache.num_kept_on_host != len(self._kept)
        if change.tables or change.host_tables or rehashed or has_swapped:
            tables = change.tables, change.host_tables
            change.blocks = self._blocks_changed(*tables, rehashed, has_swapped=has_swapped)
        return change

    def snapshot(self, number: int, at_us: int) -> Snapshot:
        """All that has been told, up to a record of that number."""
        held = Held()
        held.tables = {seq_id: tuple(told.blocks) for seq_id, told in self._told.items() if told.blocks}
        swapped = [told for told in self._told.values() if told.host_blocks]
        held.host_tables = {told.sequence.id: tuple(map(_host_number, told.host_blocks)) for told in swapped}
        held.cached, held.kept = self._cached, set(map(int, self._kept))
        cards = tuple(told.card for told in self._told.values())
        states = tuple((int(seq_id), told.state.value) for seq_id, told in self._told.items())
        return Snapshot(number, at_us, cards, states, self._queue, held.whole())

    def _look_at(self, told: _Told, change: Change, ends: dict[ChoiceId, str]) -> None:
        """What has changed of one sequence."""
        sequence = told.sequence
        table = sequence.table
        if sequence.state is told.state and sequence.num_preemptions == told.num_preemptions:
            if told.only_grows:
                num_told = len(told.blocks)
                if blocks := table.block_ids[num_told:]:
                    change.tables.append(Splice(sequence.id, num_told, tuple(blocks)))
                    told.blocks += blocks
                return
        else:
            self._moved(told, change, ends)
        if table.block_ids != told.blocks:
            change.tables.append(_splice(sequence.id, told.blocks, table.block_ids))
            told.blocks = list(table.block_ids)
        if table.host_ids != told.host_blocks:
            change.host_tables.append(_splice(sequence.id, told.host_blocks, table.host_ids))
            told.host_blocks = list(table.host_ids)

    def _moved(self, told: _Told, change: Change, ends: dict[ChoiceId, str]) -> None:
        """The state of a sequence is another."""
        sequence = told.sequence
        if sequence.num_preemptions != told.num_preemptions:
            what = "swap" if sequence.state is State.SWAPPED else "recompute"
            change.moves.append(Move(sequence.id, what))
        elif told.state is State.SWAPPED and sequence.state is State.WAITING:
            change.moves.append(Move(sequence.id, "recompute"))  # its copy on the host is lost
        told.state, told.num_preemptions = sequence.state, sequence.num_preemptions
        if sequence.state is State.FINISHED:
            change.moves.append(Move(sequence.id, "ended", ends.get(sequence.choice_id, "")))

    def _look_at_queue(self, change: Change) -> None:
        readings = self._readings
        num_waiting = readings.num_waiting
        if not num_waiting:
            queue = _NOBODY
        else:
            first = tuple(islice(readings.waiting, MAX_QUEUED))
            for sequence in first:
                self.meet(sequence)
            hold = readings.hold
            queue = Queue(num_waiting, tuple(s.id for s in first), "" if hold is None else hold.value)
        if queue is not self._queue and queue != self._queue:
            self._queue = change.queue = queue

    def _blocks_changed(
        self,
        tables: Several[Splice],
        host_tables: Several[Splice],
        rehashed: Mapping[BlockId, bool],
        *,
        has_swapped: bool,
    ) -> BlockChange:
        cached = [int(block) for block, is_cached in rehashed.items() if is_cached and block not in self._cached]
        uncached = [int(block) for block, is_cached in rehashed.items() if not is_cached and block in self._cached]
        self._cached.update(cached)
        self._cached.difference_update(uncached)
        kept: Iterable[int] = ()
        dropped: Iterable[int] = ()
        if has_swapped:
            now = self._readings.cache.kept_on_host()
            kept, dropped, self._kept = now - self._kept, self._kept - now, now
        whose = tuple(tables), tuple(host_tables)
        changed = BlockChange(*whose, tuple(cached), tuple(uncached), tuple(kept), tuple(dropped))
        return NO_CHANGE if changed == NO_CHANGE else changed


_NOBODY = Queue()


def _ends(deltas: Several[SeqDelta]) -> dict[ChoiceId, str]:
    """Why choices have ended."""
    return {(d.request_id, d.index): str(d.finish_reason.value) for d in deltas if d.finish_reason is not None}


def card_of(sequence: Sequence) -> Card:
    """Who a sequence is."""
    request = sequence.request
    return Card(
        seq=sequence.id,
        request=sequence.id - sequence.index,
        index=sequence.index,
        num_prompt=sequence.num_prompt,
        max_tokens=request.max_tokens,
        arrived_us=round(request.arrival_s * 1e6),
        shows_tokens=sequence.group is None or sequence.group.beams is None,
        id=request.id,
        tenant=request.tenant,
        lora=request.adapter,
        prompt_ids=request.prompt_token_ids[:MAX_CARD_TOKENS],
        explains=request.explain,
    )


def _splice(seq: int, old: list, new: list) -> Splice:  # type: ignore[type-arg]  # of blocks of either place
    num_kept = len(old)
    if new[:num_kept] != old:
        num_kept = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return Splice(seq, num_kept, tuple(map(_host_number, new[num_kept:])))


def _host_number(block: int | None) -> int:
    return ON_HOST_NULL if block is None else int(block)
