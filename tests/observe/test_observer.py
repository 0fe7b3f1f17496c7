"""The observer beside an engine's loop: its cost, what slow and late viewers get, and what becomes of its faults."""

import asyncio
from contextlib import ExitStack

import pytest

from aserve.core.errors import OverloadedError, UnavailableError
from aserve.observe.mirror import Mirror
from aserve.observe.observer import MAX_VIEWERS, SHARE, Observer
from aserve.observe.records import NO_CHANGE, BlockChange, Held, Phases, Queue, Run, Splice
from aserve.observe.step import ObservedStep
from aserve.scheduler.states import Hold
from tests.engines import byte_tokenizer
from tests.fakes import FakeClock
from tests.observe.explained import Names
from tests.observe.watched import FLIGHT, Follower, WatchedLoop, costless, news_of, truth
from tests.scheduler.sync_loop import SyncLoop, request
from tests.test_engine_loop import Bench, fake_kv, running

PROMPT = tuple(range(1, 20))


class Telltale(Observer):
    """Says what it is asked."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.asked = []

    def __getattribute__(self, name):
        if name in ("planned", "published", "looked", "taken_back", "_change"):
            self.asked.append(name)
        return super().__getattribute__(name)


def watched_bench(**options):
    """An engine's loop with such an observer."""
    bench = Bench(byte_tokenizer(), fake_kv(), **options)
    observer = Telltale(bench.scheduler.readings, bench.clock, bench.metrics)
    bench.loop.observer = bench.loop._steps._observer = observer
    return bench, observer


async def test_nothing_is_done_while_nobody_looks_on():
    bench, observer = watched_bench()
    async with running(bench):
        await bench.ask("a", PROMPT, 9)
        assert observer.asked == []
        assert observer._mirror is None
        assert bench.scheduler._cache._pool.rehashed is None
        with observer.viewer() as viewer:
            await viewer.news()
            await bench.ask("b", PROMPT, 9)
            assert set(observer.asked) == {"planned", "published"}
        observer.asked.clear()
        await bench.ask("c", PROMPT, 9)
        assert observer.asked == []
        assert observer._mirror is None
        assert bench.scheduler._cache._pool.rehashed is None


async def test_who_comes_while_a_step_is_under_way_sees_what_is_there_and_then_whole_steps():
    bench, observer = watched_bench()
    bench.runner.hold()
    async with running(bench):
        asked = asyncio.create_task(bench.ask("a", PROMPT, 9))
        for _ in range(10):
            await asyncio.sleep(0)
        with observer.viewer() as viewer:
            follower = Follower(viewer)
            follower.follow()
            assert follower.held.tables == truth(bench.scheduler).tables != {}
            bench.runner.let_land()
            await asked
            follower.follow()
            steps = [record.work.step for record in follower.records if record.work is not None]
            assert steps == list(range(2, 2 + len(steps)))  # two were under way
            assert steps
            assert follower.held.tables == {}


async def test_times_are_those_of_the_clock():
    bench, observer = watched_bench(max_in_flight=1)
    plan, clock = bench.scheduler.plan, bench.clock

    def slow_plan(now):
        clock.advance(0.002)
        return plan(now)

    bench.scheduler.plan = slow_plan
    async with running(bench):
        with observer.viewer() as viewer:
            await viewer.news()
            clock.advance(1.0)
            await bench.ask("a", PROMPT, 2)
            [first, *_] = [record for record in news_of(viewer).records if record.work is not None]
    assert first.work.began_us == 1_000_000
    assert first.work.phases.plan == 2000
    assert first.at_us >= 1_002_000
    assert (first.work.phases.launch, first.work.phases.publish) == (0, 0)


