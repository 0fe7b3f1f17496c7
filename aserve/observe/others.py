"""Others: what a tenant is told of other tenants' requests: how many there are, and which blocks they have together.

    sequences   7 ours   8, 9 others'            told as    7, and OTHERS for 8 and 9 alike
    tables      7: 1 2   8: 3 4   9: 3 2                    7: 1 2      held 3 4

A block that one of the tenant's own has, too, is told as its own alone: who else begins as it does is no business of
its. How far others' prompts are, when each came and ended, and which tokens it had is not told.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from aserve.observe.records import BlockChange, Card, Crowd, Piece, Queue, Record, Snapshot, Splice, Work

OTHERS: Final = -1
"""Stands for each sequence of another tenant."""


Shared = tuple[tuple[Splice, ...], tuple[int, ...], tuple[int, ...]]


class SharedChange(BlockChange, frozen=True, omit_defaults=True):
    """As `BlockChange`, with the tenant's own tables. held, released: blocks that others have from now on, or not any
    more; host_held, host_released: the same of blocks on the host.
    """

    held: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    host_held: tuple[int, ...] = ()
    host_released: tuple[int, ...] = ()


class _Pool:
    """The blocks of the device, or of the host: how many have each, of the tenant's own and of others.

    first: the lowest number of a block; what is below stands for none.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._tables: dict[int, tuple[int, ...]] = {}
        self._own: Counter[int] = Counter()
        self._others: Counter[int] = Counter()
        self._told: set[int] = set()

    def apply(self, splices: Iterable[Splice], own: Collection[int]) -> Shared:
        """Its own tables' splices, and blocks that others have from now on, or not any more."""
        shown, touched = list[Splice](), set[int]()
        for splice in splices:
            table = self._tables.pop(splice.seq, ())
            gone, come = table[splice.num_kept :], splice.blocks
            if after := table[: splice.num_kept] + come:
                self._tables[splice.seq] = after
            holders = self._own if splice.seq in own else self._others
            holders.update(come)
            holders.subtract(gone)
            touched.update(gone, come)
            if splice.seq in own:
                shown.append(splice)
        held = {block for block in touched if block >= self._first and self._others[block] > 0 and not self._own[block]}
        released = (touched & self._told) - held
        held -= self._told
        self._told |= held
        self._told -= released
        return tuple(shown), tuple(sorted(held)), tuple(sorted(released))


class TenantView:
    """Of one tenant: makes of snapshots and records those that are told to it. Begins with a snapshot."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._begin()

    def _begin(self) -> None:
        self._own: set[int] = set()
        self._states: dict[int, str] = {}
        self._device, self._host = _Pool(1), _Pool(0)
        self._crowd = Crowd()

    def snapshot(self, snapshot: Snapshot) -> Snapshot:
        """What is told of one, from which all begins anew."""
        self._begin()
        cards = self._meet(snapshot.cards)
        self._states = {seq: state for seq, state in snapshot.states if seq not in self._own}
        return msgspec.structs.replace(
            snapshot,
            cards=cards,
            states=tuple((seq, state) for seq, state in snapshot.states if seq in self._own),
            queue=self._queue(snapshot.queue),
            blocks=self._change(snapshot.blocks),
            others=self._count() or self._crowd,
        )

    def record(self, record: Record) -> Record:
        """What is told of one, which follows upon those before it."""
        own, cards = self._own, self._meet(record.cards)
        self._follow(record)
        told = msgspec.structs.replace(
            record,
            cards=cards,
            work=None if record.work is None else self._work(record.work),
            token_ids=tuple(one for one in record.token_ids if one[0] in own),
            admitted=tuple(admission for admission in record.admitted if admission.seq in own),
            moves=tuple(move for move in record.moves if move.seq in own),
            queue=None if record.queue is None else self._queue(record.queue),
            blocks=self._change(record.blocks),
            others=self._count(),
        )
        own.difference_update(move.seq for move in record.moves if move.what == "ended")
        return told

    def _meet(self, cards: Iterable[Card]) -> tuple[Card, ...]:
        """Its own of these, which it knows from now on."""
        told = tuple(card for card in cards if card.tenant == self._tenant)
        self._own.update(card.seq for card in told)
        return told

    def _follow(self, record: Record) -> None:
        """Others come, run, give way and end."""
        states = self._states
        states |= {card.seq: "waiting" for card in record.cards if card.seq not in self._own}
        states |= {admission.seq: "running" for admission in record.admitted if admission.seq in states}
        for move in record.moves:
            if move.what == "ended":
                states.pop(move.seq, None)
            elif move.seq in states:
                states[move.seq] = "swapped" if move.what == "swap" else "waiting"

    def _count(self) -> Crowd | None:
        """How many others there are, where that has changed since it was told."""
        count = Counter(self._states.values())
        crowd = Crowd(count["running"], count["waiting"], count["swapped"])
        if crowd == self._crowd:
            return None
        self._crowd = crowd
        return crowd

    def _change(self, change: BlockChange) -> SharedChange:
        tables, held, released = self._device.apply(change.tables, self._own)
        host_tables, host_held, host_released = self._host.apply(change.host_tables, self._own)
        return SharedChange(
            *(tables, host_tables, change.cached, change.uncached, change.kept, change.dropped),
            *(held, released, host_held, host_released),
        )

    def _queue(self, queue: Queue) -> Queue:
        return msgspec.structs.replace(queue, first=self._anonymous(queue.first))

    def _work(self, work: Work) -> Work:
        """A step, in which others' pieces of a kind are one."""
        pieces = [piece for piece in work.pieces if piece.seq in self._own]
        for kind in sorted({piece.kind for piece in work.pieces}):
            rest = [piece for piece in work.pieces if piece.kind == kind and piece.seq not in self._own]
            if rest:
                num_tokens, num_drafts = sum(p.num_tokens for p in rest), sum(p.num_drafts for p in rest)
                pieces.append(Piece(OTHERS, kind, 0, num_tokens, num_drafts, sum(p.num_accepted for p in rest)))
        return msgspec.structs.replace(work, decodes=self._anonymous(work.decodes), pieces=tuple(pieces))

    def _anonymous(self, seqs: Sequence[int]) -> tuple[int, ...]:
        return tuple(seq if seq in self._own else OTHERS for seq in seqs)
