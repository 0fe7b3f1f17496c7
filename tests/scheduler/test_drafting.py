"""Drafts in the scheduler: whole plans, who waits, what is worth it, and lives under pressure beside the oracle."""

import random
from collections.abc import Iterable

import pytest

from aserve.core.ids import RequestId, SeqId
from aserve.core.outputs import FinishReason, SeqDelta
from aserve.core.params import BeamParams
from aserve.core.plan import TO_COME, SeqSlice, StepPlan, StepResult, TokenScores
from aserve.core.speculation import StepSeconds
from aserve.drafting.draft_model import DraftModelProposer
from aserve.scheduler import drafting, planner
from aserve.scheduler.drafting import Drafter
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.step_cost import Prices
from tests.fakes import Foreseer, deltas_of
from tests.scheduler.sync_loop import EOS, Guesser, SyncLoop, request
from tests.scheduler.traces import run_trace

Drafts = dict[tuple[int, ...], tuple[int, ...]]
PRICE_OF_NOTHING = Prices(base=1.0, token=0.0, row=0.0, key=0.0)


class Script(Foreseer):
    """A `Proposer` that has a guess for certain tokens, and knows who has ended."""

    most = 3

    def __init__(self, guesses: Drafts) -> None:
        self._guesses = guesses
        self.forgotten: list[SeqId] = []

    def propose(self, seq_id: SeqId, token_ids: Iterable[int], most: int) -> tuple[int, ...]:
        del seq_id
        return self._guesses.get(tuple(token_ids), ())[:most]

    def forget(self, seq_id: SeqId) -> None:
        self.forgotten.append(seq_id)


def scheduler_of(guesses: Drafts, **limits: object) -> Scheduler:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 100, "watermark": 0.0, "num_blocks": 20}
    return Scheduler(**{"block_size": 2, "proposer": Script(guesses)} | sizes | limits)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    scheduler.check()
    assert plan is not None
    return plan


def land(scheduler: Scheduler, plan: StepPlan, *token_ids: int, num_accepted: tuple[int, ...] = ()) -> list[SeqDelta]:
    deltas = deltas_of(scheduler.commit(StepResult(plan.step_id, token_ids, num_accepted=num_accepted)))
    scheduler.check()
    return deltas


def decoding(guesses: Drafts, max_tokens: int = 8, **params: object) -> Scheduler:
    """A request of the prompt (0, 1) that has got token 5, and nothing in flight."""
    scheduler = scheduler_of(guesses)
    scheduler.add(request("a", (0, 1), max_tokens=max_tokens, **params))
    land(scheduler, planned(scheduler), 5)
    return scheduler


# Whole plans.


def test_drafts_are_verified_behind_the_newest_token_and_told_together():
    scheduler = decoding({(0, 1, 5): (6, 7, 8), (0, 1, 5, 6, 9): (4,)})
    plan = planned(scheduler)
    assert plan.slices == (SeqSlice(0, 0, 2, 4, (5, 6, 7, 8), (2, 3), 4),)
    assert plan.num_tokens == 4
    assert scheduler.plan(0.0) is None, "nobody knows where it goes on"
    assert land(scheduler, plan, 6, 9, num_accepted=(1,)) == [SeqDelta("a", (6, 9))]
    after = planned(scheduler)  # position 4 was computed with a wrong token, and 5 too: from 4 on they come again
    assert after.slices == (SeqSlice(0, 0, 4, 2, (9, 4), (), 2),)
    assert land(scheduler, after, 4, 3, num_accepted=(1,)) == [SeqDelta("a", (4, 3))]
    plain = planned(scheduler)  # no guess: the device has the token, and the next step may run ahead
    assert plain.slices == (SeqSlice(0, 0, 6, 1, (), (4,), 1),)
    assert planned(scheduler).slices == (SeqSlice(0, 0, 7, 1, (), (), 1),)


def test_a_rejected_draft_is_in_no_block_that_is_found():
    scheduler = decoding({(0, 1, 5): (6, 7, 8)})
    land(scheduler, planned(scheduler), 9, num_accepted=(0,))  # written: 0 1 5 6 7 8; landed: 0 1 5
    scheduler.finish(RequestId("a"))
    for name, prompt, num_cached in (("wrong", (0, 1, 5, 6, 7, 8, 2), 2), ("right", (0, 1, 5, 9, 9), 2)):
        scheduler.add(request(name, prompt, max_tokens=1))
        [delta] = land(scheduler, planned(scheduler), 3)
        assert delta.num_cached_tokens == num_cached, name


