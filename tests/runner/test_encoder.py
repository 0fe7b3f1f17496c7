"""EncoderRunner: chunks wait for their prompt's last one; a step that fails takes those behind it along."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.errors import InsufficientMemoryError
from aserve.core.ids import Row, SeqId
from aserve.core.plan import RowInit, RowSampling, SeqSlice, StepPlan, StepResult
from aserve.runner.encoder import FREE_PADDING, PADDING_SHARE, EncoderRunner, batches
from aserve.runner.failures import SkippedStepError


class SumEncoder:
    """Makes the sum of a sequence's tokens, and where its second text begins.

    Of a sum of 13 an error, and of 7 no number.
    """

    device = torch.device("cpu")
    pads = True

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []

    def __call__(self, sequences: list[tuple[list[int], int | None]]) -> torch.Tensor:
        self.batches.append([tuple(tokens) for tokens, _ in sequences])
        sums = [float(sum(tokens)) for tokens, _ in sequences]
        if 13.0 in sums:
            raise RuntimeError("out of memory")
        marks = [-1.0 if second_at is None else second_at for _, second_at in sequences]
        totals = [float("nan") if total == 7.0 else total for total in sums]
        return torch.tensor(list(zip(totals, marks, strict=True)))


@pytest.fixture
def encoder() -> SumEncoder:
    return SumEncoder()


@pytest.fixture
def runner(encoder: SumEncoder):
    runner = EncoderRunner(encoder)  # type: ignore[arg-type]  # all that is asked of it
    yield runner
    runner.close()


def init(row: int, second_at: int | None = None) -> RowInit:
    return RowInit(Row(row), SeqId(row), RowSampling(), second_at=second_at)


def piece(row: int, start: int, *token_ids: int, ends: bool = True) -> SeqSlice:
    return SeqSlice(SeqId(row), Row(row), start, len(token_ids), token_ids, num_samples=int(ends))


def vectors(result: StepResult) -> list[list[float]]:
    return [vector.tolist() for vector in result.vectors]


async def test_a_prompt_is_computed_when_its_last_chunk_comes(runner: EncoderRunner, encoder: SumEncoder):
    first = StepPlan(0, (piece(0, 0, 1, 2, ends=False), piece(1, 0, 5)), (init(0, second_at=2), init(1)))
    second = StepPlan(1, (piece(0, 2, 3),))
    flights = [runner.launch(first), runner.launch(second)]
    assert vectors(await flights[0].land()) == [[5.0, -1.0]]
    assert vectors(await flights[1].land()) == [[6.0, 2.0]]
    assert encoder.batches == [[(5,)], [(1, 2, 3)]]


async def test_a_row_that_is_set_up_anew_has_forgotten_what_it_had(runner: EncoderRunner):
    await runner.launch(StepPlan(0, (piece(0, 0, 1, 2, ends=False),), (init(0),))).land()
    result = await runner.launch(StepPlan(1, (piece(0, 0, 4),), (init(0),))).land()
    assert vectors(result) == [[4.0, -1.0]]


async def test_vectors_are_in_the_plans_order_whatever_their_lengths(runner: EncoderRunner):
    slices = tuple(piece(row, 0, *([row + 20] * (1 + 37 * row % 90))) for row in range(8))
    result = await runner.launch(StepPlan(0, slices, tuple(init(row) for row in range(8)))).land()
    assert [vector[0] for vector in vectors(result)] == [sum(each.token_ids) for each in slices]


async def test_what_is_not_finite_fails_alone(runner: EncoderRunner):
    result = await runner.launch(StepPlan(0, (piece(0, 0, 7), piece(1, 0, 8)), (init(0), init(1)))).land()
    assert result.failed == (SeqId(0),)
    assert vectors(result)[1] == [8.0, -1.0]


async def test_steps_behind_one_that_failed_are_not_computed_until_it_recovers(runner: EncoderRunner):
    flights = [runner.launch(StepPlan(step, (piece(0, 0, 13 - step),), (init(0),))) for step in range(2)]
    with pytest.raises(InsufficientMemoryError):
        await flights[0].land()
    with pytest.raises(SkippedStepError):
        await flights[1].land()
    await runner.recover().land()
    assert vectors(await runner.launch(StepPlan(2, (piece(0, 0, 5),), (init(0),))).land()) == [[5.0, -1.0]]


@given(st.lists(st.integers(1, 600), min_size=1, max_size=60))
def test_batches_have_everybody_once_and_little_padding(lens: list[int]):
    """More padding is more to compute; less room for it is a forward pass for each."""
    found = list(batches(lens, 512))
    assert sorted(place for places in found for place in places) == list(range(len(lens)))
    for places in found:
        num_tokens = sum(lens[place] for place in places)
        num_padded = max(lens[place] for place in places) * len(places)
        assert num_padded <= 512 or len(places) == 1
        assert num_padded - num_tokens <= FREE_PADDING + num_tokens // PADDING_SHARE


def test_where_nothing_is_padded_a_batch_is_full_whatever_the_lengths():
    lens = [1, 700, 300, 24, 2000]
    assert list(batches(lens, 1024, pads=False)) == [[4], [1, 2, 3], [0]]
    assert list(batches(lens, 1024)) == [[4], [1], [2], [3, 0]]