@pytest.mark.parametrize("is_launched_last", [False, True])
def test_the_wait_begins_with_nothing_else_to_do_and_never_before_the_launch(is_launched_last):
    loop, clock = SyncLoop(), FakeClock()
    observer = Observer(loop.scheduler.readings, clock, Names())
    loop.add(request("a", PROMPT[:4]))
    with observer.viewer() as viewer:
        news_of(viewer)
        plan = loop.plan()
        seen = ObservedStep(0.0, clock())
        observer.planned(plan, seen)
        for name in ("waited_s", "launched_s") if is_launched_last else ("launched_s", "waited_s"):
            clock.advance(0.001)
            setattr(seen, name, clock())
        _, result = loop.in_flight.popleft()
        step = loop.scheduler.commit(result)
        clock.advance(0.004)
        seen.landed_s, seen.committed_s = 0.005, clock()
        clock.advance(0.001)
        observer.published(plan, result, step, seen)
        [phases] = [record.work.phases for record in news_of(viewer).records]
    launch_us = 2000 if is_launched_last else 1000
    assert phases == Phases(plan=0, launch=launch_us, flight=5000 - launch_us, wait=3000, commit=1000, publish=1000)


def test_who_comes_while_a_step_is_under_way_is_told_of_all_of_it():
    """While somebody waits for an explanation steps are observed though nobody looks on: who decodes is not noted."""
    loop = SyncLoop()
    observer = Observer(loop.scheduler.readings, FakeClock(), Names())
    loop.add(request("a", PROMPT[:4]))
    loop.step()
    plan = loop.plan()
    seen = ObservedStep(0.0, 0.0)
    observer.planned(plan, seen)
    with observer.viewer() as viewer:
        news_of(viewer)
        _, result = loop.in_flight.popleft()
        observer.published(plan, result, loop.scheduler.commit(result), seen)
        [record] = news_of(viewer).records
    assert (record.work.decodes, record.decoded) == ((plan.slices[0].seq_id,), result.token_ids)


def test_who_reads_slowly_loses_records_and_is_told_how_many():
    loop = SyncLoop()
    observer = Observer(loop.scheduler.readings, FakeClock(), Names(), max_records=10, processor_clock=costless)
    with observer.viewer() as slow, observer.viewer() as quick:
        followers = [Follower(slow), Follower(quick)]
        for follower in followers:
            follower.follow()
        for _ in range(35):
            observer.looked(0.0, None)
            followers[1].follow()
            assert len(slow._records) <= 10
        followers[0].follow()
        assert (followers[0].num_lost, followers[0].number, followers[0].records) == (35, 35, [])
        assert (followers[1].num_lost, followers[1].number, len(followers[1].records)) == (0, 35, 35)
        observer.looked(0.0, None)
        followers[0].follow()
        assert [record.number for record in followers[0].records] == [36]


def records_of(patience, **options):
    """What is told of two answers, each of which gets blocks, then of others that come and go beside each other, of two
    choices or of a prompt known before. patience: steps between two looks at the news.
    """
    loop = WatchedLoop(num_blocks=60, max_num_seqs=2, **options)
    loop._patience = patience
    loop.add(request("a", (1, 2, 1), 12))
    loop.add(request("b", (2, 2, 1, 1), 9))
    loop.drain()
    loop.look()
    for number in range(6):
        loop.add(request(f"late {number}", (1, 2, 1, number % 2, 1), 3 + number, n=1 + (number == 2)))
        for _ in range(2):
            loop.step()
    loop.drain()
    loop.look()
    return loop.follower.records


def test_steps_that_are_told_later_say_what_each_would_at_once(monkeypatch):
    later, alone = records_of(100), records_of(1)
    monkeypatch.setattr(Mirror, "num_noted", lambda mirror: None)
    assert records_of(1) == later == alone
    assert sum(record.blocks != NO_CHANGE for record in later) > 20
    assert sum(move.what == "ended" for record in later for move in record.moves) == 9
    assert sum(record.queue is not None for record in later) > 4