def test_an_accepted_draft_is_in_blocks_that_are_found():
    scheduler = decoding({(0, 1, 5): (6, 7, 8)})
    land(scheduler, planned(scheduler), 6, 7, 8, 9, num_accepted=(3,))
    scheduler.finish(RequestId("a"))
    scheduler.add(request("b", (0, 1, 5, 6, 7, 8, 2), max_tokens=1))
    [delta] = land(scheduler, planned(scheduler), 3)
    assert delta.num_cached_tokens == 6


def test_tokens_behind_an_ending_one_are_dropped():
    scheduler = decoding({(0, 1, 5): (6, EOS, 8)}, stop_ids=frozenset({EOS}))
    deltas = land(scheduler, planned(scheduler), 6, EOS, 8, 9, num_accepted=(3,))
    assert deltas == [SeqDelta("a", (6, EOS), FinishReason.STOP)]
    assert scheduler.statistics().num_used_blocks == 0


@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset({EOS})])
def test_tokens_behind_a_stop_string_are_not_in_what_is_continued(stop_ids):
    scheduler = decoding({(0, 1, 5): (6, 7, EOS)}, stop_ids=stop_ids)
    [delta] = land(scheduler, planned(scheduler), 6, 7, EOS, 8, num_accepted=(3,))
    scheduler.finish(RequestId("a"), num_dropped=len(delta.token_ids) - 1)  # token 6 completed it
    assert scheduler.history(RequestId("a")) == (0, 1, 5, 6)


def test_there_are_no_more_drafts_than_tokens_to_come():
    scheduler = decoding({(0, 1, 5): (6, 7, 8)}, max_tokens=3)
    plan = planned(scheduler)
    assert plan.slices[0].token_ids == (5, 6), "two tokens are to come, and one is sampled behind the draft"
    assert land(scheduler, plan, 6, 7, num_accepted=(1,)) == [SeqDelta("a", (6, 7), FinishReason.LENGTH)]


def test_drafts_take_free_blocks_and_preempt_nobody():
    scheduler = scheduler_of({(0, 1, 5): (6, 7, 8)}, num_blocks=4)
    scheduler.add(request("a", (0, 1), max_tokens=8))
    scheduler.add(request("b", (2,), max_tokens=2))
    land(scheduler, planned(scheduler), 5, 5)
    plan = planned(scheduler)
    assert plan.slices[0].token_ids == (5, 6), "one block is free: room for the token and one draft"
    assert scheduler.statistics().num_preemptions == 0


def test_the_budget_of_a_step_bounds_drafts():
    scheduler = scheduler_of({(0, 1, 5): (6, 7, 8)}, max_num_batched_tokens=3)
    scheduler.add(request("a", (0, 1), max_tokens=8))
    land(scheduler, planned(scheduler), 5)
    assert planned(scheduler).slices[0].token_ids == (5, 6, 7)


def test_neighbours_run_ahead_of_who_waits_for_drafts():
    scheduler = scheduler_of({(0, 1, 5): (6, 7, 8)})
    for name, prompt in (("a", (0, 1)), ("b", (2, 2))):
        scheduler.add(request(name, prompt, max_tokens=8))
    land(scheduler, planned(scheduler), 5, 5)
    drafted, ahead = planned(scheduler), planned(scheduler)
    assert [piece.num_samples for piece in drafted.slices] == [4, 1]
    assert [(piece.seq_id, piece.start) for piece in ahead.slices] == [(1, 3)]
    deltas = land(scheduler, drafted, 6, 1, 3, num_accepted=(1, 0))
    assert sorted(deltas, key=lambda delta: delta.request_id) == [SeqDelta("a", (6, 1)), SeqDelta("b", (3,))]


def test_a_neighbour_of_who_has_drafts_keeps_its_scores():
    """Caught: the scores of slices without drafts dropped where a step has some with drafts."""
    scheduler = scheduler_of({(0, 1, 5): (6, 7, 8)})
    for name, prompt, params in (("a", (0, 1), {}), ("b", (2, 2), {"logprobs": 0})):
        scheduler.add(request(name, prompt, max_tokens=8, **params))
    first, score = TokenScores(5, -1.0, 2, (), ()), TokenScores(3, -0.5, 1, (), ())
    plan = planned(scheduler)
    scheduler.commit(StepResult(plan.step_id, (5, 5), (None, first)))
    plan = planned(scheduler)
    step = scheduler.commit(StepResult(plan.step_id, (6, 1, 3), (None, None, score), num_accepted=(1, 0)))
    assert {delta.request_id: delta.scores for delta in step.deltas}[RequestId("b")] == (score,)


