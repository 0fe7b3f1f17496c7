"""A sampling column more is carried from a request's parameters to the kernels by its entry in the table alone."""

from collections import namedtuple

import msgspec
import pytest
import torch
from torch import Tensor

from aserve.core.columns import NEUTRAL, PENALTIES, SAMPLING, Column, PenaltyColumns, SamplingColumns
from aserve.core.params import SamplingParams
from aserve.core.plan import RowInit, RowSampling, StepPlan
from aserve.kernels.ops import SamplingBatch
from aserve.runner import batch as batch_module
from aserve.runner import graphs as graphs_module
from aserve.runner import mixed_graphs
from aserve.runner import rows as rows_module
from aserve.scheduler import sequence as sequence_module
from aserve.scheduler.sequence import row_sampling
from tests.runner.recordable import VOCAB_SIZE, RecordableOps, TapeGraphs, recordable_runner
from tests.runner.toy import chunk, fed, init, request

pytestmark = pytest.mark.torch

OFF = 0.25
Wider = namedtuple("Wider", [*SamplingColumns._fields, "made_up"])
TABLE = Wider(*SAMPLING, Column("float32", OFF, is_filter=True))


class MoreParams(SamplingParams, frozen=True, kw_only=True):
    """With the made-up parameter."""

    made_up: float = OFF


@pytest.fixture(autouse=True)
def _wider_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table with its entry, wherever columns are made."""
    for module in (sequence_module, rows_module, batch_module, graphs_module):
        monkeypatch.setattr(module, "SamplingColumns", Wider)
    for module in (rows_module, graphs_module):
        monkeypatch.setattr(module, "SAMPLING", TABLE)
    for module in (graphs_module, mixed_graphs):
        monkeypatch.setattr(module, "CAPTURE_AFTER", 0)


def test_the_table_has_an_entry_for_each_column_and_each_is_a_parameter():
    """Caught: a column without an entry, or whose name no parameter has; a neutral value that is not the default."""
    defaults = SamplingParams(temperature=0.0, seed=0)
    for table, names in ((SAMPLING, SamplingColumns._fields), (PENALTIES, PenaltyColumns._fields)):
        assert {name: getattr(defaults, name) for name in names} == {
            name: column.neutral for name, column in table._asdict().items()
        }


def test_a_parameter_reaches_the_row_of_a_plan():
    """Caught: a row that is told of the columns by their names, one by one."""
    asked = msgspec.structs.replace(request("one", [1, 2]), params=MoreParams(made_up=0.75, top_k=4))
    assert row_sampling(asked).columns == Wider(1.0, 4, 1.0, 0.0, 0, 0.75)


class Listener(RecordableOps):
    """Samples by the made-up column too, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[list[float]] = []
        self.filters: list[bool] = []

    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
        made_up_S = batch.columns_S.made_up
        assert made_up_S.dtype == torch.float32
        self.heard.append(made_up_S.tolist())
        self.filters.append(batch.any_filter)
        return super().sample(logits_SV + 40 * torch.sin(made_up_S[:, None] * torch.arange(VOCAB_SIZE)), batch)


def run(graphs: TapeGraphs | None, first: float, second: float) -> tuple[Listener, list[tuple[int, ...]]]:
    """A step of two prompts, whose rows have these values, three that decode, and one in which a third begins."""
    ops = Listener()
    runner = recordable_runner(graphs, ops=ops)

    def beginning(row: int, value: float) -> RowInit:
        return init(row, sampling=RowSampling(Wider(*NEUTRAL._replace(temperature=0.9, seed=5), value)))

    plans = [
        StepPlan(
            0, (chunk(0, 0, [1, 2], 1, 2), chunk(1, 0, [3, 4], 3, 4)), (beginning(0, first), beginning(1, second))
        ),
        *(StepPlan(1 + k, (fed(0, 2 + k), fed(1, 2 + k))) for k in range(3)),
        StepPlan(4, (fed(0, 5), fed(1, 5), chunk(2, 0, [7, 8], 5)), (beginning(2, 0.5),)),
    ]
    try:
        return ops, [runner.run(plan).token_ids for plan in plans]
    finally:
        runner.close()


def test_each_row_of_a_step_has_its_value_and_the_next_steps_too():
    """Caught: a column that is lost on its way to the device, or where a batch is moved on by a position."""
    ops, _ = run(None, 0.5, 0.75)
    assert ops.heard == [[0.5, 0.75]] * 4 + [[0.5, 0.75, 0.5]]


def test_the_buffers_of_graphs_have_the_column_and_padding_is_neutral():
    """Caught: a buffer that a graph reads and nobody fills; padding that a filter has to be run for."""
    tape = TapeGraphs()
    ops, tokens = run(tape, 0.5, 0.75)
    assert tape.num_replays == 5, "each step is a graph's"
    assert tokens == run(None, 0.5, 0.75)[1]
    assert tokens != run(None, 0.5, 0.5)[1], "the column is read"
    assert {value for step in ops.heard for value in step} == {OFF}, "graphs are recorded on padding alone"


def test_a_value_that_is_not_neutral_asks_for_the_filter():
    """Caught: `is_filter` that nobody heeds, by which a step of such rows alone would not be filtered."""
    assert [run(None, value, OFF)[0].filters[0] for value in (OFF, 0.5)] == [False, True]
