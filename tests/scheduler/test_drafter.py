"""What the drafter makes of prices and of guesses that came or did not, and what is counted of steps with drafts."""

import pytest

from aserve.core.ids import SeqId
from aserve.scheduler.step_cost import Prices
from tests.scheduler.sync_loop import request
from tests.scheduler.test_drafting import decoding, land, planned, scheduler_of


@pytest.mark.parametrize(("num_prompt", "num_drafts"), [(2, 0), (40, 2)])
def test_a_draft_pays_where_a_step_reads_many_keys_anyway(num_prompt, num_drafts):
    """A draft costs what a token does: nearly all of a step of two keys, and a third of one of forty."""
    prompt = (0,) * num_prompt
    scheduler = scheduler_of({(*prompt, 5): (6, 7, 8)}, num_blocks=60, max_num_batched_tokens=64)
    scheduler.add(request("a", prompt, max_tokens=8))
    land(scheduler, planned(scheduler), 5)
    drafter, sequence = scheduler._drafter, scheduler._roster.sequences[SeqId(0)]
    drafter._prices, drafter._num_calls = Prices(base=0.0, token=1.0, row=0.0, key=0.05), 1
    assert drafter.drafts_for(sequence, 3, 1) == (6, 7, 8)[:num_drafts]


def test_who_had_a_guess_is_asked_as_often_again():
    """One rests for twice as many positions as the last time, if it was asked in vain; a guess makes good for that."""
    scheduler = decoding({}, max_tokens=90)
    drafter, sequence = scheduler._drafter, scheduler._roster.sequences[SeqId(0)]
    guesses = drafter._proposer._guesses
    for _ in range(4):
        assert drafter.drafts_for(sequence, 3, 1) == ()
    assert sequence.free_until == sequence.num_computed + 8
    guesses[0, 1, 5] = (6, 7, 8)
    assert drafter.drafts_for(sequence, 3, 1) == (6, 7, 8)
    guesses.clear()
    assert drafter.drafts_for(sequence, 3, 1) == ()
    assert sequence.free_until == sequence.num_computed + 1


def test_a_step_is_counted_by_its_tokens_and_not_by_the_drafts_of_the_one_before():
    scheduler = decoding({(0, 1, 5): (6, 7, 8)})
    land(scheduler, planned(scheduler), 9, num_accepted=(0,))
    land(scheduler, planned(scheduler), 3)
    assert scheduler.statistics().num_steps_by_tokens == {2: 1, 4: 1, 1: 1}


def test_drafts_leave_room_where_a_sequence_may_not_fill_a_step():
    scheduler = scheduler_of({(0, 1, 5): (6, 7, 8)}, long_prefill_token_threshold=2)
    scheduler.add(request("a", (0, 1), max_tokens=8))
    land(scheduler, planned(scheduler), 5)
    assert planned(scheduler).slices[0].token_ids == (5, 6)