def test_a_step_that_fails_takes_its_drafts_back():
    scheduler = decoding({(0, 1, 5): (6, 7, 8)})
    plan = planned(scheduler)
    scheduler.revert(plan.step_id)
    scheduler.check()
    again = planned(scheduler)
    assert (again.slices[0].start, again.slices[0].token_ids) == (2, (5,)), "the row is set up anew"
    assert land(scheduler, again, 6) == [SeqDelta("a", (6,))]


# Who has drafts, and how many.


def test_beams_have_no_drafts_and_controlled_rows_do():
    scheduler = scheduler_of({})
    scheduler.add(request("a", (0, 1), max_tokens=8, beam=BeamParams(width=2)))
    assert not any(sequence.may_have_drafts for sequence in scheduler._roster.sequences.values())
    scheduler.add(request("b", (0, 1), max_tokens=8, logprobs=1, seed=3, temperature=1.0, frequency_penalty=0.5))
    assert [s.may_have_drafts for s in scheduler._roster.sequences.values() if s.request_id == "b"] == [True]


def test_who_awaits_its_tokens_has_no_drafts():
    scheduler = decoding({(0, 1, 5): (6, 7, 8)})
    scheduler._roster.sequences[SeqId(0)].await_tokens()
    assert planned(scheduler).slices == (SeqSlice(0, 0, 2, 1, (), (2,), 1),)


def test_proposers_forget_who_has_ended():
    scheduler = decoding({})
    scheduler.add(request("b", (3, 3), max_tokens=8))
    scheduler.restart({RequestId("b")})
    scheduler.cancel(RequestId("b"))
    assert scheduler._drafter._proposer.forgotten == [0, 1]
    assert scheduler._drafter._records == {}


def test_drafts_are_as_many_as_are_worth_their_price():
    record = drafting._Record()
    assert record.worth(price=0.0, most=5)[0] == 5
    assert record.worth(price=1.0, most=5) == (0, 0.0)
    for position in range(20):
        record.note((1, 1), position)
        record.learn([1] * position + [1, 1])
    num_worth, num_expected = record.worth(price=0.5, most=8)
    assert num_worth == 8
    assert num_expected > 7
    for position in range(20):
        record.note((1, 1), position)
        record.learn([1] * position + [2])
    assert record.worth(price=0.1, most=8) == (0, 0.0), "wrong again and again"
    for position in range(20):  # guesses are followed although they are not computed
        record.note((1, 1), position)
        record.learn([1] * position + [1, 1])
    assert record.worth(price=0.1, most=8)[0] == 8


@pytest.mark.parametrize(("num_rows", "has_drafts"), [(1, True), (100, False)])
def test_a_step_full_of_tokens_has_no_room_for_guesses(num_rows, has_drafts, monkeypatch):
    scheduler = decoding({(0, 1, 5): (6, 7, 8)})
    drafter: Drafter = scheduler._drafter
    drafter._prices = Prices(base=0.02, token=0.001, row=0.0, key=0.0)
    drafter._num_calls = 1  # no new look at prices
    found = drafter.drafts_for(scheduler._roster.sequences[SeqId(0)], 3, num_rows)
    assert bool(found) == has_drafts


@pytest.mark.parametrize(("base_s", "num_rows", "has_drafts"), [(0.1, 1, True), (0.1, 50, False), (0.002, 1, False)])
def test_what_is_forced_is_drafted_where_steps_are_longer_than_what_that_takes_the_host(base_s, num_rows, has_drafts):
    """Catches a price of tokens alone, by which the steps of a model that is tiny are broken up for what they save."""
    scheduler = scheduler_of({}, proposer=None)
    scheduler.add(request("a", (0, 1), max_tokens=8, allowed_after=lambda said: {1}))
    land(scheduler, planned(scheduler), 1)
    drafter, [sequence] = scheduler._drafter, scheduler._roster.sequences.values()
    drafter._prices, drafter._num_calls = Prices(base=base_s, token=0.0001, row=0.0, key=0.0), 1
    assert drafter.drafts_for(sequence, 3, num_rows) == ((1, 1, 1) if has_drafts else ())


@pytest.mark.parametrize(("num_rows", "waits"), [(1, True), (2, False)])
def test_who_is_alone_waits_for_what_may_be_forced_and_among_others_a_short_run_is_not_worth_it(num_rows, waits):
    scheduler = scheduler_of({}, proposer=None)
    scheduler.add(request("a", (0, 1), max_tokens=3, allowed_after=lambda said: {1}))
    land(scheduler, planned(scheduler), 1)
    drafter, [sequence] = scheduler._drafter, scheduler._roster.sequences.values()
    drafter._prices, drafter._num_calls = Prices(base=0.1, token=0.0001, row=0.0, key=0.0), 1
    sequence.num_computed += 1  # its next token is being computed
    assert drafter.drafts_for(sequence, 2, num_rows) == (None if waits else ())


