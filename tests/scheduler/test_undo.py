"""Who is to blame, by halves; and how small steps become, and large again."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.ids import RequestId
from aserve.scheduler.undo import CALM_STEPS, Aftermath, Inquest, StepBudget
from tests.scheduler.sync_loop import SyncLoop, request


def names(count: int) -> list[RequestId]:
    return [RequestId(f"r{i}") for i in range(count)]


@given(count=st.integers(1, 300), place=st.integers(0, 299))
def test_one_culprit_is_found_in_few_trials(count, place):
    culprit = names(count)[place % count]
    inquest, num_trials, found = Inquest(names(count)), 0, None
    while found is None:
        num_trials += 1
        if culprit in inquest.trial:
            found = inquest.failed()
        else:
            inquest.landed()
    assert found == culprit
    assert inquest.is_over
    assert num_trials <= ceil(log2(count)) + 2


def test_a_failure_that_does_not_come_back_blames_nobody():
    inquest = Inquest(names(64))
    for _ in range(7):
        inquest.landed()
    assert inquest.is_over


def test_who_fails_alone_by_chance_is_not_blamed():
    inquest = Inquest(names(1))
    assert inquest.failed() is None
    inquest.landed()
    assert inquest.is_over


def test_suspects_who_have_ended_are_none():
    inquest = Inquest(names(4))
    inquest.keep({RequestId("r3")})
    assert list(inquest.trial) == ["r3"]
    inquest.keep(set())
    assert inquest.is_over


def test_a_budget_that_was_cut_grows_back():
    budget = StepBudget(512)
    assert budget.cut(300)
    assert budget.num_tokens == 150
    assert budget.is_cut
    for expected in (300, 512):
        for _ in range(CALM_STEPS):
            budget.landed()
        assert budget.num_tokens == expected
    assert not budget.is_cut


def test_a_budget_that_is_cut_again_has_as_many_calm_steps_before_it():
    budget = StepBudget(512)
    budget.cut(300)
    for _ in range(CALM_STEPS - 1):
        budget.landed()
    budget.cut(150)
    sizes = []
    for _ in range(CALM_STEPS):
        budget.landed()
        sizes.append(budget.num_tokens)
    assert sizes == [75] * (CALM_STEPS - 1) + [150]


def test_a_step_of_one_token_cannot_be_cut():
    budget = StepBudget(512)
    assert not budget.cut(1)
    assert budget.num_tokens == 1


def test_who_runs_out_of_memory_alone_ends_when_a_token_is_too_much():
    aftermath = Aftermath(64)
    sizes, culprit = [], None
    while culprit is None:
        sizes.append(aftermath.budget.num_tokens)
        culprit = aftermath.failed(names(1), sizes[-1], out_of_memory=True)
    assert culprit == "r0"
    assert sizes == [64, 32, 16, 8, 4, 2, 1, 1, 1]


def test_when_memory_runs_out_once_half_a_step_is_tried_with_everybody():
    aftermath = Aftermath(64)
    assert aftermath.failed(names(8), 60, out_of_memory=True) is None
    assert not aftermath.is_inquest
    assert aftermath.budget.num_tokens == 30
    assert aftermath.failed(names(4), 30, out_of_memory=True) is None
    assert aftermath.is_inquest


def test_when_memory_runs_out_again_behind_a_step_that_landed_half_of_it_is_tried_first_again():
    aftermath = Aftermath(64)
    for num_tokens in (60, 30):
        assert aftermath.failed(names(8), num_tokens, out_of_memory=True) is None
        assert not aftermath.is_inquest
        assert aftermath.budget.num_tokens == num_tokens // 2
        aftermath.landed()


@pytest.mark.parametrize("count", [1, 8])
def test_when_everybody_lands_in_smaller_company_steps_stay_small_for_a_while(count):
    aftermath = Aftermath(64)
    aftermath.failed(names(count), 64, out_of_memory=False)
    while aftermath.is_inquest:
        aftermath.landed()
    assert aftermath.budget.num_tokens == 32
    assert aftermath.is_on


def test_when_a_culprit_is_found_steps_stay_as_large_as_they_were():
    """They were not too large: it was the culprit's doing."""
    aftermath = Aftermath(64)
    found = aftermath.failed(names(2), 64, out_of_memory=False)
    while found is None:
        [*trial] = aftermath.trial(set(names(2)))
        if RequestId("r1") in trial:
            found = aftermath.failed(trial, 8, out_of_memory=False)
        else:
            aftermath.landed()
    assert found == "r1"
    assert not aftermath.is_inquest
    assert aftermath.budget.num_tokens == 64


def test_steps_are_planned_behind_one_another_again_once_nobody_is_on_trial():
    """Two share a step that fails: each is tried alone, and when both have landed it was by chance."""
    loop = SyncLoop()
    for name in "ab":
        loop.add(request(name, (0, 1), max_tokens=4))
    loop.plan()
    loop.fail()
    most = []
    for _ in "ab":
        loop.plan()
        assert loop.scheduler.max_in_flight == 1
        loop.commit()
        most.append(loop.scheduler.max_in_flight)
    assert most == [1, 2]
    loop.drain()
    loop.compare()