def test_a_look_that_falls_into_a_step_is_told_behind_it_or_at_the_next():
    loop = WatchedLoop(num_blocks=60)
    loop._patience, viewer, observer = 100, loop.follower._viewer, loop.observer
    loop.add(request("a", (1, 2, 1), 20))
    for _ in range(3):
        loop.step()
    news_of(viewer)
    observer.looked(0.25, FLIGHT)
    assert not viewer._records
    loop.step()
    *_, last = news_of(viewer).records
    assert last.lag_us == 250_000
    observer.looked(0.5, FLIGHT)
    observer.looked(0.75, FLIGHT)
    assert [record.lag_us for record in news_of(viewer).records] == [750_000]


def test_looks_are_farther_apart_where_telling_takes_long():
    """Catches the cost of one look, or of one viewer, in place of all; and a rest that grows beyond its bound."""
    clock = FakeClock()
    observer = Observer(SyncLoop().scheduler.readings, clock, Names(), processor_clock=costless)
    with observer.viewer() as viewer, observer.viewer() as other:
        news_of(viewer)
        lags_s = 0.0, 0.1, 0.2, 0.3, 0.8, 0.5, 0.6, 0.7
        costs = (0.25, 0.25), (1.0, 0.5), (0, 0), (200, 200), *[(0, 0)] * 4
        for look, (lag_s, (cost, others_cost)) in enumerate(zip(lags_s, costs, strict=True)):
            clock.now = look / 10
            observer.looked(lag_s, None)
            viewer.spend(cost * SHARE / 10)
            other.spend(others_cost * SHARE / 10)
        told = [record.lag_us for record in news_of(viewer).records]
    assert told == [0, 100_000, 300_000, 800_000, 700_000], "looks 0, 1, 3, 6 and 7, the latest that it was since"


def test_who_waits_is_told_when_that_changes_and_not_with_each_step():
    loop = WatchedLoop(num_blocks=60, max_num_seqs=1)
    loop._patience, viewer = 100, loop.follower._viewer
    loop.add(request("a", (1, 2, 1), 40))
    for _ in range(3):
        loop.step()
    news_of(viewer)
    loop.add(request("b", (2, 1), 4))
    for _ in range(4):
        loop.step()
    loop.add(request("c", (2, 2), 4))
    loop.step()
    loop.plan()
    loop.scheduler._planner.hold = Hold.MEMORY
    loop.commit()
    comes, waits, comes_too, is_held = news_of(viewer).records
    first, second = comes.cards[0].seq, comes_too.cards[0].seq
    assert comes.queue == Queue(1, (first,), "rows")
    assert isinstance(waits, Run)
    assert len(waits.steps) == 3
    assert comes_too.queue == Queue(2, (first, second), "rows")
    assert is_held.queue == Queue(2, (first, second), "memory")


def test_a_run_counts_as_its_records():
    loop = WatchedLoop(num_blocks=60)
    loop._patience, viewer = 100, loop.follower._viewer
    viewer._max_records = 6
    loop.add(request("a", (1, 2, 1), 20))
    for _ in range(6):
        loop.step()
    [*_, run] = news_of(viewer).records
    assert isinstance(run, Run)
    assert [record.work.step for record in run.records()] == list(range(run.steps[0][0], run.steps[-1][0] + 1))
    assert len(run.steps) == len(run.decoded) > 3
    for _ in range(7):
        loop.step()
    news = news_of(viewer)
    assert (news.num_lost, news.snapshot is not None, news.records) == (7, True, ())


def test_there_are_no_more_than_may_be_and_none_after_the_end():
    observer = Observer(SyncLoop().scheduler.readings, FakeClock(), Names())
    with ExitStack() as looking:
        viewers = [looking.enter_context(observer.viewer()) for _ in range(MAX_VIEWERS)]
        with pytest.raises(OverloadedError, match="8 look on already"), observer.viewer():
            pass
        observer.close()
        for viewer in viewers:
            with pytest.raises(UnavailableError):
                viewer.news().send(None)
    assert not observer.is_watched
    with pytest.raises(UnavailableError), observer.viewer():
        pass


