"""Deadlines: who is served ends with what it has, who is not was never computed, and nothing is left behind."""

import random
from math import inf

import pytest

from aserve.core.ids import RequestId
from aserve.core.outputs import DEADLINE, FinishReason
from aserve.core.params import BeamParams
from aserve.scheduler.deadlines import MIN_SWEEP
from tests.scheduler.simulation import Arrival, Simulation, simulate
from tests.scheduler.sync_loop import SyncLoop, request


def ends(loop: SyncLoop, name: str) -> list[tuple[int, object]]:
    """How many tokens each choice of a request that was cut short has, and why it ended."""
    for choice in loop.answers[name].choices:
        assert choice.last is not None
        assert choice.last.finish_reason is FinishReason.LENGTH
    return [(len(choice.token_ids), choice.last.stop_reason) for choice in loop.answers[name].choices]


def held(loop: SyncLoop) -> tuple[int, int, int]:
    counts = loop.scheduler.statistics()
    return counts.num_used_blocks, counts.num_running, counts.num_waiting


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_who_runs_ends_with_what_it_has(depth):
    loop = SyncLoop(depth=depth)
    loop.add(request("a", (0, 1, 2), max_tokens=9, deadline_s=5.0))
    for _ in range(6):
        loop.step()
    has = len(loop.answers["a"].token_ids)
    loop.now = 4.9
    assert loop.expire() == ()
    assert loop.answers["a"].is_open
    loop.now = 5.0
    assert loop.expire() == ()
    assert ends(loop, "a") == [(has, DEADLINE)]
    assert held(loop) == (0, 0, 0)
    loop.drain()  # what was in flight is ignored
    loop.compare()


def test_who_waits_is_never_computed():
    loop = SyncLoop(max_num_seqs=1)
    loop.add(request("a", (0, 1), max_tokens=9))
    loop.add(request("b", (1, 1), max_tokens=2, n=2, temperature=1.0, deadline_s=1.0))
    loop.step()
    loop.now = 1.0
    assert loop.expire() == ("b",)
    loop.drain()
    loop.compare()
    assert {piece.seq_id for plan in loop.plans for piece in plan.slices} == {0}


def test_all_choices_end_together_whether_they_have_begun_or_not():
    loop = SyncLoop(max_num_seqs=2)
    loop.add(request("a", (0, 1), max_tokens=9, n=3, temperature=1.0, deadline_s=1.0))
    for _ in range(3):
        loop.step()
    loop.now = 1.0
    loop.expire()
    ended = ends(loop, "a")
    assert [reason for _, reason in ended] == [DEADLINE] * 3
    assert ended[0][0] > 0
    assert ended[2][0] == 0
    assert held(loop) == (0, 0, 0)
    loop.drain()
    loop.compare()


def test_a_choice_that_ended_by_itself_stays_as_it_is():
    loop = SyncLoop(max_num_seqs=1)
    loop.add(request("a", (0, 1), max_tokens=2, n=2, temperature=1.0, deadline_s=1.0))
    while loop.answers["a"].choices[0].is_open:
        loop.step()
    loop.now = 1.0
    loop.expire()
    assert [stop for _, stop in ends(loop, "a")] == [None, DEADLINE]
    loop.drain()


def test_a_prompt_half_computed_ends_without_a_token():
    loop = SyncLoop(num_blocks=30, max_num_batched_tokens=4)
    loop.add(request("a", (0, 1, 2) * 4, max_tokens=9, deadline_s=1.0))
    loop.step()
    loop.now = 1.0
    loop.expire()
    assert ends(loop, "a") == [(0, DEADLINE)]
    assert held(loop) == (0, 0, 0)


def test_of_ranked_choices_the_best_so_far_are_told():
    loop = SyncLoop(max_num_seqs=2)
    loop.add(request("a", (0, 1), max_tokens=9, n=2, best_of=3, temperature=1.0, deadline_s=1.0))
    for _ in range(4):
        loop.step()
    loop.now = 1.0
    loop.expire()
    lasts = [choice.last for choice in loop.answers["a"].choices]
    assert all(last.token_ids and last.stop_reason == DEADLINE for last in lasts)  # the third has none, and is last
    assert lasts[0].cumulative_logprob >= lasts[1].cumulative_logprob
    for last in lasts:  # that its time is up makes none likelier
        scores = loop.scores(loop.answers["a"].request, list(last.token_ids), 0)
        assert last.cumulative_logprob == pytest.approx(sum(score.logprob for score in scores))
    loop.drain()


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_beams_are_hypotheses_as_they_stand(num_steps):
    loop = SyncLoop(num_blocks=30, depth=1)
    loop.add(request("a", (0, 1), max_tokens=9, beam=BeamParams(width=2), n=2, deadline_s=1.0))
    for _ in range(num_steps):
        loop.step()
    if num_steps == 0:
        loop.plan()
    loop.now = 1.0
    loop.expire()
    assert ends(loop, "a") == [(num_steps - 1 if num_steps else 0, DEADLINE)] * 2
    assert held(loop) == (0, 0, 0)
    loop.drain()


def test_who_was_preempted_and_waits_again_ends_with_what_it_has():
    loop = SyncLoop(num_blocks=6, watermark=0.0)
    loop.add(request("old", (0, 0, 0, 0), max_tokens=6))
    loop.add(request("new", (1, 1, 1, 1), max_tokens=4, deadline_s=1.0))
    loop.plan()
    loop.plan()
    loop.commit()
    assert loop.scheduler.statistics().num_waiting == 1
    loop.now = 1.0
    assert loop.expire() == ()
    assert ends(loop, "new") == [(1, DEADLINE)]
    loop.drain()
    loop.compare()