def test_who_runs_ahead_waits_for_its_tokens_if_drafts_will_make_up_for_it():
    scheduler = scheduler_of({(0, 1): (5, 6, 7)})
    scheduler.add(request("a", (0, 1), max_tokens=8))
    planned(scheduler)
    [sequence] = scheduler._roster.sequences.values()
    scheduler._drafter._prices = PRICE_OF_NOTHING
    scheduler._drafter._num_calls = 1
    assert scheduler._drafter.drafts_for(sequence, 3, 1) is None, "1.4 are expected to be right, and one step is lost"
    scheduler._drafter._records[sequence.id]._wrong = 3.0
    assert scheduler._drafter.drafts_for(sequence, 3, 1) == ()


@pytest.mark.parametrize(("num_rows", "num_rest"), [(1, 1), (8, 4), (1000, 16)])
def test_who_has_no_guess_is_asked_the_less_often_the_more_there_are(num_rows, num_rest):
    """Catches a look at every row of a large batch in every step, which costs more than large batches can win."""
    scheduler = decoding({}, max_tokens=90)
    [sequence] = scheduler._roster.sequences.values()
    assert scheduler._drafter.drafts_for(sequence, 3, num_rows) == ()
    assert sequence.free_until == sequence.num_computed + num_rest
    for _ in range(40):
        scheduler._drafter.drafts_for(sequence, 3, num_rows)
    assert sequence.free_until == sequence.num_computed + max(num_rest, 16), "asked in vain again and again"
    sequence.num_computed = sequence.last_position
    scheduler._drafter.drafts_for(sequence, 3, 1000)
    assert sequence.free_until == sequence.last_position, "what lies behind yields no token"


# Lives.

SEEDS = [range(52), pytest.param(range(52, 200), marks=pytest.mark.thorough)]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_every_answer_with_drafts_is_the_oracles(seeds):
    num_drafts = num_accepted = num_preemptions = num_waits = 0
    for seed in seeds:
        guesser = Guesser()
        loop = run_trace(seed, depth=1 + seed % 4, options={"proposer": guesser})
        statistics = loop.scheduler.statistics()
        num_drafts += statistics.num_drafts
        num_accepted += sum(statistics.num_accepted_by_position)
        num_preemptions += statistics.num_preemptions
        num_waits += statistics.num_drafted_slices
        assert guesser.known == set(), "a proposer keeps nothing of who has ended"
    assert 0.1 * num_drafts < num_accepted < 0.9 * num_drafts
    assert num_preemptions > 50
    assert num_waits > 250


def small_model(**sizes: object) -> DraftModelProposer:
    """Of few rows and blocks, so that sequences are forgotten and computed again."""
    wanted = {"most": 3, "num_blocks": 12, "block_size": 2, "num_rows": 3, "context_len": 40, "max_catch_up": 6}
    return DraftModelProposer(**wanted | sizes, step_seconds=StepSeconds(0.0, 0.0))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_every_answer_with_a_draft_model_is_the_oracles(seeds):
    """With preemption, swapping, prefix hits, forks, failures and cancellations, as `run_trace` has them."""
    num_drafts = num_accepted = num_preemptions = 0
    for seed in seeds:
        block_size = random.Random(seed).choice((1, 2, 4))  # as the trace has it
        proposer = small_model(block_size=block_size, max_catch_up=random.Random(seed).choice((2, 6, 50)))
        loop = run_trace(seed, depth=1 + seed % 4, options={"proposer": proposer})
        statistics = loop.scheduler.statistics()
        num_drafts += statistics.num_drafts
        num_accepted += sum(statistics.num_accepted_by_position)
        num_preemptions += statistics.num_preemptions
        assert proposer._pasts == {}, "a proposer keeps nothing of who has ended"
        assert len(proposer._free_blocks) == 11, "all blocks come back"
    assert num_drafts > 150
    assert 0.1 * num_drafts < num_accepted < num_drafts
    assert num_preemptions > 50


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_catch_up", [6, 100])
def test_a_draft_model_that_is_the_model_is_always_right(depth, max_catch_up):
    """Catches a draft model that has seen another past than its sequence's: it would guess something else."""
    loop = SyncLoop(depth=depth, num_blocks=60, proposer=small_model(num_blocks=60, max_catch_up=max_catch_up))
    for number in range(6):  # more than it has rows
        loop.add(request(f"r{number}", (0, 1, 2, number % 3, 1, 1, 0), 20, arrival_s=float(number)))
    loop.drain()
    loop.compare()
    statistics = loop.scheduler.statistics()
    assert statistics.num_drafts == sum(statistics.num_accepted_by_position) > 20


