"""Drafts in the runner: what is accepted, on the host and on the device, and that no token changes because of them."""

import random

import msgspec
import pytest
import torch

from aserve.core.plan import SeqSlice, StepPlan, num_agreeing
from aserve.kernels.ops import NO_TOKEN
from aserve.runner.device import CpuDevice
from aserve.runner.verification import count_accepted, counting_places, newest, upload_drafts
from tests.runner.test_scoring import assert_close, expected
from tests.runner.toy import GREEDY, POISON, VOCAB_SIZE, chunk, continuation, fed, init, toy_runner

pytestmark = pytest.mark.torch

PROMPT = [5, 6, 7, 8, 9, 10]
SAMPLED = msgspec.structs.replace(GREEDY, temperature=1.0, top_p=0.9, seed=3)


@pytest.fixture
def runner():
    runner = toy_runner()
    yield runner
    runner.close()


def drafted(row: int, start: int, known: list[int], draft_ids: list[int]) -> SeqSlice:
    return chunk(row, start, [*known, *draft_ids], num_samples=1 + len(draft_ids))


def test_the_device_finds_what_is_accepted_as_the_rule_says():
    """`num_agreeing` is the rule. Catches samples counted to a neighbour, and drafts accepted behind a wrong one."""
    rng = random.Random(3)
    num_drafted = 0
    for _ in range(200):
        slices, sampled_ids = [], []
        for row in range(rng.randint(1, 5)):
            draft_ids = [rng.randrange(3) for _ in range(rng.randint(0, 4))]
            slices.append(
                drafted(row, 4, [1], draft_ids) if rng.random() < 0.8 else chunk(row, 4, [1, 2], num_samples=0)
            )
            sampled_ids += [rng.choice((NO_TOKEN, 0, 1, 2)) for _ in range(slices[-1].num_samples)]
        drafts = upload_drafts(slices, CpuDevice())
        if drafts is None:
            assert not any(piece.draft_ids for piece in slices)
            continue
        num_drafted += 1
        counting, num_accepted, ends, first = [], [], [], 0
        for piece in slices:
            if piece.num_samples:
                num_accepted.append(num_agreeing(piece.draft_ids, sampled_ids[first : first + piece.num_samples]))
                ends.append(first + num_accepted[-1])
                counting += range(first, ends[-1] + 1)
                first += piece.num_samples
        num_accepted_S = count_accepted(torch.tensor(sampled_ids), drafts)
        assert num_accepted_S.tolist() == num_accepted
        assert counting_places(slices, num_accepted) == counting
        assert newest(torch.tensor(sampled_ids), num_accepted_S, drafts).tolist() == [sampled_ids[n] for n in ends]
        assert drafts.rows_S.tolist() == [piece.row for piece in slices if piece.num_samples]
    assert num_drafted > 100


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_a_step_with_drafts_brings_the_tokens_that_steps_without_bring(runner, sampling, num_right):
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2, 3, 4),), (init(0, sampling=sampling),)))
    runner.run(StepPlan(1, (chunk(1, 0, PROMPT, 5, 6, 7, 8),), (init(1, sampling=sampling),)))
    plain = [runner.run(StepPlan(2 + i, (fed(0, 6 + i),))).token_ids[0] for i in range(6)]
    first = runner.run(StepPlan(8, (chunk(1, 6, [runner_token(sampling, plain, runner)]),))).token_ids
    assert first == (plain[0],)
    draft_ids = [*plain[1 : 1 + num_right], *[(token + 1) % 90 for token in plain[1 + num_right : 4]]]
    result = runner.run(StepPlan(9, (drafted(1, 7, [plain[0]], draft_ids), chunk(2, 0, [1], 9)), (init(2),)))
    assert result.num_accepted == (num_right, 0)
    assert result.token_ids == (*plain[1 : 2 + num_right], *continuation([1], 1))
    after = runner.run(StepPlan(10, (fed(1, 8 + num_right), fed(2, 1))))  # the row's last token is the right one
    assert after.token_ids == (plain[2 + num_right], continuation([1], 2)[1])


def runner_token(sampling, plain, runner) -> int:
    """The token that follows the prompt."""
    result = runner.run(StepPlan(7, (chunk(3, 0, PROMPT, 10, 11),), (init(3, sampling=sampling),)))
    return result.token_ids[0]


def test_the_end_of_a_prompt_may_be_drafted_too(runner):
    right = continuation(PROMPT, 3)
    plan = StepPlan(0, (drafted(0, 0, PROMPT, right[:2]),), (init(0),))
    plan = msgspec.structs.replace(plan, slices=(msgspec.structs.replace(plan.slices[0], new_blocks=(1, 2, 3)),))
    result = runner.run(plan)
    assert (result.token_ids, result.num_accepted) == (tuple(right), (2,))


def test_accepted_tokens_are_scored_and_rejected_ones_are_not(runner):
    scored = msgspec.structs.replace(GREEDY, num_logprobs=2)
    [first, second, third] = continuation(PROMPT, 3)
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2, 3), chunk(1, 0, [1], 4)), (init(0, sampling=scored), init(1))))
    result = runner.run(StepPlan(1, (fed(1, 1), drafted(0, 6, [first], [second, (third + 1) % 90]))))
    assert result.num_accepted == (0, 1)
    none, *scores = result.scores
    assert none is None
    for score, num_known in zip(scores, (1, 2), strict=True):
        known = [*PROMPT, *[first, second][:num_known]]
        assert_close(score, expected(known, [second, third][num_known - 1], 2))


def test_a_row_whose_logits_are_not_finite_fails_and_its_neighbours_do_not(runner):
    [first, second] = continuation([1], 2)
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2, 3), chunk(1, 0, [1], 4)), (init(0), init(1))))
    plan = StepPlan(1, (drafted(0, 6, [POISON], [3]), drafted(1, 1, [first], [second, VOCAB_SIZE - 3])))
    result = runner.run(plan)
    assert result.failed == (plan.slices[0].seq_id,)
    assert result.num_accepted == (0, 1)
    assert result.token_ids[1:] == tuple(continuation([1], 3)[1:])
