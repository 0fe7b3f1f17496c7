"""The table of legal moves."""

import itertools

import pytest

from aserve.scheduler.states import LEGAL, State, move

FORBIDDEN = [(a, b) for a, b in itertools.product(State, State) if b not in LEGAL[a]]


def test_every_state_has_its_row():
    assert set(LEGAL) == set(State)
    assert FORBIDDEN == [
        (State.WAITING, State.WAITING),
        (State.WAITING, State.SWAPPED),
        (State.RUNNING, State.RUNNING),
        (State.SWAPPED, State.SWAPPED),
        (State.FINISHED, State.WAITING),
        (State.FINISHED, State.RUNNING),
        (State.FINISHED, State.SWAPPED),
        (State.FINISHED, State.FINISHED),
    ]


@pytest.mark.parametrize(("current", "target"), FORBIDDEN)
def test_what_is_not_in_the_table_is_our_own_bug(current, target):
    with pytest.raises(AssertionError, match=f"I19: no move from {current.value} to {target.value}"):
        move(current, target)


def test_a_legal_move_arrives():
    assert move(State.WAITING, State.RUNNING) is State.RUNNING
