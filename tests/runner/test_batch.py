"""BatchBuilder: one mixed plan, every tensor to the digit."""

from typing import Any

import msgspec
import pytest
import torch

from aserve.core import columns
from aserve.core.ids import AdapterId
from aserve.core.plan import RowControls, RowSampling, StepPlan
from aserve.runner.batch import BatchBuilder
from aserve.runner.controls import ControlTable
from aserve.runner.device import CpuDevice
from aserve.runner.rows import RowTable
from tests.runner.toy import chunk, fed, init

pytestmark = pytest.mark.torch

DRAWN = RowSampling(columns.NEUTRAL._replace(temperature=1.0, top_p=0.5, seed=3))


@pytest.fixture
def rows() -> RowTable:
    return RowTable(num_rows=6, max_blocks_per_seq=8, device=torch.device("cpu"))


@pytest.fixture
def builder(rows: RowTable) -> BatchBuilder:
    controls = ControlTable(num_rows=6, vocab_size=97, torch_device=torch.device("cpu"), device=CpuDevice())
    return BatchBuilder(rows, controls, CpuDevice(), block_size=4)


def test_a_mixed_plan(rows: RowTable, builder: BatchBuilder):
    builder.build(StepPlan(0, (chunk(4, 0, [1, 2, 3], 9), chunk(1, 0, [1], 2)), (init(4), init(1, sampling=DRAWN))))
    rows.last_token_R.copy_(torch.arange(50, 56))
    plan = StepPlan(
        1,
        (
            chunk(0, 8, [30, 31, 32, 33, 34], 7, 5, num_samples=0),  # a chunk over a matched prefix of two blocks
            fed(4, 3),
            chunk(2, 0, [20], 6),  # a prompt of one token
            fed(1, 1),
            chunk(3, 0, [40, 41], 8),
        ),
        (init(0, 11, 3), init(2), init(3)),
    )
    batch = builder.build(plan)

    # In the order: rows 4 and 1 fed from the device, row 2 with a token of the host, then the chunks of rows 0 and 3.
    assert batch.token_ids_T.tolist() == [54, 51, 20, 30, 31, 32, 33, 34, 40, 41]
    assert batch.positions_T.tolist() == [3, 1, 0, 8, 9, 10, 11, 12, 0, 1]
    attention = batch.attention
    assert attention.num_decodes == 3
    assert attention.slots_T.tolist() == [39, 9, 24, 28, 29, 30, 31, 20, 32, 33]
    assert attention.slots_T.dtype == torch.int64
    assert attention.block_table_SM.tolist() == [
        [9, 0, 0, 0],
        [2, 0, 0, 0],
        [6, 0, 0, 0],
        [11, 3, 7, 5],
        [8, 0, 0, 0],
    ]
    assert attention.block_table_SM.dtype == torch.int32
    assert attention.seq_lens_S.tolist() == [4, 2, 1, 13, 2]
    assert attention.seq_lens_S.dtype == torch.int32
    assert attention.query_starts_S1.tolist() == [0, 1, 2, 3, 8, 10]
    assert attention.query_starts_S1.dtype == torch.int32
    assert (attention.max_query_len, attention.max_seq_len) == (5, 13)

    # Sampled rows keep the plan's order: rows 4, 2, 1, 3.
    assert batch.sampled_rows_N.tolist() == [4, 2, 1, 3]
    assert batch.sampled_tokens_N.tolist() == [0, 2, 1, 9]
    sampling = batch.sampling
    assert sampling.positions_S.tolist() == [4, 1, 2, 2]
    assert sampling.columns_S.temperature.tolist() == [0, 0, 1, 0]
    assert sampling.columns_S.seed.tolist() == [0, 0, 3, 0]
    assert (sampling.all_greedy, sampling.any_filter, sampling.banned_SC) == (False, True, None)


def test_a_step_that_samples_nothing(builder: BatchBuilder):
    batch = builder.build(StepPlan(0, (chunk(0, 0, [1, 2, 3, 4, 5], 1, 2, num_samples=0),), (init(0),)))
    assert batch.sampled_rows_N.shape == (0,)
    assert batch.attention.num_decodes == 0
    assert (batch.sampling.all_greedy, batch.sampling.any_filter) == (True, False)


def test_banned_ids_reach_the_sampler(builder: BatchBuilder):
    banning = RowSampling(banned_ids=(7,), banned_before=2)
    inits = (init(0), init(1, sampling=banning))
    batch = builder.build(StepPlan(0, (chunk(0, 0, [1], 1), chunk(1, 0, [1], 2)), inits))
    assert batch.sampling.banned_SC is not None
    assert batch.sampling.banned_SC.tolist() == [[-1], [7]]
    batch = builder.build(StepPlan(1, (fed(0, 1), fed(1, 1))))
    assert batch.sampling.banned_SC is None


def test_a_slice_brings_all_of_its_tokens_or_none(builder: BatchBuilder):
    from msgspec.structs import replace

    with pytest.raises(AssertionError):
        builder.build(StepPlan(0, (replace(chunk(0, 0, [1, 2], 1), num_tokens=3),), (init(0),)))


def test_a_row_is_plain_from_the_position_on_where_nothing_is_banned(builder: BatchBuilder):
    plain, banned = chunk(0, 0, [1, 2], 1), chunk(1, 0, [1, 2], 2)
    plan = StepPlan(0, (plain, banned), (init(0), init(1, sampling=RowSampling(banned_ids=(9,), banned_before=5))))
    assert not builder.is_plain(plan)
    builder.build(plan)
    assert builder.is_plain(StepPlan(1, (fed(0, 2),)))
    assert not builder.is_plain(StepPlan(1, (fed(0, 2), fed(1, 3))))
    assert builder.is_plain(StepPlan(1, (fed(0, 2), fed(1, 4))))


@pytest.mark.parametrize(
    "how",
    [
        {"sampling": RowSampling(num_logprobs=0)},
        {"sampling": RowSampling(controls=RowControls())},
        {"sampling": RowSampling(banned_ids=(9,), banned_before=3)},
        {"adapter": AdapterId(0)},
    ],
)
def test_a_row_that_is_set_up_is_plain_by_what_sets_it_up(builder: BatchBuilder, how: dict[str, Any]):
    """Not by what it was before."""
    plain, special = init(0), msgspec.structs.replace(init(0), **how)
    first = chunk(0, 0, [1, 2], 1)
    assert builder.is_plain(StepPlan(0, (first,), (plain,)))
    assert not builder.is_plain(StepPlan(0, (first,), (special,)))
    builder.take_in(StepPlan(0, (), (special,)))
    assert not builder.is_plain(StepPlan(1, (first,)))
    assert builder.is_plain(StepPlan(1, (first,), (plain,)))
