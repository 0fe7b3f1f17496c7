"""Masked rows: their tokens are allowed ones, other rows notice nothing, and what goes wrong is found out."""

import asyncio
import threading
from collections.abc import Iterable, Sequence

import msgspec
import pytest
import torch

from aserve.core.plan import RowControls, RowInit, StepPlan
from aserve.runner.device import CpuDevice
from aserve.runner.masks import num_mask_bytes
from tests.runner.toy import GREEDY, POISON, VOCAB_SIZE, chunk, continuation, fed, hash_of, init, scores, toy_runner

pytestmark = pytest.mark.torch

PROMPT = [5, 6, 7, 8, 9]
PLAIN = continuation(PROMPT, 4)


class Script:
    """Masks of these tokens, one step after the other; the last for all that follow.

    told: the tokens of the row. made_by: the thread that asked. drafts: behind which masks were asked for.
    """

    def __init__(self, *allowed: Iterable[int]) -> None:
        self.allowed = [list(token_ids) for token_ids in allowed]
        self.told: list[int] = []
        self.made_by: set[str] = set()
        self.drafts: list[tuple[int, ...]] = []

    def advance(self, token_ids: Sequence[int]) -> None:
        self.made_by.add(threading.current_thread().name)
        self.told.extend(token_ids)

    def masks(self, draft_ids: Sequence[int]) -> bytes:
        self.made_by.add(threading.current_thread().name)
        self.drafts.append(tuple(draft_ids))
        places = range(len(self.told), len(self.told) + len(draft_ids) + 1)
        return b"".join(bytes_of(self.allowed[min(place, len(self.allowed) - 1)]) for place in places)


class Broken(Script):
    """A mask that cannot be made."""

    def masks(self, draft_ids: Sequence[int]) -> bytes:
        raise ValueError("no mask")


def masked(row: int, mask: Script, **changes: object) -> RowInit:
    return msgspec.structs.replace(init(row, **changes), mask=mask)


def bytes_of(token_ids: Iterable[int]) -> bytes:
    return sum(1 << token_id for token_id in token_ids).to_bytes(num_mask_bytes(VOCAB_SIZE), "little")


def likeliest(context: list[int], allowed: Iterable[int]) -> int:
    """What ToyLM says of these tokens alone."""
    [logits_V] = scores(torch.tensor([[hash_of(list(enumerate(context)))]], dtype=torch.float64))
    return max(allowed, key=lambda token_id: logits_V[token_id].item())


class Beside(CpuDevice):
    """A device beside whose steps the host is free."""

    is_host = False


@pytest.fixture(params=[CpuDevice, Beside], ids=["host", "beside"])
def runner(request):
    runner = toy_runner(device=request.param())
    yield runner
    runner.close()


def test_a_masked_rows_tokens_are_the_likeliest_that_are_allowed(runner):
    """Step by step, with another mask each: a mask that lagged a step, or stayed, would show."""
    allowed = [[3, 40, 41], [1, 64, 90], [2, 31, 32], [0, 63]]
    context, mask = list(PROMPT), Script(*allowed)
    pieces = [chunk(0, 0, PROMPT, 1, 2), fed(0, 5), fed(0, 6), fed(0, 7)]
    for step_id, (piece, ids) in enumerate(zip(pieces, allowed, strict=True)):
        plan = StepPlan(step_id, (piece,), (masked(0, mask),) if step_id == 0 else ())
        expected = likeliest(context, ids)
        assert runner.run(plan).token_ids == (expected,)
        context.append(expected)
    assert mask.told == context[len(PROMPT) :][: len(mask.told)]
    is_beside = isinstance(runner._device, Beside)
    assert {name.rsplit("_")[0] for name in mask.made_by} == {"aserve-masks" if is_beside else "aserve-runner"}


async def test_masked_rows_are_launched_ahead_of_their_tokens(runner):
    """All four at once: each mask is asked for when the token before it is known, and not earlier."""
    allowed = [[3, 40, 41], [1, 64, 90], [2, 31, 32], [0, 63]]
    mask = Script(*allowed)
    first = StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (masked(0, mask),))
    flights = [runner.launch(first)] + [runner.launch(StepPlan(k, (fed(0, 4 + k),))) for k in (1, 2, 3)]
    context = list(PROMPT)
    for flight, ids in zip(flights, allowed, strict=True):
        expected = likeliest(context, ids)
        assert (await flight.land()).token_ids == (expected,)
        context.append(expected)


