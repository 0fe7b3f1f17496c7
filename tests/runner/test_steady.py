"""SteadyBuilder against BatchBuilder, its twin: the same batches for any plans, most of them moved on."""

import random
from dataclasses import fields, is_dataclass

import pytest
import torch

from aserve.core import columns
from aserve.core.plan import RowControls, RowSampling, StepPlan
from aserve.kernels.ops import SamplingBatch
from aserve.runner.batch import BatchBuilder, StepBatch
from aserve.runner.controls import ControlTable
from aserve.runner.device import CpuDevice
from aserve.runner.rows import RowTable
from aserve.runner.steady import SteadyBuilder
from aserve.runner.verification import MadeDrafts
from tests.runner.toy import GREEDY, chunk, fed, init

pytestmark = pytest.mark.torch

NUM_ROWS = 5
SAMPLINGS = (
    GREEDY,
    GREEDY,
    RowSampling(columns.NEUTRAL._replace(temperature=1.0, top_p=0.5, seed=3)),
    RowSampling(banned_ids=(7,), banned_before=4),
    RowSampling(
        columns.NEUTRAL._replace(temperature=0.5),
        controls=RowControls(columns.NO_PENALTY._replace(presence_penalty=1.0)),
    ),
    RowSampling(columns.NEUTRAL._replace(temperature=0.5), num_logprobs=2),
)


class CountingBuilder(BatchBuilder):
    """Counts what it builds from nothing."""

    num_built = 0

    def build(self, plan: StepPlan, made: MadeDrafts | None = None) -> StepBatch | None:
        self.num_built += 1
        return super().build(plan, made)


def make_builder(num_groups: int) -> tuple[CountingBuilder, RowTable]:
    device, cpu = CpuDevice(), torch.device("cpu")
    rows = RowTable(NUM_ROWS, 64 * num_groups, cpu)
    rows.last_token_R.copy_(torch.arange(50, 50 + NUM_ROWS))
    controls = ControlTable(NUM_ROWS, vocab_size=97, torch_device=cpu, device=device)
    return CountingBuilder(rows, controls, device, block_size=4, num_groups=num_groups), rows


def plain(value: object) -> object:
    """Tensors as lists, dataclasses as dicts."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.tolist())
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def random_plans(rng: random.Random, num_groups: int) -> list[StepPlan]:
    """Sequences that join with a prompt, decode together, change their order, pause and leave."""
    plans: list[StepPlan] = []
    lens: dict[int, int] = {}
    blocks = iter(range(1, 10**6))

    def more_blocks(old_len: int, new_len: int) -> list[int]:
        return [next(blocks) for _ in range((-(-new_len // 4) - -(-old_len // 4)) * num_groups)]

    for step_id in range(60):
        slices, inits = [], []
        order = list(lens)
        if rng.random() < 0.1:
            rng.shuffle(order)
        for row in order:
            if rng.random() < 0.02:
                del lens[row]
            elif rng.random() < 0.98:
                slices.append(fed(row, lens[row], *more_blocks(lens[row], lens[row] + 1)))
                lens[row] += 1
        free = [row for row in range(NUM_ROWS) if row not in lens]
        if free and rng.random() < 0.15:
            row, num_tokens = rng.choice(free), rng.randint(1, 6)
            inits.append(init(row, sampling=rng.choice(SAMPLINGS)))
            slices.append(chunk(row, 0, list(range(num_tokens)), *more_blocks(0, num_tokens)))
            lens[row] = num_tokens
        if slices:
            plans.append(StepPlan(step_id, tuple(slices), tuple(inits)))
    return plans


@pytest.mark.parametrize("num_groups", [1, 2])
def test_batches_are_those_that_are_built_from_nothing(num_groups):
    num_moved_on = 0
    for seed in range(20):
        plans = random_plans(random.Random(seed), num_groups)
        (twin, _), (inner, rows) = make_builder(num_groups), make_builder(num_groups)
        steady = SteadyBuilder(inner, rows)
        for plan in plans:
            assert plain(steady.build(plan)) == plain(twin.build(plan))
        num_moved_on += len(plans) - inner.num_built
    assert num_moved_on > 200


def test_a_step_that_is_tried_again_is_built_again():
    inner, rows = make_builder(1)
    steady = SteadyBuilder(inner, rows)
    steady.build(StepPlan(0, (chunk(0, 0, [1, 2], 1),), (init(0),)))
    steady.build(StepPlan(1, (fed(0, 2),)))
    moved = steady.build(StepPlan(2, (fed(0, 3),)))
    again = steady.build(StepPlan(2, (fed(0, 3),)))
    assert plain(moved) == plain(again)
    assert isinstance(again.sampling, SamplingBatch)
    assert inner.num_built == 3
