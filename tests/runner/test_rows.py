"""RowTable: what a plan does to the block table and the sampling columns, on exact tensors."""

import numpy as np
import pytest
import torch

from aserve.core import columns
from aserve.core.plan import RowSampling, StepPlan
from aserve.runner.rows import RowTable
from tests.runner.toy import chunk, fed, init

pytestmark = pytest.mark.torch


def run(rows: RowTable, plan: StepPlan) -> None:
    rows.apply(*(torch.from_numpy(change) for change in rows.stage(plan)))


def new_table(num_rows: int = 3, width: int = 4) -> RowTable:
    return RowTable(num_rows, width, torch.device("cpu"))


def test_matched_blocks_come_first_then_new_ones_in_order():
    rows = new_table()
    run(rows, StepPlan(0, (chunk(1, 8, [5, 6], 9), chunk(0, 0, [1], 4)), (init(1, 7, 8), init(0))))
    run(rows, StepPlan(1, (fed(0, 1), fed(1, 10, 3))))
    assert rows.block_table_RM.tolist() == [[4, 0, 0, 0], [7, 8, 9, 3], [0, 0, 0, 0]]


def test_an_init_clears_what_the_row_held_and_no_other_row():
    rows = new_table()
    run(rows, StepPlan(0, (chunk(0, 0, [1], 1, 2, 3), chunk(1, 0, [1], 4, 5)), (init(0), init(1))))
    run(rows, StepPlan(1, (chunk(0, 0, [1], 6),), (init(0),)))
    assert rows.block_table_RM[:2].tolist() == [[6, 0, 0, 0], [4, 5, 0, 0]]


def test_more_blocks_than_a_sequence_can_have_is_an_assertion():
    with pytest.raises(AssertionError, match="row 0 would hold 5 blocks"):
        new_table().stage(StepPlan(0, (chunk(0, 0, [1], 1, 2, 3, 4, 5),), (init(0),)))


def test_sampling_columns_are_those_of_the_asked_rows():
    rows = new_table()
    drawn = RowSampling(columns.NEUTRAL._replace(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**63 - 1))
    run(rows, StepPlan(0, (chunk(2, 0, [1], 1), chunk(0, 0, [1], 2)), (init(2, sampling=drawn), init(0))))
    samplings = rows.samplings(np.array([2, 0]), np.array([1, 1]))
    assert [column.tolist() for column in samplings.columns_N] == [
        [0.5, 0],
        [7, 0],
        [0.25, 1],
        [0.125, 0],
        [2**63 - 1, 0],
    ]
    assert samplings.banned_NC.shape == (2, 0)


def test_ids_are_banned_below_their_position_only_and_forgotten_with_the_row():
    rows = new_table()
    banning = RowSampling(banned_ids=(11, 12), banned_before=6)
    one = RowSampling(banned_ids=(13,), banned_before=9)
    inits = (init(0, sampling=banning), init(1), init(2, sampling=one))
    run(rows, StepPlan(0, (chunk(0, 0, [1], 1),), inits))
    asked = np.array([0, 1, 2])
    assert rows.samplings(asked, np.array([5, 5, 5])).banned_NC.tolist() == [[11, 12], [-1, -1], [13, -1]]
    assert rows.samplings(asked, np.array([6, 6, 6])).banned_NC.tolist() == [[-1], [-1], [13]]
    run(rows, StepPlan(1, (chunk(0, 0, [1], 1),), (init(0), init(2))))
    assert rows.samplings(asked, np.array([1, 1, 1])).banned_NC.size == 0
