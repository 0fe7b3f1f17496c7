"""Rules of the scheduler that an answer seldom shows, each with the change that would break it."""

from types import SimpleNamespace

import msgspec
import pytest

from aserve.core.params import BeamParams, SamplingParams
from aserve.core.plan import TokenScores
from aserve.scheduler.beam import BeamSearch
from aserve.scheduler.fairness import FairQueue
from aserve.scheduler.held_back import Beams
from aserve.scheduler.landing import NOTHING
from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.sequence import row_sampling
from tests.scheduler.sync_loop import Guesser, SyncLoop, request
from tests.scheduler.test_sequence import REQUEST


def victim(num_computed: int, *block_ids: int) -> SimpleNamespace:
    return SimpleNamespace(num_computed=num_computed, table=SimpleNamespace(block_ids=block_ids), group=None)


@pytest.mark.parametrize(
    ("victims", "is_swapped"),
    [
        ([victim(3, 1, 2)], False),
        ([victim(4, 1, 2)], False),  # two blocks out and in cost as much as four tokens
        ([victim(5, 1, 2)], True),
        ([victim(8, 1, 2, 3), victim(0)], True),
        ([victim(4, 1, 2), victim(4, 1, 3)], False),  # the block that both hold is moved once
        ([victim(4, 1, 2), victim(5, 1, 3)], True),
        ([victim(1)], False),  # there is nothing to move
    ],
)
def test_a_victim_is_swapped_where_that_costs_less_and_not_where_it_costs_the_same(victims, is_swapped):
    """Caught: `<=` for `<`, 3 for 2 (a block goes out and in), shares of blocks and tokens the wrong way round."""
    rule = PreemptionRule("auto", recompute_cost_s=0.5, swap_cost_s=0.5)
    assert rule.prefers_swap(victims) == is_swapped


def test_a_prompts_scores_are_asked_for_once():
    """Caught: `!=` for `==` and 1 for 0, by which choices of one prompt would each score it, or none."""
    wanted = msgspec.structs.replace(REQUEST, params=SamplingParams(n=3, prompt_logprobs=2))
    assert [row_sampling(wanted, index).num_prompt_logprobs for index in range(3)] == [2, None, None]


def test_a_round_of_beams_waits_for_a_slot_that_was_preempted_after_its_report():
    """Caught: the pop of `retract` removed, by which the round would go on with what the slot said before."""
    beams = Beams(msgspec.structs.replace(REQUEST, params=SamplingParams(beam=BeamParams(width=2))), max_tokens=4)
    old, other, new = (TokenScores(0, 0.0, 1, (5, 6), (logprob, -2.0)) for logprob in (-1.0, -1.5, -1.75))
    assert not beams.report(0, old)
    beams.retract(0)
    assert not beams.report(1, other)
    assert beams.report(0, new)
    assert beams.take_reports() == [new, other]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "goes_on"),
    [("never", 1.0, True), ("never", 0.5, True), ("never", 0.0, False), (False, 1.0, False), (True, 1.0, False)],
)
def test_a_search_that_never_stops_early_counts_on_the_longest_beam(early_stopping, length_penalty, goes_on):
    """Caught: `==` of "never" or `> 0.0` changed. A beam of -1.5 after one token, against an end of -1.0 there.

    At the greatest length, four tokens, it could still have -1.5 / 4; without a penalty of length it stays -1.5.
    """
    params = BeamParams(width=1, length_penalty=length_penalty, early_stopping=early_stopping)
    beams = BeamSearch(params, max_tokens=4, stop_ids=frozenset({9}))
    beams.advance([TokenScores(0, 0.0, 1, (9, 5), (-1.0, -1.5))])
    assert beams.is_done != goes_on


def test_who_comes_back_is_admitted_once_and_says_what_was_cached_at_first():
    """Caught: `!=` for `==` of `num_preemptions == 0`; then admissions are counted again, and the cache's hits too."""
    loop = SyncLoop(num_blocks=10, block_size=2, watermark=0.0)
    for first, name in enumerate("abc"):
        loop.add(request(name, (first, 1, 1, 0, 1), max_tokens=9))
    loop.drain()
    loop.check()
    counts = loop.scheduler.statistics()
    assert counts.num_preemptions > 0
    assert counts.num_admitted == 3
    assert counts.num_cache_hits > 0, "nobody has found what it computed before"
    assert [answer.last.num_cached_tokens for answer in loop.answers.values() if answer.last] == [0, 0, 0]


