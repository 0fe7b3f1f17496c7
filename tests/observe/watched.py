"""A scheduler that is looked on at, and somebody who follows what is told, from which he makes what is there."""

from collections import defaultdict
from typing import Any, Final, cast

from aserve.core.outputs import SeqDelta
from aserve.core.plan import StepPlan, StepResult
from aserve.core.ports import Flight
from aserve.observe.observer import Observer
from aserve.observe.others import OTHERS, TenantView
from aserve.observe.records import NO_CHANGE, NO_TOKEN, Card, Crowd, Held, Queue, Record, Snapshot, at_length
from aserve.observe.step import ObservedStep
from aserve.observe.viewer import News, Viewer
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduler.states import State
from tests.observe.explained import Names
from tests.scheduler.sync_loop import SyncLoop


def news_of(viewer: Viewer) -> News:
    """What has come. There is something: nothing is waited for."""
    try:
        viewer.news().send(None)
    except StopIteration as done:
        news: News = done.value
        return news
    raise AssertionError("there is no news")


class Bystander:
    """Follows what a tenant is told."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self._view = TenantView(tenant)
        self.tables, self.others = Held(), (set[int](), set[int]())
        self.cards: set[int] = set()
        self.queue, self.crowd = Queue(), Crowd()

    def begin(self, snapshot: Snapshot) -> None:
        """All that is there."""
        told = self._view.snapshot(snapshot)
        self.tables, self.others, self.cards = Held(), (set(), set()), set()
        self._take(told)

    def follow(self, record: Record) -> None:
        """What has changed."""
        told = self._view.record(record)
        self._take(told)
        if told.work is not None and record.work is not None:
            assert sum(p.num_tokens for p in told.work.pieces) == sum(p.num_tokens for p in record.work.pieces)
            named = {OTHERS} | self.cards
            assert {piece.seq for piece in told.work.pieces} | set(told.work.decodes) <= named
            assert len(told.work.decodes) == len(record.work.decodes)
        for move in told.moves:
            assert move.seq in self.cards
            self.cards -= {move.seq} if move.what == "ended" else set()

    def _take(self, told: Snapshot | Record) -> None:
        assert all(card.tenant == self.tenant for card in told.cards)
        self.cards |= {card.seq for card in told.cards}
        self.tables.apply(told.blocks)
        self.queue = told.queue or self.queue
        self.crowd = told.others or self.crowd
        if told.blocks is not NO_CHANGE:
            for blocks, name in zip(self.others, ("", "host_"), strict=True):
                come, gone = getattr(told.blocks, f"{name}held"), getattr(told.blocks, f"{name}released")
                assert not blocks & set(come)
                assert blocks >= set(gone)
                blocks |= set(come)
                blocks -= set(gone)


class Follower:
    """Applies what a viewer is told."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self.held = Held()
        self.cards: dict[int, Card] = {}
        self.met: set[int] = set()
        self.states: dict[int, str] = {}
        self.queue = Queue()
        self.number = -1
        self.num_lost = 0
        self.records: list[Record] = []
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.bystanders = [Bystander("a"), Bystander("nobody")]

    def follow(self) -> None:
        """Take in the news."""
        news = news_of(self._viewer)
        self.num_lost += news.num_lost
        if (snapshot := news.snapshot) is not None:
            self.held = Held(snapshot.blocks)
            self.cards = {card.seq: card for card in snapshot.cards}
            self.met |= self.cards.keys()
            self.states = dict(snapshot.states)
            self.queue, self.number = snapshot.queue, snapshot.number
            for bystander in self.bystanders:
                bystander.begin(snapshot)
        for record in at_length(news.records):
            assert record.number == self.number + 1, "records come in their order, and none is left out"
            self.number = record.number
            self._take(record)
            for bystander in self.bystanders:
                bystander.follow(record)

    def _take(self, record: Record) -> None:
        self.records.append(record)
        self.held.apply(record.blocks)
        self.queue = record.queue or self.queue
        for card in record.cards:
            self.cards[card.seq] = card
            self.met.add(card.seq)
            self.states[card.seq] = "waiting"
        for admission in record.admitted:
            assert admission.seq in self.met, "who runs has been told of, though it may have ended since"
        if record.work is not None:
            for seq, token_id in zip(record.work.decodes, record.decoded, strict=True):
                self.tokens[seq] += [token_id] if token_id != NO_TOKEN else []
        for seq, token_ids in record.token_ids:
            self.tokens[seq].extend(token_ids)
        for move in record.moves:
            if move.what == "ended":
                del self.cards[move.seq], self.states[move.seq]


FLIGHT: Final = cast("Flight", object())
"""Of a step that is under way: it is looked at whether there is one."""


def costless() -> float:
    """The processor clock of an observer that tells at every look."""
    return 0.0


