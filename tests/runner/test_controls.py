"""Controlled rows in the runner: the device counts what it samples, and a row that is set up again remembers."""

import msgspec
import pytest
import torch

from aserve.core.columns import PenaltyColumns
from aserve.core.plan import RowControls, StepPlan
from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import controls as kernel_controls
from tests.runner.toy import GREEDY, VOCAB_SIZE, chunk, continuation, fed, hash_of, init, scores, toy_runner

pytestmark = pytest.mark.torch

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def runner():
    runner = toy_runner()
    yield runner
    runner.close()


def greedy(**controls: object):
    return msgspec.structs.replace(GREEDY, controls=RowControls(prompt_ids=tuple(PROMPT), **controls))


def controlled(num_tokens: int, controls: RowControls) -> list[int]:
    """The oracle: ToyLM's greedy answer under controls, one token at a time by the reference."""
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        output = tokens[len(PROMPT) :]
        counts = {i: 2 * output.count(i) + (i in PROMPT) for i in {*PROMPT, *output}}
        bias = dict.fromkeys(range(VOCAB_SIZE), -torch.inf) if controls.allowed_ids else {}
        bias |= dict.fromkeys(controls.allowed_ids, 0.0)
        bias |= {i: bias.get(i, 0.0) + value for i, value in controls.logit_bias}
        logits = scores(torch.tensor([[hash_of(list(enumerate(tokens)))]], dtype=torch.float64))
        batch = kernel_controls(
            [0],
            vocab_size=VOCAB_SIZE,
            bias={0: bias},
            counts={0: counts},
            repetition=[controls.penalties.repetition_penalty],
            presence=[controls.penalties.presence_penalty],
            frequency=[controls.penalties.frequency_penalty],
            words=[(0, word) for word in controls.bad_words],
            recent=[output],
        )
        ReferenceOps().control_logits(logits, batch)
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


PLAIN = continuation(PROMPT, 3)
CONTROLS = {
    "penalties": RowControls(PenaltyColumns(2.0, 1.5, 3.0)),
    "negative penalties": RowControls(PenaltyColumns(-2.0, -2.0, 1.0)),
    "bias": RowControls(logit_bias=((40, 100.0), (PLAIN[0], -100.0))),
    "allowed": RowControls(allowed_ids=(3, 4, 5)),
    "allowed and bias": RowControls(PenaltyColumns(0.0, 0.5, 1.0), ((4, 1.0), (9, 100.0)), (3, 4, 5)),
    "bad words": RowControls(bad_words=((PLAIN[0],), tuple(PLAIN[1:]), (40, 41, 42))),
    "a word among drafts": RowControls(bad_words=(tuple(PLAIN), (40, 41, 42, 43))),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_an_answer_is_the_references_however_its_row_is_set_up(runner, name):
    controls = CONTROLS[name]
    expected = controlled(8, controls)
    assert expected[:3] != PLAIN or "penalties" in name
    sampling = msgspec.structs.replace(GREEDY, controls=msgspec.structs.replace(controls, prompt_ids=tuple(PROMPT)))
    plans = [StepPlan(0, (chunk(2, 0, PROMPT, 1, 2),), (init(2, sampling=sampling),))]
    plans += [StepPlan(i, (fed(2, 5 + i, *((3,) if i == 3 else ())),)) for i in range(1, 5)]
    tokens = [token for plan in plans for token in runner.run(plan).token_ids]
    assert tokens == expected[:5]
    # Preempted and admitted again, in another row, with what it said so far:
    history = msgspec.structs.replace(sampling.controls, output_ids=tuple(expected[:5]))
    again = msgspec.structs.replace(GREEDY, controls=history)
    resumed = StepPlan(9, (chunk(4, 0, [*PROMPT, *expected[:5]], 7, 8, 9),), (init(4, sampling=again),))
    plans = [resumed, StepPlan(10, (fed(4, 11),)), StepPlan(11, (fed(4, 12, 10),))]
    assert [token for plan in plans for token in runner.run(plan).token_ids] == expected[5:]


def test_rows_without_controls_are_as_if_alone(runner):
    sampling = greedy(penalties=PenaltyColumns(0.0, 2.0, 1.0), bad_words=((1, 2),), allowed_ids=(4, 5))
    both = StepPlan(0, (chunk(0, 0, PROMPT, 1, 2), chunk(1, 0, PROMPT, 3, 4)), (init(0), init(1, sampling=sampling)))
    first = runner.run(both).token_ids
    second = runner.run(StepPlan(1, (fed(1, 6), fed(0, 6)))).token_ids
    assert [first[0], second[1]] == PLAIN[:2]
    assert {first[1], second[0]} <= {4, 5}


def test_a_row_that_is_taken_over_is_rid_of_the_controls(runner):
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0, sampling=greedy(allowed_ids=(4,))),)))
    again = StepPlan(1, (chunk(0, 0, PROMPT, 1, 2),), (init(0),))
    assert list(runner.run(again).token_ids) == PLAIN[:1]
    biased = greedy(logit_bias=((7, 100.0),))
    other = StepPlan(2, (chunk(0, 0, PROMPT, 1, 2),), (init(0, sampling=biased),))
    assert list(runner.run(other).token_ids) == [7]


