"""The soak's judgement: planted faults end poisoned requests and nobody else, and whatever is left is told."""

from itertools import pairwise

import pytest
import soak
import soak_clients
from soak_server import POISON, FaultyRunner

from aserve.core.columns import NEUTRAL
from aserve.core.ids import Row, SeqId
from aserve.core.plan import RowInit, RowSampling, SeqSlice, StepPlan

SOUND = {
    "outcomes": {f"{kind}: {outcomes[0]}": 100 for kind, outcomes in soak.EXPECTED.items()},
    "errors": 100,
    "passing_faults": 50,
    "accepted_drafts": 1000,
    "heap_mib_per_hour": 1.0,
    "left": {"used_blocks": 0, "running": 0, "waiting": 0},
    "grown": {"threads": 1, "descriptors": 0, "tasks": -3},
    "exit_code": 0,
}


def found(**changed):
    """What is complained of where a sound result is changed so."""
    outcomes = {**SOUND["outcomes"], **changed.pop("outcomes", {})}
    return soak.complaints({**SOUND, "outcomes": outcomes, **changed}, 8.0)


def test_nothing_is_complained_of_in_a_sound_result():
    assert found() == []
    assert found(outcomes={"bad: 413": 7}) == []


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        ("answer: engine_error", "1 of kind answer came to engine_error"),
        ("stream: internal_error", "1 of kind stream came to internal_error"),
        ("cut: engine_error", "1 of kind cut came to engine_error"),
        ("tools: DIFFERENT", "1 of kind tools came to DIFFERENT"),
        ("stream: truncated", "1 of kind stream came to truncated"),
        ("adapter: ReadTimeout", "1 of kind adapter came to ReadTimeout"),
        ("bad: 500", "1 of kind bad came to 500"),
        ("poisoned: as ever", "1 of kind poisoned came to as ever"),
    ],
)
def test_an_end_that_no_planted_fault_explains_is_complained_of(outcome, complaint):
    """Catches a judgement that lets an error of the server's pass because steps were made to fail."""
    assert found(outcomes={outcome: 1}) == [complaint]


def test_errors_of_those_who_do_not_listen_are_complained_of():
    """Catches an innocent stream that ends by an error after its client has cut it, or reads nothing of it."""
    assert found(errors=101) == ["101 requests ended by an error, and 100 were poisoned"]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"left": {"used_blocks": 2, "running": 0, "waiting": 0}}, "left: 2 used_blocks"),
        ({"grown": {"threads": 0, "descriptors": 1, "tasks": 0}}, "grown: descriptors by 1"),
        ({"grown": {"threads": 0, "descriptors": 0, "tasks": 4}}, "grown: tasks by 4"),
        ({"heap_mib_per_hour": 8.1}, "what malloc has handed out grows by 8.1 MiB an hour"),
        ({"exit_code": 70}, "the server ended with 70"),
        ({"passing_faults": 0}, "no passing_faults"),
        ({"accepted_drafts": 0}, "no accepted_drafts"),
    ],
)
def test_what_is_left_or_never_was_is_complained_of(changed, complaint):
    assert found(**changed) == [complaint]


def test_a_kind_that_was_never_answered_is_complained_of():
    outcomes = {name: count for name, count in SOUND["outcomes"].items() if not name.startswith("structured")}
    assert soak.complaints(SOUND | {"outcomes": outcomes}, 8.0) == ["none of kind structured came to as ever"]


def test_the_slope_of_samples_that_grow_by_a_mib_in_ten_minutes():
    samples = [{"at_s": 60.0 * minute, "heap_kib": 1000 + 102.4 * minute} for minute in range(30)]
    assert soak.slope_mib_per_hour(samples, "heap_kib") == pytest.approx(6.0)


class Launched:
    """A runner that can be launched, and nothing else."""

    def launch(self, plan):
        return plan.step_id

    recover = close = None


def launch(runner, step_id, *slices, inits=()):
    """Whether a step was launched, and not made to fail."""
    try:
        return runner.launch(StepPlan(step_id=step_id, inits=inits, slices=slices)) == step_id
    except RuntimeError:
        return False


def test_passing_faults_are_never_two_in_a_row():
    """Catches faults that end whoever runs alone, which is what a request is blamed for."""
    runner = FaultyRunner(Launched(), 2)
    lands = [launch(runner, step_id) for step_id in range(1000)]
    assert runner.num_passing == lands.count(False) > 200
    assert all(a or b for a, b in pairwise(lands))


def test_poison_fails_the_launches_that_compute_it():
    """Catches poison that spreads to neighbours, or to those who have a row afterwards."""
    runner = FaultyRunner(Launched(), 10**9)
    poisoned = RowInit(Row(3), SeqId(1), RowSampling(NEUTRAL._replace(seed=POISON + 20)))
    prompt = SeqSlice(SeqId(1), Row(3), 0, 20, tuple(range(20)), num_samples=1)
    answer = SeqSlice(SeqId(1), Row(3), 20, 1, num_samples=1)
    neighbour = SeqSlice(SeqId(2), Row(4), 20, 1, num_samples=1)
    assert launch(runner, 0, prompt, neighbour, inits=(poisoned,))
    assert not launch(runner, 1, answer, neighbour)
    assert launch(runner, 2, neighbour)
    assert not launch(runner, 3, answer)
    later = SeqSlice(SeqId(5), Row(3), 20, 1, num_samples=1)
    assert launch(runner, 4, later, inits=(RowInit(Row(3), SeqId(5), RowSampling()),))
    assert (runner.num_poisoned, runner.num_passing) == (2, 0)


def test_an_answer_in_pieces_says_what_a_whole_one_says():
    """Catches a comparison that takes a stream for another answer, or two answers for one."""
    whole = {"content": None, "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
    parts = {"content": "", "tool_calls": []}
    for function in ({"name": "f", "arguments": ""}, {"arguments": '{"a"'}, {"arguments": ": 1}"}):
        soak_clients._add(parts, {"tool_calls": [{"index": 0, "function": function}]})
    assert soak_clients._said(parts) == soak_clients._said(whole)
    assert soak_clients._said(parts) != soak_clients._said({"content": "a"})
