"""Drafts in the runner: what is accepted, on the host and on the device, and that no token changes because of them."""

import random

import msgspec
import pytest
import torch

from aserve.core import columns
from aserve.core.ids import Row, SeqId
from aserve.core.plan import TO_COME, RowInit, RowSampling, SeqSlice, StepPlan, num_agreeing
from aserve.kernels.cpu import CpuOps
from aserve.kernels.ops import NO_TOKEN
from aserve.runner.device import CpuDevice
from aserve.runner.draft_model import DraftModel
from aserve.runner.kv_store import allocate_kv
from aserve.runner.verification import count_accepted, counting_places, newest, upload_drafts
from tests.runner.test_scoring import assert_close, expected
from tests.runner.toy import GREEDY, POISON, VOCAB_SIZE, ToyLM, chunk, continuation, fed, init, toy_runner

pytestmark = pytest.mark.torch

PROMPT = [5, 6, 7, 8, 9, 10]
SAMPLED = RowSampling(columns.NEUTRAL._replace(temperature=1.0, top_p=0.9, seed=3))


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


def drafting_runner():
    """A toy runner whose draft model is the toy too, in a cache of its own."""
    runner = toy_runner()
    kv = allocate_kv(ToyLM.spec, num_blocks=16, block_size=2, dtype=torch.float32, device=torch.device("cpu"))
    runner.draft_with(lambda device: DraftModel(ToyLM(), CpuOps(), kv, device, num_rows=4, max_model_len=64, most=4))
    return runner


def test_a_draft_model_goes_on_from_what_it_has_caught_up_with():
    """Rows, blocks and lengths of the two models differ. Catches drafts that are another row's, or another step's."""
    runner = drafting_runner()
    right, other = continuation(PROMPT, 9), continuation([1], 9)
    inits = (init(2), init(5), init(6))
    chunks = (chunk(2, 0, PROMPT, 1, 2, 3, 4), chunk(5, 0, [1], 5, 6, 7), chunk(6, 0, [2], 8, 9))
    assert runner.run(StepPlan(0, chunks, inits)).token_ids[:2] == (right[0], other[0])
    # Row 2 is row 0 of the draft model, and has three drafts; row 5 is row 3, and has one.
    first = (own(105, 3, 0, [1, other[0]], 1), own(102, 0, 0, [*PROMPT, right[0]], 3, 4, 5, 6, 7))
    drafting = (
        StepPlan(1, first, (RowInit(Row(3), SeqId(105), GREEDY), RowInit(Row(0), SeqId(102), GREEDY))),
        StepPlan(1, (own_fed(102, 0, 7),)),
        StepPlan(1, (own_fed(102, 0, 8),)),
    )
    slices = (
        chunk(2, 6, [right[0], *[TO_COME] * 3], num_samples=4),
        chunk(6, 1, [continuation([2], 1)[0], 3], num_samples=2),
        chunk(5, 1, [other[0], TO_COME], num_samples=2),
    )
    result = runner.run(StepPlan(1, slices, drafting=drafting))
    assert result.num_accepted == (3, 0, 1)
    assert result.token_ids == (*right[1:5], continuation([2], 2)[1], *other[1:3])
    # Both go on: what the draft model computed with tokens that were known is there still.
    again = (own(102, 0, 7, right[1:5]), own(105, 3, 2, other[1:3], 8, 9))
    drafting = (StepPlan(2, again), StepPlan(2, (own_fed(102, 0, 11), own_fed(105, 3, 4))))
    slices = tuple(
        chunk(row, start, [known, *[TO_COME] * 2], num_samples=3)
        for row, start, known in ((2, 10, right[4]), (5, 3, other[2]))
    )
    result = runner.run(StepPlan(2, slices, drafting=drafting))
    runner.close()
    assert result.num_accepted == (2, 2)
    assert result.token_ids == (*right[5:8], *other[3:6])


def own(seq_id: int, row: int, start: int, tokens: list[int], *blocks: int) -> SeqSlice:
    """Of the draft model, in rows and blocks of its own."""
    return msgspec.structs.replace(chunk(row, start, tokens, *blocks), seq_id=SeqId(seq_id))


def own_fed(seq_id: int, row: int, start: int) -> SeqSlice:
    return msgspec.structs.replace(fed(row, start), seq_id=SeqId(seq_id))


def test_a_step_of_one_row_whose_draft_model_is_not_finite_is_as_without_drafts():
    runner = drafting_runner()
    right = continuation(PROMPT, 3)
    runner.run(StepPlan(0, (chunk(2, 0, PROMPT, 1, 2, 3, 4),), (init(2),)))
    drafting = (StepPlan(1, (own(102, 0, 0, [POISON], 1),), (RowInit(Row(0), SeqId(102), GREEDY),)),)
    result = runner.run(StepPlan(1, (chunk(2, 6, [right[0], TO_COME], num_samples=2),), drafting=drafting))
    runner.close()
    assert result.failed == ()
    assert result.token_ids == (right[1],)