def test_controlled_rows_have_their_ending_tokens_banned_too(runner):
    sampling = msgspec.structs.replace(
        greedy(logit_bias=((PLAIN[0], 50.0), (8, 40.0))), banned_ids=(PLAIN[0],), banned_before=7
    )
    runner.run(StepPlan(0, (chunk(1, 0, [1], 5),), (init(1),)))
    plan = StepPlan(1, (chunk(0, 0, PROMPT, 1, 2), fed(1, 1)), (init(0, sampling=sampling),))
    assert list(runner.run(plan).token_ids) == [8, continuation([1], 2)[1]]
    assert list(runner.run(StepPlan(2, (fed(0, 6),))).token_ids) == [PLAIN[0]]


def test_a_longer_bad_word_than_any_before_is_watched_for(runner):
    expected = controlled(4, RowControls(bad_words=(tuple(PLAIN[:1]),)))
    short, long = greedy(bad_words=((PLAIN[0],),)), greedy(bad_words=(tuple(PLAIN),))
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0, sampling=short),)))
    plans = [
        StepPlan(1, (fed(0, 6), chunk(1, 0, PROMPT, 3, 4)), (init(1, sampling=long),)),
        StepPlan(2, (fed(0, 7), fed(1, 6))),
        StepPlan(3, (fed(0, 8, 5), fed(1, 7))),
    ]
    tokens = [runner.run(plan).token_ids for plan in plans]
    assert [first for first, _ in tokens] == expected[1:]
    assert [second for _, second in tokens] == controlled(3, RowControls(bad_words=(tuple(PLAIN),)))


@pytest.mark.parametrize("num_right", [0, 1, 2, 4])
@pytest.mark.parametrize("name", CONTROLS)
def test_drafts_are_controlled_as_tokens_and_rejected_ones_are_forgotten(runner, name, num_right):
    """Catches controls that look at the history before all drafts, or that keep what was rejected."""
    controls = CONTROLS[name]
    expected, free = controlled(9, controls), continuation(PROMPT, 8)
    sampling = msgspec.structs.replace(GREEDY, controls=msgspec.structs.replace(controls, prompt_ids=tuple(PROMPT)))
    inits = (init(2, sampling=sampling), init(5))
    first = runner.run(StepPlan(0, (chunk(2, 0, PROMPT, 1, 2, 3, 4), chunk(5, 0, PROMPT, 5, 6, 7, 8)), inits))
    assert list(first.token_ids) == [expected[0], free[0]]
    drafts = [*expected[1 : 1 + num_right], *[(token + 1) % 90 for token in expected[1 + num_right : 5]]]
    pieces = (chunk(5, 6, free[:3], num_samples=3), chunk(2, 6, [expected[0], *drafts], num_samples=5))
    result = runner.run(StepPlan(1, pieces))
    assert result.num_accepted == (2, num_right)
    assert list(result.token_ids) == [*free[1:4], *expected[1 : 2 + num_right]]
    start = 7 + num_right
    plans = [StepPlan(2 + i, (fed(2, start + i), fed(5, 9 + i))) for i in range(8 - 1 - num_right)]
    after = [runner.run(plan).token_ids[0] for plan in plans]
    assert after == expected[2 + num_right :], "the row remembers the accepted drafts, and no other"