def test_copies_for_beams_that_have_left_are_not_made():
    """Caught: `not` before `copies`, and `in` for `not in`, where a sequence gives its blocks back.

    Beams are cancelled between the step that moved them and the plan that would copy for them; others get the blocks.
    """
    loop = SyncLoop(num_blocks=20, depth=1)
    beams = {"n": 2, "beam": BeamParams(width=2)}
    loop.add(request("other", (1, 1), max_tokens=30))
    loop.add(request("beams", (0, 1, 1, 0, 1), max_tokens=8, **beams))
    residents = loop.scheduler._residents
    for _ in range(12):
        if residents.copies:
            break
        loop.step()
    due = list(residents.copies)
    assert due, "no beam has taken over another's past"
    loop.cancel("other")
    assert residents.copies == due, "copies for others stay due"
    loop.cancel("beams")
    assert residents.copies == []
    loop.add(request("next", (1, 0, 1, 1, 0, 0, 1), max_tokens=6))
    loop.drain()
    loop.check()
    loop.compare()


@pytest.mark.parametrize(("lead", "weight", "passes"), [(32.0, 1.0, True), (33.0, 1.0, False), (16.5, 2.0, False)])
def test_a_tenant_may_be_four_chunks_ahead_of_one_that_is_held_back(lead, weight, passes):
    """Caught: `<` for `<=`, and another product than four times the largest chunk, here of 8 tokens."""
    step = SimpleNamespace(is_guest_of=lambda _tenancy, _lowest: False)
    queue = SimpleNamespace(_max_chunk=8, _has_few_rows=lambda _tenancy: True, _this_step=lambda: step)
    lowest, other = (SimpleNamespace(counter=5.0 + ahead, weight=weight) for ahead in (0.0, lead))
    assert FairQueue._may_pass(queue, other, lowest) == passes
    assert FairQueue._may_pass(queue, lowest, lowest)


def test_a_step_of_which_nobody_says_how_long_it_took_teaches_nothing_of_cost(monkeypatch):
    """Caught: another default of `took_s` than 0.0 in `commit`."""
    loop, told = SyncLoop(depth=1), []
    monkeypatch.setattr(loop.scheduler.step_cost, "landed", lambda _slices, seconds: told.append(seconds))
    loop.add(request("a", (0, 1), max_tokens=3))
    while (plan := loop.scheduler.plan(0.0)) is not None:
        loop.scheduler.commit(loop._kv.run(plan))
    assert told == []


def test_a_newcomer_leaves_some_blocks_to_one_who_runs_and_none_where_nobody_does():
    """Of ten blocks three are spared; the newcomer needs six of the eight that are free."""
    loop = SyncLoop(num_blocks=11, watermark=0.3, max_num_batched_tokens=20)
    loop.add(request("a", (0, 1, 0), max_tokens=2))
    loop.plan()
    loop.add(request("b", (1, 0) * 6, max_tokens=1))
    loop.plan()
    counts = loop.scheduler.statistics()
    assert (counts.num_running, counts.num_waiting, counts.num_free_blocks) == (1, 1, 8)
    loop.drain()
    loop.compare()


def test_before_anything_has_happened_all_is_counted_as_nothing():
    counts = msgspec.structs.asdict(SyncLoop(num_blocks=9, proposer=Guesser()).scheduler.statistics())
    assert counts.pop("num_blocks") == counts.pop("num_free_blocks") == 8
    assert counts.pop("num_accepted_by_position") == (0,) * Guesser.most
    assert counts.pop("step_time_error") >= 0.0
    assert not any(counts.values()), counts


@pytest.mark.parametrize("params", [{}, {"logprobs": 1}, {"n": 2, "best_of": 3, "temperature": 1.0}])
def test_between_two_steps_nobody_is_in_the_midst_of_landing(params):
    """Caught: `_at = None` removed; the next call that tears would take a token from who has nothing to do with it."""
    loop = SyncLoop(num_blocks=60, proposer=Guesser())
    loop.add(request("a", (0, 1, 1), max_tokens=9, **params))
    loop.add(request("b", (1, 1, 1), max_tokens=6))
    while loop.step():
        assert loop.scheduler._landing.interrupted() == (NOTHING, None, False)
    loop.compare()


def test_beams_tell_how_long_they_waited_and_what_was_cached():
    loop = SyncLoop(num_blocks=30)
    loop.add(request("first", (0, 1, 1, 0, 1), max_tokens=1))
    loop.drain()
    loop.now = 2.5
    loop.add(request("beams", (0, 1, 1, 0, 1), max_tokens=2, n=2, beam=BeamParams(width=2)))
    loop.drain()
    told = [choice.last for choice in loop.answers["beams"].choices]
    assert [(last.num_cached_tokens, last.queued_s) for last in told if last is not None] == [(4, 2.5)] * 2