# A draft model's guesses cost something, and are judged where they were computed.


class Dear(Foreseer):
    """A `Proposer` whose guesses are made on the device, and take a tenth of a second for each of whom they are."""

    most = 3
    foresees = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, seq_id: SeqId, token_ids: Iterable[int], most: int) -> tuple[int, ...]:
        del seq_id
        self.asked.append(len(tuple(token_ids)))
        return (TO_COME,) * most

    def seconds(self, num_tokens: int) -> float:
        return 0.1 * num_tokens

    def forget(self, seq_id: SeqId) -> None:
        """It keeps nothing."""


def dear(base_s: float) -> tuple[Drafter, Dear, Sequence]:
    """A sequence that may have drafts, where a step takes so long."""
    proposer = Dear()
    scheduler = scheduler_of({}, proposer=proposer)
    scheduler.add(request("a", (0, 1), max_tokens=8))
    land(scheduler, planned(scheduler), 5)
    drafter, [sequence] = scheduler._drafter, scheduler._roster.sequences.values()
    drafter._prices, drafter._num_calls = Prices(base=base_s, token=0.0, row=0.0, key=0.0), 1
    proposer.asked.clear()
    return drafter, proposer, sequence


def test_drafts_that_cost_more_than_a_step_are_not_asked_for():
    drafter, proposer, sequence = dear(base_s=0.1)
    assert drafter.drafts_for(sequence, 3, 1) == ()
    assert proposer.asked == []
    drafter, proposer, sequence = dear(base_s=10.0)
    assert drafter.drafts_for(sequence, 3, 1) == (TO_COME,) * 3
    assert drafter.drafts_for(sequence, 2, 1) == (TO_COME,) * 2


def test_a_draft_model_is_judged_by_what_was_verified_and_tried_again_by_and_by():
    drafter, _, sequence = dear(base_s=1.0)
    piece = SeqSlice(sequence.id, sequence.row, 2, 4, (5, *[TO_COME] * 3), (), 4)
    for _ in range(6):
        drafter.verified(piece, 0)
    assert drafter.drafts_for(sequence, 3, 1) == ()
    num_calls = next(number for number in range(1, 200) if drafter.drafts_for(sequence, 3, 1))
    assert 5 < num_calls < 150, "hope comes back, and not at once"
    for _ in range(6):
        drafter.verified(piece, 3)
    assert drafter.drafts_for(sequence, 3, 1) == (TO_COME,) * 3
    assert (drafter.counts.num_slices, drafter.counts.num_drafts) == (12, 36)
    assert drafter.counts.accepted_by_position == [6, 6, 6]


def test_what_a_draft_model_takes_is_no_part_of_what_steps_take():
    """Catches drafts that make steps look dear, so that more of them seem to pay."""
    drafter, _, sequence = dear(base_s=1.0)
    made = StepPlan(0, (SeqSlice(sequence.id, sequence.row, 0, 3, (1, 2, 3)),))
    plan = StepPlan(0, (), drafting=(made, made))
    assert drafter.seconds(plan) == pytest.approx(0.6)
    assert drafter.seconds(StepPlan(0, ())) == 0.0


def test_after_a_step_that_failed_a_draft_model_begins_anew():
    proposer = small_model()
    scheduler = scheduler_of({}, proposer=proposer)
    scheduler.add(request("a", (0, 1), max_tokens=8))
    land(scheduler, planned(scheduler), 5)
    plan = planned(scheduler)
    assert plan.drafting[0].slices[0].token_ids == (0, 1, 5)
    scheduler.revert(plan.step_id)
    assert proposer._pasts == {}
    again = planned(scheduler)
    land(scheduler, again, 6)
    later = planned(scheduler)
    assert later.drafting[0].slices[0].token_ids == (0, 1, 5, 6)


def test_a_step_has_so_many_drafts_and_no_more(monkeypatch):
    """Start-up leaves memory for their logits. Catches a bound for each sequence in place of one for the step."""
    monkeypatch.setattr(planner, "MAX_STEP_DRAFTS", 4)
    scheduler = scheduler_of({(0, 1, 5): (6, 7, 8), (2, 2, 5): (6, 7, 8)}, max_num_batched_tokens=20)
    for name, prompt in (("a", (0, 1)), ("b", (2, 2))):
        scheduler.add(request(name, prompt, max_tokens=8))
    land(scheduler, planned(scheduler), 5, 5)
    assert [piece.num_samples - 1 for piece in planned(scheduler).slices] == [3, 1]
