"""Bookkeeping that tears in the midst of a call is made anew, and nobody's answer is another for it."""

import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import pytest

from aserve.kv_cache.block_pool import BlockPool
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler import landing
from aserve.scheduler.beam import BeamSearch
from aserve.scheduler.held_back import Ranking
from aserve.scheduler.residents import Residents
from tests.fakes import deltas_of
from tests.scheduler.sync_loop import LETTERS, Guesser, SyncLoop, request
from tests.scheduler.traces import run_trace

CALLS = (
    *((PagedCache, name) for name in ("acquire", "reserve", "seal", "free", "fork", "rebase", "swap_out", "swap_in")),
    *((BlockPool, name) for name in ("allocate", "release", "pin", "register")),
    *((Residents, name) for name in ("admit", "preempt", "remove", "_vacate", "_settle_in", "rewind", "quarantine")),
    (landing, "reason_to_stop"),
    (Ranking, "add"),
    (BeamSearch, "advance"),
)

RARE = ("quarantine", "rebase", "swap_in")


class Tear(BaseException):
    """What a call raises in the midst of the bookkeeping."""


class TearingLoop(SyncLoop):
    """Does what the engine loop does when a call into the scheduler raises. lost: who was told so."""

    lost: ClassVar[Counter[str]] = Counter()

    def add(self, wanted):
        with self._tearing():
            super().add(wanted)

    def fork(self, name, index, branches):
        with self._tearing():
            return super().fork(name, index, branches)
        return []

    def cancel(self, name):
        with self._tearing(name):
            super().cancel(name)

    def finish(self, name, index=0):
        with self._tearing(name):
            super().finish(name, index)

    def plan(self):
        with self._tearing():
            return super().plan()
        return None

    def step(self):
        num_failures = self.num_failures
        return super().step() or self.num_failures > num_failures

    def commit(self):
        with self._tearing():
            return super().commit()
        return []

    def fail(self, index=0, *, out_of_memory=False):
        for _ in range(index):
            self.commit()
        with self._tearing():
            return super().fail(out_of_memory=out_of_memory) if self.in_flight else None
        return None

    @contextmanager
    def _tearing(self, drops=""):
        try:
            yield
        except Tear:
            if drops in self.answers:
                self.answers[drops].drop()
            wanted = [name for name, answer in self.answers.items() if answer.is_open]
            restart = self.scheduler.restart(wanted)
            self._take(deltas_of(restart.taken_in))
            for name in restart.lost:
                if self.answers[name].is_open:
                    self.answers[name].drop()
                    type(self).lost[name] += 1
            while self.in_flight:
                self._kv.spoil(self.in_flight.pop()[0])
            self._unclean.clear()  # nobody finds a block any more
            self.num_failures += 1
            self.check()


@dataclass
class Tearer:
    """Raises at some calls, before them or when they are done."""

    at: frozenset[int]
    num_calls: int = 0
    num_raised: int = 0

    def around(self, call):
        def tearing(*arguments, **options):
            self.num_calls += 1
            if self.num_calls not in self.at:
                return call(*arguments, **options)
            self.num_raised += 1
            if self.num_calls % 2:
                call(*arguments, **options)
            raise Tear

        return tearing


def run_torn_traces(owner, name, seeds, monkeypatch):
    """How often it tore."""
    num_raised = 0
    for seed in seeds:
        tearer = Tearer(frozenset(random.Random(seed).sample(range(1, 60 if name not in RARE else 8), 6)))
        with monkeypatch.context() as patches:
            patches.setattr(owner, name, tearer.around(getattr(owner, name)))
            try:
                run_trace(seed, depth=1 + seed % 2, kind=TearingLoop)
            except AssertionError as error:
                error.add_note(f"in the trace of seed {seed}")
                raise
        num_raised += tearer.num_raised
    return num_raised


@pytest.mark.parametrize(("owner", "name"), CALLS, ids=[name for _, name in CALLS])
def test_traces_that_tear_end_as_if_they_had_not(owner, name, monkeypatch):
    assert run_torn_traces(owner, name, range(12 if name != "quarantine" else 60), monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize(("owner", "name"), CALLS, ids=[name for _, name in CALLS])
def test_many_traces_that_tear(owner, name, monkeypatch):
    assert run_torn_traces(owner, name, range(150), monkeypatch)


@pytest.mark.parametrize("place", ["admit", "_settle_in", "make_room", "remove"])
def test_a_request_at_which_the_bookkeeping_tears_every_time_ends_alone(place, monkeypatch):
    call = getattr(Residents, place)

    def tear(residents, sequence, *arguments):
        if sequence.request_id == "r5" and (place != "remove" or len(sequence.token_ids) > sequence.num_prompt):
            raise Tear
        return call(residents, sequence, *arguments)

    monkeypatch.setattr(Residents, place, tear)
    monkeypatch.setattr(TearingLoop, "lost", Counter())
    loop = TearingLoop(num_blocks=60, max_num_seqs=16, max_num_batched_tokens=40)
    for index in range(16):
        loop.add(request(f"r{index}", (*LETTERS, index % 3), 5 + index % 4))
    loop.drain()
    loop.compare()
    assert TearingLoop.lost == {"r5": 1}


def test_a_draft_that_may_be_ranked_already_ends_its_request(monkeypatch):
    """Computed again, it would be counted twice."""
    add, torn = Ranking.add, []

    def tear(ranking, delta, logprob):
        told = add(ranking, delta, logprob)
        if not torn and all(piece.num_samples > 1 for piece in loop.plans[-1].slices):
            torn.append(delta)
            raise Tear
        return told

    monkeypatch.setattr(Ranking, "add", tear)
    monkeypatch.setattr(TearingLoop, "lost", Counter())
    loop = TearingLoop(depth=1, num_blocks=60, max_num_batched_tokens=40, proposer=Guesser())
    loop.add(request("r", (*LETTERS, 1), 12, temperature=1.0, best_of=2))
    loop.drain()
    loop.compare()
    assert torn
    assert TearingLoop.lost == {"r": 1}


def test_bookkeeping_that_is_made_anew_suspects_nobody():
    loop = TearingLoop(num_blocks=60, max_num_batched_tokens=40)
    for index in range(4):
        loop.add(request(f"r{index}", (*LETTERS, index % 3), 5))
    loop.plan()
    loop.fail()
    on_trial = loop.plan()
    assert on_trial is not None
    assert (len(on_trial.slices), loop.scheduler.max_in_flight) == (2, 1)
    with loop._tearing():
        raise Tear
    anew = loop.plan()
    assert anew is not None
    assert (len(anew.slices), loop.scheduler.max_in_flight) == (4, 2)
    loop.drain()
    loop.compare()