def test_an_id_that_is_used_again_is_not_cut_short_for_the_one_before():
    loop = SyncLoop()
    loop.add(request("a", (0, 1), max_tokens=1, deadline_s=1.0))
    loop.drain()
    loop.add(request("a", (0, 1), max_tokens=3))
    loop.now = 1.0
    loop.drain()
    assert not loop.answers["a"].is_cut


def test_a_branch_has_the_deadline_of_what_it_continues_and_ends_with_it():
    loop = SyncLoop(num_blocks=30)
    loop.add(request("a", (0, 1), max_tokens=9, deadline_s=1.0))
    for _ in range(3):
        loop.step()
    loop.fork("a", 0, [request("b", (), max_tokens=9, deadline_s=1.0)])
    loop.step()
    loop.now = 1.0
    loop.expire()
    assert held(loop) == (0, 0, 0)


def test_requests_that_have_ended_are_forgotten_before_their_deadline():
    loop = SyncLoop(checked=False)
    for i in range(4 * MIN_SWEEP):
        loop.add(request(f"r{i}", (0, 1), max_tokens=1, deadline_s=1e6))
        loop.drain()
    assert len(loop.scheduler._deadlines._heap) <= MIN_SWEEP + 3


class Prophet(Simulation):
    """Asks before each step how long somebody who came now would wait."""

    def __init__(self, arrivals: list[Arrival], **limits: object) -> None:
        super().__init__(arrivals, **limits)
        self.predicted_s: dict[float, float] = {}

    def _admit_arrivals(self) -> None:
        waiting = self.scheduler._residents.waiting
        ahead = waiting.ahead_of(request("now", (0,), arrival_s=self.now), (self.now, 10**9))
        wait_s = self.scheduler._admission.throughput.seconds_for(ahead.num_sequences, ahead.num_prompt_tokens)
        for arrival in self._arrivals:
            if arrival.at_s <= self.now and wait_s is not None:
                self.predicted_s[arrival.at_s] = wait_s
        super()._admit_arrivals()


def test_the_wait_that_is_predicted_is_the_wait_that_comes():
    """20 a second of what the machine can do 7 of: in the end the last one waits for 19 s."""
    arrivals = [Arrival(i / 20, "", 100, 50) for i in range(200)]
    prophet = Prophet(arrivals, max_num_seqs=4)
    outcome = prophet.run()
    came = dict(zip((arrival.at_s for arrival in arrivals), outcome.first_token_s[""], strict=True))
    settled = {at_s: wait_s for at_s, wait_s in prophet.predicted_s.items() if at_s >= 2.0}
    assert len(settled) > 150
    for at_s, wait_s in settled.items():
        assert wait_s == pytest.approx(came[at_s], rel=0.2, abs=0.5)


def test_nobody_is_let_in_to_be_sent_away():
    """10 times what the machine can do, with 2 s for each: refused at once, or served, with few mistakes."""
    rng = random.Random(5)
    arrivals = [Arrival(rng.uniform(0.0, 20.0), "", 100, 50, timeout_s=2.0) for _ in range(1400)]
    outcome = simulate(arrivals, max_num_seqs=4)
    assert len(outcome.refused) > 10 * len(outcome.unserved)
    assert len(outcome.unserved) < 0.05 * len(outcome.finished)
    assert not outcome.unserved & outcome.planned
    assert {*outcome.refused, *outcome.unserved, *outcome.finished} == {RequestId(str(i)) for i in range(1400)}
    assert all(1 <= error.retry_after_s <= 60 for error in outcome.refused.values())


def test_before_anything_is_measured_nobody_is_refused_for_his_time():
    loop = SyncLoop(max_num_seqs=1)
    for i in range(50):
        loop.add(request(f"r{i}", (0, 1), deadline_s=0.001))
    loop.now = 1.0
    assert len(loop.expire()) == 50
    loop.drain()
    assert RequestId("r0") in loop.answers


def test_it_is_known_when_the_next_deadline_comes_and_of_equals_who_came_first_ends_first():
    loop = SyncLoop(max_num_seqs=1)
    assert loop.scheduler.next_deadline_s == inf
    for name, deadline_s in (("a", 5.0), ("b", 3.0), ("c", None), ("d", 3.0)):
        loop.add(request(name, (0, 1), deadline_s=deadline_s))
    assert loop.scheduler.next_deadline_s == 3.0
    loop.now = 3.0
    assert loop.expire() == ("b", "d")
    assert loop.scheduler.next_deadline_s == 5.0
    loop.now = 6.0
    assert loop.expire() == ("a",)
    assert loop.scheduler.next_deadline_s == inf
    loop.drain()


def test_who_is_open_is_remembered_when_others_are_forgotten():
    loop = SyncLoop(checked=False)
    loop.add(request("stays", (0, 1), max_tokens=900, deadline_s=5.0))
    for i in range(2 * MIN_SWEEP):
        loop.add(request(f"r{i}", (0, 1), max_tokens=1, deadline_s=9.0))
        loop.cancel(f"r{i}")
    loop.now = 5.0
    assert loop.expire() == ("stays",)