def test_drafts_are_masked_one_by_one_and_leave_nothing_behind(runner):
    """The second draft is wrong: what was masked behind it is forgotten, and the row goes on with the right mask."""
    allowed = [[3, 40, 41], [1, 64, 90], [2, 31, 32], [0, 63]]
    context, mask = list(PROMPT), Script(*allowed)
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2, 3),), (masked(0, mask),)))
    for ids in allowed:
        context.append(likeliest(context, ids))
    right, wrong = context[6], 7
    plan = StepPlan(1, (chunk(0, 5, [context[5], right, wrong], num_samples=3), chunk(1, 0, [1], 9)), (init(1),))
    result = runner.run(plan)
    assert (result.token_ids, result.num_accepted) == ((*context[6:8], *continuation([1], 1)), (1, 0))
    assert runner.run(StepPlan(2, (fed(0, 7),))).token_ids == (context[8],)
    assert mask.told[:3] == context[5:8]
    assert mask.drafts == [(), (right, wrong), ()]


def test_a_row_that_another_takes_is_masked_no_more(runner):
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (masked(0, Script([3])),)))
    assert runner.run(StepPlan(1, (chunk(0, 0, PROMPT, 3, 4),), (init(0),))).token_ids == (PLAIN[0],)


def test_other_rows_of_the_step_are_as_if_alone(runner):
    """The unmasked row comes first and last in turn, so that a mask in another's place is seen."""
    mask = Script([3, 4], [7], range(VOCAB_SIZE))
    both = StepPlan(0, (chunk(0, 0, PROMPT, 1, 2), chunk(1, 0, PROMPT, 3, 4)), (init(0), masked(1, mask)))
    first = runner.run(both).token_ids
    second = runner.run(StepPlan(1, (fed(1, 5), fed(0, 5)))).token_ids
    third = runner.run(StepPlan(2, (fed(1, 6), fed(0, 6)))).token_ids
    assert [first[0], second[1], third[1]] == PLAIN[:3]
    assert first[1] == likeliest(PROMPT, [3, 4])
    assert second[0] == 7
    assert third[0] == likeliest([*PROMPT, first[1], 7], range(VOCAB_SIZE))


def test_a_row_that_the_mask_leaves_nothing_fails_alone(runner):
    mask = Script([])
    both = StepPlan(0, (chunk(0, 0, PROMPT, 1, 2), chunk(1, 0, PROMPT, 3, 4)), (init(0), masked(1, mask)))
    result = runner.run(both)
    assert result.failed == (101,)
    assert result.token_ids[0] == PLAIN[0]
    runner.run(StepPlan(1, (fed(0, 5), fed(1, 5))))  # was launched ahead, perhaps
    assert mask.told == [], "what is no token is not told"


def test_what_is_not_finite_is_found_behind_a_mask(runner):
    plan = StepPlan(0, (chunk(0, 0, [1, POISON], 1),), (masked(0, Script([3])),))
    assert runner.run(plan).failed == (100,)


def test_bans_work_on_what_the_mask_leaves_and_scores_are_the_models(runner):
    sampling = msgspec.structs.replace(
        GREEDY, controls=RowControls(logit_bias=((8, 100.0), (9, 50.0))), num_logprobs=0, banned_ids=(9,)
    )
    sampling = msgspec.structs.replace(sampling, banned_before=6)
    plan = StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (masked(0, Script([9, 10], [9]), sampling=sampling),))
    result = runner.run(plan)
    assert result.token_ids == (10,)  # 8 is masked, 9 is banned
    [score] = result.scores
    [logits_V] = scores(torch.tensor([[hash_of(list(enumerate(PROMPT)))]], dtype=torch.float64))
    assert score is not None
    assert score.logprob == pytest.approx(logits_V.log_softmax(0)[10].item(), abs=1e-5)
    again = StepPlan(1, (fed(0, 5),))  # nothing is banned from position 6 on
    assert runner.run(again).token_ids == (9,)


async def test_a_mask_that_cannot_be_made_fails_its_step(runner):
    flight = runner.launch(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (masked(0, Broken([])),)))
    with pytest.raises(ValueError, match="no mask"):
        await asyncio.wait_for(flight.land(), 60)
    await runner.recover().land()
    assert runner.run(StepPlan(1, (chunk(0, 0, PROMPT, 1, 2),), (init(0),))).token_ids == (PLAIN[0],)


def test_a_runner_without_masks_has_no_thread_for_them():
    runner = toy_runner(device=Beside())
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("aserve-masks") for name in names)
    runner.run(StepPlan(1, (chunk(0, 0, PROMPT, 1, 2),), (masked(0, Script([3])),)))
    runner.close()
    assert not any(thread.name.startswith("aserve-masks") for thread in threading.enumerate())
