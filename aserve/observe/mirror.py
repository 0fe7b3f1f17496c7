"""Mirror: what whoever looks on has been told, held against what is there: the difference is what to tell next.

    told     tables {4: [7, 3]}     cached {7}        state of 4: running
    there    tables {4: [7, 3, 9]}  cached {7, 3}     state of 4: running
    change   Splice(4, 2, (9,)), cached (3,)

The cost of a look is that of the blocks that have changed, and of the sequences that have gone from one state to
another; of all that run where their tables may do more than grow. A whole pool is read when the mirror is made, and
host blocks when some have moved. Where tables only grow, what has changed may be taken (`News`), and told later.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from itertools import islice

import msgspec

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
from aserve.scheduler.readings import Grown, Noted, Readings, Rehashed
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


class Place(msgspec.Struct, frozen=True, gc=False):
    """How a sequence is that was told of, at some moment."""

    told: _Told
    state: State
    num_preemptions: int
    block_ids: list[BlockId]
    host_ids: list[HostBlockId | None]

    @classmethod
    def of(cls, told: _Told) -> "Place":
        """Now, as long as nothing is done to its table."""
        sequence = told.sequence
        table = sequence.table
        return cls(told, sequence.state, sequence.num_preemptions, table.block_ids, table.host_ids)

    def copy(self) -> "Place":
        """The same, whatever is done to its table."""
        return Place(self.told, self.state, self.num_preemptions, [*self.block_ids], [*self.host_ids])


class News(msgspec.Struct, frozen=True, gc=False):
    """Cards that are to be told, how those are who have moved, and who waits, where that has changed."""

    cards: list[Card]
    moved: list[Place]
    queue: Queue | None


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
        self._num_shifting = 0
        """Of those told: whose tables do more than grow."""
        self._new_cards: list[Card] = []
        self._queue = _NOBODY
        cache = readings.cache
        readings.note(on=True)
        self._cached = set(map(int, cache.hashed_blocks()))
        self._kept = cache.kept_on_host()
        for sequence in readings.sequences:
            if sequence.state is not State.WAITING or sequence.num_preemptions:
                self.meet(sequence)
        self.change({}, readings.take_noted(), has_moved=True, has_swapped=True)

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

    @property
    def only_grows(self) -> bool:
        """Whether no table does more than grow, and so nobody's tokens are hidden: no beam's are there."""
        return not self._num_shifting

    def num_noted(self) -> tuple[int, int, bool] | None:
        """How much is noted of blocks: who has got some, which have other hashes; and whether there is `News`.

        None where more than that may have changed.
        """
        readings = self._readings
        if self._num_shifting or (readings.has_host_memory and readings.cache.num_kept_on_host != len(self._kept)):
            return None
        grown, rehashed, moved = readings.noted
        has_news = bool(moved or self._new_cards)
        if readings.residents.waiting or self._queue is not _NOBODY:
            has_news |= self._queue.num_waiting != readings.num_waiting or self._queue.hold != self._hold()
        return len(grown), len(rehashed), has_news

    def take_news(self) -> News:
        """What `follow` takes."""
        queue = self._look_at_queue()
        moved = dict.fromkeys(self._readings.take_moved())
        places = [Place.of(told).copy() for seq_id in moved if (told := self._told.get(seq_id)) is not None]
        cards, self._new_cards = self._new_cards, []
        return News(cards, places, queue)

    def follow(
        self, news: News, ends: dict[ChoiceId, str], grown: Several[Grown], rehashed: Several[Rehashed]
    ) -> Change:
        """As `change`, of what was taken when there was no more than that."""
        change = Change()
        change.cards, change.queue = news.cards, news.queue
        moved = {now.told.sequence.id for now in news.moved}
        change.tables = self._grow([one for one in grown if one[0] not in moved])
        self._look_at(news.moved, change, ends)
        if change.tables or change.host_tables or rehashed:
            change.blocks = self._blocks_changed(change.tables, change.host_tables, rehashed, has_swapped=False)
        return change

    def grow(self, grown: Several[Grown], rehashed: Several[Rehashed]) -> BlockChange:
        """What to tell of such news."""
        cached, uncached = self._hashes_changed(rehashed) if rehashed else ((), ())
        if grown or cached or uncached:
            return BlockChange(tuple(self._grow(grown)), (), cached, uncached)
        return NO_CHANGE

    def change(self, ends: dict[ChoiceId, str], noted: Noted, *, has_moved: bool, has_swapped: bool) -> Change:
        """What to tell now, which counts as told from then on.

        ends: why choices have ended, see `ends_of`. noted: since the last look. has_moved: whether
        tables may have done more than grow. has_swapped: whether blocks have gone to the host or come from it.
        """
        readings = self._readings
        change = Change()
        change.queue = self._look_at_queue()
        looked_at: Iterable[_Told] = self._told.values()
        if not (has_moved or self._num_shifting):
            moved = dict.fromkeys(noted.moved)
            grown = dict.fromkeys(seq_id for seq_id, _ in noted.grown if seq_id not in moved)
            looked_at = [told for seq_id in (*grown, *moved) if (told := self._told.get(seq_id)) is not None]
        self._look_at(map(Place.of, looked_at), change, ends)
        change.cards, self._new_cards = self._new_cards, []
        has_swapped = has_swapped or readings.cache.num_kept_on_host != len(self._kept)
        if change.tables or change.host_tables or noted.rehashed or has_swapped:
            tables = change.tables, change.host_tables
            change.blocks = self._blocks_changed(*tables, noted.rehashed, has_swapped=has_swapped)
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

    def _grow(self, grown: Several[Grown]) -> list[Splice]:
        tables: list[Splice] = []
        for seq_id, new_blocks in grown:
            told = self._told.get(seq_id)
            if told is not None:
                tables.append(Splice(seq_id, len(told.blocks), new_blocks))
                told.blocks += new_blocks
        return tables

    def _look_at(self, places: Iterable[Place], change: Change, ends: dict[ChoiceId, str]) -> None:
        """What has changed of these sequences."""
        for now in places:
            self._look_at_one(now, change, ends)
        for move in change.moves:
            if move.what == "ended":
                self._num_shifting -= not self._told.pop(SeqId(move.seq)).only_grows

    def _look_at_one(self, now: Place, change: Change, ends: dict[ChoiceId, str]) -> None:
        told = now.told
        seq_id = told.sequence.id
        if now.state is told.state and now.num_preemptions == told.num_preemptions:
            if told.only_grows:
                num_told = len(told.blocks)
                if blocks := now.block_ids[num_told:]:
                    change.tables.append(Splice(seq_id, num_told, tuple(blocks)))
                    told.blocks += blocks
                return
        else:
            self._moved(now, change, ends)
        if now.block_ids != told.blocks:
            change.tables.append(_splice(seq_id, told.blocks, now.block_ids))
            told.blocks = list(now.block_ids)
        if now.host_ids != told.host_blocks:
            change.host_tables.append(_splice(seq_id, told.host_blocks, now.host_ids))
            told.host_blocks = list(now.host_ids)

    def _moved(self, now: Place, change: Change, ends: dict[ChoiceId, str]) -> None:
        """The state of a sequence is another."""
        told, sequence = now.told, now.told.sequence
        if now.num_preemptions != told.num_preemptions:
            change.moves.append(Move(sequence.id, "swap" if now.state is State.SWAPPED else "recompute"))
        elif told.state is State.SWAPPED and now.state is State.WAITING:
            change.moves.append(Move(sequence.id, "recompute"))  # its copy on the host is lost
        told.state, told.num_preemptions = now.state, now.num_preemptions
        if now.state is State.FINISHED:
            change.moves.append(Move(sequence.id, "ended", ends.get(sequence.choice_id, "")))

    def _look_at_queue(self) -> Queue | None:
        """Who waits, if that has changed."""
        readings = self._readings
        num_waiting = readings.num_waiting
        if not num_waiting:
            queue = _NOBODY
        else:
            first = tuple(islice(readings.waiting, MAX_QUEUED))
            for sequence in first:
                self.meet(sequence)
            queue = Queue(num_waiting, tuple(s.id for s in first), self._hold())
        if queue is self._queue or queue == self._queue:
            return None
        self._queue = queue
        return queue

    def _hold(self) -> str:
        """Why the first of those who wait was not admitted; "" where nobody was left waiting."""
        hold = self._readings.hold
        return "" if hold is None else hold.value

    def _blocks_changed(
        self,
        tables: Several[Splice],
        host_tables: Several[Splice],
        rehashed: Several[Rehashed],
        *,
        has_swapped: bool,
    ) -> BlockChange:
        cached, uncached = self._hashes_changed(rehashed)
        kept: Iterable[int] = ()
        dropped: Iterable[int] = ()
        if has_swapped:
            on_host = self._readings.cache.kept_on_host()
            kept, dropped, self._kept = on_host - self._kept, self._kept - on_host, on_host
        whose = tuple(tables), tuple(host_tables)
        changed = BlockChange(*whose, cached, uncached, tuple(kept), tuple(dropped))
        return NO_CHANGE if changed == NO_CHANGE else changed

    def _hashes_changed(self, rehashed: Several[Rehashed]) -> tuple[tuple[BlockId, ...], tuple[BlockId, ...]]:
        """Blocks that can be found by hash from now on, and those that cannot any more."""
        known = self._cached
        cached: list[BlockId] = []
        uncached: list[BlockId] = []
        for block, is_cached in dict(rehashed).items():
            if is_cached and block not in known:
                known.add(block)
                cached.append(block)
            elif not is_cached and block in known:
                known.remove(block)
                uncached.append(block)
        return tuple(cached), tuple(uncached)


_NOBODY = Queue()


def ends_of(deltas: Several[SeqDelta]) -> dict[ChoiceId, str]:
    """Why choices have ended in a step."""
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
