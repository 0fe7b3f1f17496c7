"""Scores that come back with a step: whose, of what, and that slices change nothing."""

import msgspec
import pytest
import torch

from aserve.core.columns import NO_PENALTY
from aserve.core.plan import RowControls, StepPlan, TokenScores
from aserve.runner import scoring
from tests.runner.toy import GREEDY, VOCAB_SIZE, chunk, continuation, fed, hash_of, init, scores, toy_runner

pytestmark = pytest.mark.torch

PROMPT = [5, 6, 7, 8, 9, 10]
SCORED = msgspec.structs.replace(GREEDY, num_logprobs=3, num_prompt_logprobs=2)


@pytest.fixture
def runner():
    runner = toy_runner()
    yield runner
    runner.close()


def expected(context: list[int], token_id: int, num_top: int) -> TokenScores:
    logprobs = scores(torch.tensor([[hash_of(list(enumerate(context)))]], dtype=torch.float64))[0].log_softmax(-1)
    order = logprobs.argsort(descending=True, stable=True).tolist()
    return TokenScores(
        token_id,
        float(logprobs[token_id]),
        order.index(token_id) + 1,
        tuple(order[:num_top]),
        tuple(logprobs[order[:num_top]].tolist()),
    )


def assert_close(actual: TokenScores, wanted: TokenScores) -> None:
    assert (actual.token_id, actual.rank, actual.top_ids) == (wanted.token_id, wanted.rank, wanted.top_ids)
    assert actual.logprob == pytest.approx(wanted.logprob, abs=1e-5)
    assert actual.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-5)


def test_each_sampled_row_gets_what_it_asked_for(runner):
    one = msgspec.structs.replace(GREEDY, num_logprobs=0)
    all_ = msgspec.structs.replace(GREEDY, num_logprobs=256)
    first = StepPlan(
        0,
        (chunk(0, 0, PROMPT, 1, 2), chunk(1, 0, [1], 3), chunk(2, 0, [2], 4), chunk(3, 0, [3], 5)),
        (init(0, sampling=SCORED), init(1), init(2, sampling=one), init(3, sampling=all_)),
    )
    result = runner.run(first)
    top3, none, top0, every = result.scores
    assert none is None
    assert_close(top3, expected(PROMPT, result.token_ids[0], 3))
    assert_close(top0, expected([2], result.token_ids[2], 0))
    assert_close(every, expected([3], result.token_ids[3], VOCAB_SIZE))
    second = runner.run(StepPlan(1, (fed(1, 1), fed(0, 6))))
    assert second.scores[0] is None
    assert_close(second.scores[1], expected([*PROMPT, result.token_ids[0]], second.token_ids[1], 3))


def test_tokens_that_a_row_names_are_scored_beside_rows_that_ask_for_the_likeliest(runner):
    """Catches named tokens in another row's place, and padding that is told as if it were asked for."""
    named = [msgspec.structs.replace(GREEDY, num_logprobs=len(ids), named_ids=ids) for ids in ((9, 4, 9), (0,))]
    plan = StepPlan(
        0,
        (chunk(0, 0, PROMPT, 1, 2), chunk(1, 0, [1], 3), chunk(2, 0, [2], 4)),
        (init(0, sampling=named[0]), init(1, sampling=SCORED), init(2, sampling=named[1])),
    )
    result = runner.run(plan)
    first, top3, last = result.scores
    assert_close(top3, expected([1], result.token_ids[1], 3))
    for score, context, ids in ((first, PROMPT, (9, 4, 9)), (last, [2], (0,))):
        assert (score.token_id, score.top_ids) == (result.token_ids[0 if context is PROMPT else 2], ids)
        alone = expected(context, score.token_id, VOCAB_SIZE)
        by_id = dict(zip(alone.top_ids, alone.top_logprobs, strict=True))
        assert score.top_logprobs == pytest.approx([by_id[token_id] for token_id in ids], abs=1e-5)
        assert score.rank == alone.rank


def test_a_step_without_scored_rows_has_no_scores(runner):
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0, sampling=SCORED),)))
    result = runner.run(StepPlan(1, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    assert (result.scores, result.prompt_scores) == ((), ())


def test_scores_are_those_of_the_model_not_of_what_was_done_to_its_logits(runner):
    controls = RowControls(NO_PENALTY._replace(frequency_penalty=1.0), logit_bias=((40, 100.0),))
    columns = GREEDY.columns._replace(temperature=0.7, top_k=1)
    sampling = msgspec.structs.replace(SCORED, columns=columns, controls=controls)
    result = runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0, sampling=sampling),)))
    assert result.token_ids == (40,)
    assert_close(result.scores[0], expected(PROMPT, 40, 3))


@pytest.mark.parametrize("rows_a_slice", [1, 2, 100])
def test_prompts_are_scored_chunk_by_chunk_and_slice_by_slice(runner, monkeypatch, rows_a_slice):
    monkeypatch.setattr(scoring, "SLICE_BYTES", rows_a_slice * scoring.BYTES_PER_LOGIT * VOCAB_SIZE)
    start = msgspec.structs.replace(chunk(0, 0, PROMPT[:4], 1, 2, num_samples=0), target_ids=tuple(PROMPT[1:5]))
    other = msgspec.structs.replace(chunk(2, 0, [9, 8, 7], 5), target_ids=(8, 7))
    plan = StepPlan(0, (start, chunk(1, 0, [1], 3), other), (init(0, sampling=SCORED), init(1), init(2)))
    result = runner.run(plan)
    assert list(result.token_ids) == [*continuation([1], 1), *continuation([9, 8, 7], 1)]
    assert result.scores == ()
    first, second = result.prompt_scores
    for position, score in enumerate(first, start=1):
        assert_close(score, expected(PROMPT[:position], PROMPT[position], 2))
    assert len(first) == 4
    for position, score in enumerate(second, start=1):
        assert_close(score, expected([9, 8, 7][:position], [9, 8, 7][position], 0))
    rest = msgspec.structs.replace(chunk(0, 4, PROMPT[4:]), target_ids=(PROMPT[5],))
    result = runner.run(StepPlan(1, (fed(1, 1), rest)))
    [[last]] = result.prompt_scores
    assert_close(last, expected(PROMPT[:5], PROMPT[5], 2))
    assert result.scores[0] is None
    assert_close(result.scores[1], expected(PROMPT, result.token_ids[1], 3))