class WatchedLoop(SyncLoop):
    """Tells an observer of its steps as the engine loop does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seen: dict[int, ObservedStep] = {}
        self._patience = 1 + int(options.get("num_blocks", 0)) % 3
        """Commits between two looks at what was told: that of several steps then comes together."""
        self.observer = Observer(self.scheduler.readings, lambda: self.now, Names(), processor_clock=costless)
        self._looking = self.observer.viewer()
        self.follower = Follower(self._looking.__enter__())
        self.follower.follow()
        self._commit, self.scheduler.commit = self.scheduler.commit, self._watched_commit  # type: ignore[method-assign]
        self.num_followed = 0

    def plan(self) -> StepPlan | None:
        began_s = self.now
        plan = super().plan()
        if plan is not None:
            seen = self._seen[plan.step_id] = ObservedStep(began_s, self.now, self.now, self.now, self.now, self.now)
            self.observer.planned(plan, seen)
        return plan

    def _watched_commit(self, result: StepResult, took_s: float = 0.0) -> Any:
        self._step = self._commit(result, took_s)
        return self._step

    def commit(self) -> list[SeqDelta]:
        plan, result = self.in_flight[0]
        deltas = super().commit()
        self.observer.published(plan, result, self._step, self._seen.pop(plan.step_id))
        if plan.step_id % self._patience == 0:
            self.compare_told()
        return deltas

    def fail(self, index: int = 0, *, out_of_memory: bool = False) -> str | None:
        step_id = self.in_flight[index][0].step_id
        culprit = super().fail(index, out_of_memory=out_of_memory)
        self.observer.taken_back(step_id)
        self.compare_told()
        assert self.follower.records[-1].failed_step == step_id
        return culprit

    def look(self) -> None:
        """Between steps."""
        for _ in range(2):  # steps were over before the first, which is told of behind the next
            self.observer.looked(0.0, FLIGHT if self.in_flight else None)
        self.compare_told()

    def leave(self) -> None:
        """Nobody looks on any more."""
        self._looking.__exit__(None, None, None)

    def compare_told(self) -> None:
        """What was told makes what is there."""
        follower, there = self.follower, truth(self.scheduler)
        follower.follow()
        self.num_followed += 1
        held = follower.held
        assert (held.tables, held.host_tables) == (there.tables, there.host_tables)
        assert held.cached == there.cached, "cached"
        assert held.kept == there.kept, "kept on the host"
        waiting = [sequence.id for sequence in self.scheduler.readings.waiting]
        assert (follower.queue.num_waiting, list(follower.queue.first)) == (len(waiting), waiting[:64])
        assert set(there.tables) | set(there.host_tables) <= set(follower.cards), "who holds something is known"
        for seq, card in follower.cards.items():
            sequence = self.scheduler.readings.sequence(seq)
            assert sequence is not None, "who has ended is told of"
            assert (card.id, card.index) == (sequence.request_id, sequence.index)
        for bystander in follower.bystanders:
            self._compare_bystander(bystander, there)

    def _compare_bystander(self, bystander: Bystander, there: Held) -> None:
        """Its own are told whole; of others which blocks they have that it has not, and how many they are."""
        cards = self.follower.cards
        own = {seq for seq, card in cards.items() if card.tenant == bystander.tenant}
        assert bystander.cards == own
        for mine, every, others, first in (
            (bystander.tables.tables, there.tables, bystander.others[0], 1),
            (bystander.tables.host_tables, there.host_tables, bystander.others[1], 0),
        ):
            assert mine == {seq: blocks for seq, blocks in every.items() if seq in own}
            held = {block for seq, blocks in every.items() if seq not in own for block in blocks if block >= first}
            assert others == held - {block for blocks in mine.values() for block in blocks}
        crowd = bystander.crowd
        assert crowd.running + crowd.waiting + crowd.swapped == len(cards.keys() - own)
        assert bystander.queue.first == tuple(seq if seq in own else OTHERS for seq in self.follower.queue.first)


def truth(scheduler: Scheduler) -> Held:
    """What is there, by its own bookkeeping."""
    pool, host, held = scheduler._cache._pool, scheduler._cache._host, Held()
    for sequence in scheduler._roster.sequences.values():
        if sequence.table.block_ids:
            held.tables[sequence.id] = tuple(sequence.table.block_ids)
        if sequence.state is State.SWAPPED:
            held.host_tables[sequence.id] = tuple(-1 if one is None else one for one in sequence.table.host_ids)
    held.tables = {seq: blocks for seq, blocks in held.tables.items() if blocks}
    held.host_tables = {seq: blocks for seq, blocks in held.host_tables.items() if blocks}
    held.cached = set(pool._index.values())
    held.kept = set(host.kept_ids)
    return held
