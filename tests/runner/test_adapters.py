"""Adapters in slots: which stay, which tokens are whose, and that captured steps compute with them as eager ones do."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.core.errors import AdapterError
from aserve.core.ids import AdapterId, Row
from aserve.core.plan import RowInit, StepPlan
from aserve.models.interface import ForwardBatch
from aserve.models.lora import LoraLayers
from aserve.runner import graphs as graphs_module
from aserve.runner import runner as runner_module
from aserve.runner.adapters import AdapterSlots, by_slot
from aserve.runner.device import CpuDevice
from aserve.runner.rows import RowTable
from aserve.runner.runner import ModelRunner
from aserve.scheduler.scheduler import Scheduler
from tests.adapters import write_factors
from tests.runner.recordable import CONTEXT_LEN, RecordableLM, RecordableOps, TapeGraphs, recordable_runner
from tests.runner.toy import GREEDY, answer, chunk, fed, init, request

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
SIZE = 16


def new_layers(num_slots: int) -> LoraLayers:
    layers = LoraLayers(num_slots, 16, RecordableOps(), torch.float32, CPU)
    layers.new_layer({"x": SIZE}, SIZE)
    layers.allocate()
    return layers


def write_mark(folder: Path, mark: float) -> str:
    """An adapter whose first number in a slot is `mark`."""
    factors = {"x": (torch.full((2, SIZE), mark), torch.ones(SIZE, 2))}
    return str(write_factors(folder, factors))


class MarkedLM(RecordableLM):
    """Adds to the hash of a token the mark of its adapter, found as kernels find it: by offsets, in the slots."""

    def __init__(self, layers: LoraLayers) -> None:
        self._memory_GN = layers._memory_GN

    def forward(self, token_ids_T: Tensor, kv: object, batch: ForwardBatch) -> Tensor:
        hidden_T1 = super().forward(token_ids_T, kv, batch)
        if batch.lora is None:
            return hidden_T1
        marks_G1 = torch.cat([self._memory_GN[:, 0], torch.zeros(1)])
        places_N = torch.arange(len(batch.lora.tokens_N), dtype=torch.int32)
        slots_N = torch.searchsorted(batch.lora.starts_G1[1:].contiguous(), places_N, right=True)
        marks_T = torch.zeros(len(token_ids_T)).index_copy(0, batch.lora.tokens_N, marks_G1[slots_N])
        return hidden_T1 + marks_T[:, None]


def marked_runner(graphs: TapeGraphs | None, root: Path, num_adapters: int, **options: int) -> ModelRunner:
    layers = new_layers(2)
    runner = recordable_runner(graphs, model=MarkedLM(layers), lora=layers, **options)
    for adapter in range(num_adapters):
        runner.load(AdapterId(adapter), write_mark(root / str(adapter), 10.0 * (adapter + 1)))
    return runner


def test_tokens_are_sorted_by_slot_and_those_without_one_come_last() -> None:
    tokens_N, starts_G1 = by_slot(np.array([2, -1, 0, 2, 0, -1]), 4)
    assert tokens_N.tolist() == [2, 4, 0, 3, 1, 5]
    assert starts_G1.tolist() == [0, 2, 2, 4, 4]


def test_the_slot_that_was_used_least_recently_is_given_to_another(tmp_path: Path) -> None:
    layers = new_layers(2)
    rows = RowTable(num_rows=4, max_blocks_per_seq=1, device=CPU)
    slots = AdapterSlots(layers, rows, CpuDevice())
    for adapter in range(3):
        slots.read(AdapterId(adapter), write_mark(tmp_path / str(adapter), adapter + 1.0))
    for row in range(3):
        rows.stage(StepPlan(0, (), (RowInit(Row(row), row, GREEDY, adapter=AdapterId(row)),)))

    def marks(*in_step: int) -> list[float]:
        """What lies in the slots of these rows, when a step has brought them there."""
        found = slots.slots_of([Row(row) for row in in_step])
        return [float(layers._memory_GN[slot, 0]) if slot >= 0 else 0.0 for slot in found]

    assert marks(0, 1, 3) == [1.0, 2.0, 0.0]
    version = slots.version
    assert marks(1, 0) == [2.0, 1.0]
    assert slots.version == version
    assert marks(0) == [1.0]
    assert marks(2, 0) == [3.0, 1.0]  # over adapter 1, which was used before 0
    assert slots.version > version
    slots.drop(AdapterId(2))
    version = slots.version
    assert marks(1, 0) == [2.0, 1.0]  # in the slot that is free now
    assert slots.version == version + 1
    with pytest.raises(AssertionError, match="a step has 3 adapters"):
        marks(0, 1, 2)


def test_a_row_that_another_sequence_takes_has_that_ones_adapter_or_none() -> None:
    rows = RowTable(num_rows=2, max_blocks_per_seq=1, device=CPU)
    for adapter in (AdapterId(7), None, AdapterId(8)):
        rows.stage(StepPlan(0, (), (RowInit(Row(1), 0, GREEDY, adapter=adapter),)))
        assert rows.adapters.get(Row(1)) == adapter


def test_an_adapter_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    runner = marked_runner(None, tmp_path, 1)
    folder = write_mark(tmp_path / "bad", float("nan"))
    with pytest.raises(AdapterError, match="not finite"):
        runner.load(AdapterId(5), folder)
    assert runner._slots is not None
    assert list(runner._slots._loaded) == [0]
    runner.close()


def test_a_dropped_adapter_stays_until_the_steps_before_have_run(tmp_path: Path) -> None:
    runner = marked_runner(None, tmp_path, 1)
    plan = StepPlan(0, (chunk(0, 0, [1, 2, 3], 1),), (msgspec.structs.replace(init(0), adapter=AdapterId(0)),))
    alone = runner.run(plan)
    flights = [runner.launch(plan) for _ in range(20)]
    runner.drop(AdapterId(0))
    results = [flight._landed.result() for flight in flights]
    assert all(result.token_ids == alone.token_ids for result in results)
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_random_traffic_with_adapters_is_answered_as_without_graphs(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three adapters two run at once, so that slots change hands between replays of one graph."""
    monkeypatch.setattr(graphs_module, "START_UP_S", 0.0)
    monkeypatch.setattr(runner_module, "IDLE_S", 0.0)
    rng = random.Random(seed)
    requests = []
    for number in range(30):
        prompt = [rng.randrange(80) for _ in range(rng.randrange(1, 20))]
        wanted = request(f"r{number}", prompt, max_tokens=rng.randrange(1, 40))
        adapter = rng.choice((None, AdapterId(0), AdapterId(1), AdapterId(2)))
        requests.append(msgspec.structs.replace(wanted, adapter=adapter))
    tape = TapeGraphs()

    async def answers(graphs: TapeGraphs | None, *, with_adapters: bool = True) -> dict[str, list[int]]:
        limits = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 12, "max_num_batched_tokens": 32}
        scheduler = Scheduler(max_model_len=CONTEXT_LEN, watermark=0.0, max_loras=2, **limits)
        runner = marked_runner(graphs, tmp_path / str(graphs is None), 3)
        if seed:
            runner.warm_up()
        asked = requests if with_adapters else [msgspec.structs.replace(r, adapter=None) for r in requests]
        return await answer(runner, scheduler, asked, depth=2)

    eager = await answers(None)
    assert await answers(tape) == eager
    assert tape.num_replays > 10
    assert await answers(None, with_adapters=False) != eager