def test_who_stays_is_told_on_when_another_leaves():
    loop = SyncLoop()
    observer = Observer(loop.scheduler.readings, FakeClock(), Names())
    with observer.viewer() as stays:
        with observer.viewer():
            pass
        assert observer.is_watched
        news_of(stays)
        observer.looked(0.5, None)
        assert [record.lag_us for record in news_of(stays).records] == [500_000]
    assert not observer.is_watched


async def test_a_fault_of_the_observer_is_nobodys_and_viewers_begin_anew(monkeypatch, caplog):
    bench, observer = watched_bench()
    take_news = Mirror.take_news
    faults = iter([RuntimeError("a canary"), MemoryError()])

    def faulty(mirror, *arguments, **options):
        result = take_news(mirror, *arguments, **options)
        if len(mirror._told) and (fault := next(faults, None)) is not None:
            raise fault
        return result

    async with running(bench):
        with observer.viewer() as viewer:
            follower = Follower(viewer)
            follower.follow()
            monkeypatch.setattr(Mirror, "take_news", faulty)
            answer = await bench.ask("a", PROMPT, 9)
            assert len(answer[0]) == 9
            observer.looked(0.0, None)
            follower.follow()
            there = truth(bench.scheduler)
            assert (follower.held.tables, follower.held.cached) == (there.tables, there.cached)
            assert follower.num_lost
    assert "canary" not in caplog.text
    assert "in observing" in caplog.text
    assert bench.held() == (0, 0, 0, 0)


async def test_bookkeeping_that_is_made_anew_is_told():
    bench, observer = watched_bench()
    commit = bench.scheduler.commit
    faults = iter([RuntimeError()])

    def torn(result, took_s=0.0):
        if result.step_id == 3 and (fault := next(faults, None)) is not None:
            raise fault
        return commit(result, took_s)

    bench.scheduler.commit = torn
    async with running(bench):
        with observer.viewer() as viewer:
            follower = Follower(viewer)
            follower.follow()
            answer = await bench.ask("a", PROMPT, 9)
            assert len(answer[0]) == 9
            observer.looked(0.0, None)
            follower.follow()
    assert [move.what for record in follower.records for move in record.moves] == ["recompute", "ended"]
    assert follower.held.tables == {}


def test_a_prefix_a_fork_and_a_swap_are_told_apart():
    loop = WatchedLoop(num_blocks=14, max_num_batched_tokens=32)
    loop.add(request("first", (1, 1, 2, 2, 1), 1))
    loop.drain()
    loop.add(request("again", (1, 1, 2, 2, 2), 3, n=2, temperature=1.0))
    loop.drain()
    admitted = [one for record in loop.follower.records for one in record.admitted]
    told = [(one.seq, one.num_matched, one.source) for one in admitted]
    assert told == [(0, 0, "none"), (1, 4, "cache"), (2, 4, "fork")]


def test_held_is_made_of_what_it_says_of_itself():
    held = Held(BlockChange(tables=(Splice(1, 0, (4, 5)),), cached=(4,), kept=(2, 3)))
    assert held.kept == {2, 3}
    held.apply(BlockChange(tables=(Splice(1, 1, (7,)), Splice(2, 0, (4,))), cached=(7,), uncached=(4,), dropped=(2, 3)))
    assert held.tables == {1: (4, 7), 2: (4,)}
    assert (held.cached, held.kept) == ({7}, set())
    again = Held(held.whole())
    assert (again.tables, again.host_tables, again.cached, again.kept) == (held.tables, {}, {7}, set())


async def test_who_is_busy_when_the_engine_ends_does_not_wait_for_its_next_look():
    observer = Observer(SyncLoop().scheduler.readings, FakeClock(), Names())
    with observer.viewer() as viewer:
        await viewer.news()
        observer.close()
        await asyncio.wait_for(viewer.next_look(), 5)
        with pytest.raises(UnavailableError):
            await viewer.news()
