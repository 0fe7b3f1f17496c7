"""Roster: who has not ended, by id and by request, and which tokens can be continued."""

import msgspec
import pytest

from aserve.core.errors import InvalidRequestError
from aserve.core.ids import BlockHash, RequestId
from aserve.core.params import BeamParams, SamplingParams
from aserve.kv_cache.table import BlockTable
from aserve.scheduler.queue import first_come_first_served
from aserve.scheduler.roster import Roster
from aserve.scheduler.sequence import Sequence
from tests.scheduler.test_sequence import REQUEST

NAME = REQUEST.id


def roster_with(**params: object) -> tuple[Roster, list[Sequence]]:
    roster = Roster(first_come_first_served)
    request = msgspec.structs.replace(REQUEST, params=SamplingParams(**params))
    return roster, roster.enter(request, 100, lambda: BlockTable(BlockHash(bytes(32))), None)


def test_choices_leave_one_by_one_and_their_tokens_stay():
    """Caught: a request forgotten with its first choice, or kept without any; a choice without its history."""
    roster, [first, second] = roster_with(n=2)
    first.token_ids.append(9)
    roster.leave(first)
    assert (roster.requests, roster.sequences) == ({NAME: [second]}, {second.id: second})
    assert roster.choice(NAME, 0) is None
    assert roster.history(NAME, 0) == (*REQUEST.prompt_token_ids, 9)
    assert roster.history(NAME, 1) == REQUEST.prompt_token_ids
    roster.leave(second)
    assert (roster.requests, roster.sequences, set(roster.histories[NAME])) == ({}, {}, {0, 1})


@pytest.mark.parametrize("params", [{"n": 1, "best_of": 2}, {"beam": BeamParams(width=2)}], ids=str)
def test_what_is_told_at_the_end_alone_cannot_be_continued(params):
    """Caught: a history of a ranked choice or a beam, running or ended."""
    roster, members = roster_with(**params)
    with pytest.raises(InvalidRequestError, match="cannot be forked"):
        roster.history(NAME, 0)
    for sequence in members:
        roster.leave(sequence)
    assert roster.histories == {}


def test_a_name_in_use_and_one_that_nobody_has_are_refused():
    """Caught: two requests of one name; an index beyond the choices taken for the last."""
    roster, _ = roster_with()
    with pytest.raises(InvalidRequestError, match="is in use"):
        roster.check_unused(NAME)
    roster.check_unused(RequestId("other"))
    with pytest.raises(InvalidRequestError, match="no choice 1"):
        roster.history(NAME, 1)


def test_a_restart_keeps_who_is_wanted_and_ends_whom_a_call_tears_twice_at_one_token():
    """Caught: the innocent ended at the first tear, or the guilty kept at the second; a token more is a new try."""
    roster, [sequence] = roster_with()
    assert not roster.restart([NAME], sequence, is_landing=False)
    sequence.token_ids.append(9)
    assert not roster.restart([NAME], sequence, is_landing=False)
    assert roster.restart([NAME], sequence, is_landing=False) == {sequence.id}
    assert (roster.requests, roster.sequences) == ({}, {})


def test_a_restart_forgets_who_is_not_wanted():
    """Caught: histories of requests that nobody waits for any more."""
    roster, [sequence, _] = roster_with(n=2)
    roster.leave(sequence)
    assert len(roster.restart([], None, is_landing=False)) == 1
    assert (roster.requests, roster.sequences, roster.histories) == ({}, {}, {})