def test_a_graph_for_adapters_stands_in_for_steps_without_until_they_have_come_up_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are a key of decoding graphs: steps that have none need not pay for them for ever."""
    monkeypatch.setattr(graphs_module, "REPLACE_CLOSE_AFTER", 64)

    def tokens(graphs: TapeGraphs | None) -> list[tuple[int, ...]]:
        runner = marked_runner(graphs, tmp_path / str(graphs is None), 2, num_blocks=200)
        for row, adapter in enumerate((AdapterId(1), None)):
            first = msgspec.structs.replace(init(row), adapter=adapter)
            blocks = range(1 + 40 * row, 41 + 40 * row)
            runner.run(StepPlan(0, (chunk(row, 0, [row + 1], *blocks[:24]),), (first,)))
        steps = [(0, 1 + k) for k in range(4)]
        steps += [(1, 1 + k) for k in range(graphs_module.REPLACE_CLOSE_AFTER + 3)]
        results = [runner.run(StepPlan(1, (fed(row, start),))).token_ids for row, start in [*steps, (0, 5)]]
        runner.close()
        return results

    tape = TapeGraphs()
    assert tokens(tape) == tokens(None)
    assert tape.num_captures == 2
    assert tape.num_replays == 2 + graphs_module.REPLACE_CLOSE_AFTER + 3 + 1
