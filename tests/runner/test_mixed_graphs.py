"""Steps with prompts as graphs give what eager ones give: padded with tokens, prompts and decoding rows of nobody's."""

import json
import random
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch

from aserve.core import columns
from aserve.core.plan import RowControls, RowSampling, StepPlan
from aserve.models.spec import read_spec
from aserve.runner import mixed_graphs
from aserve.runner.device import CudaDevice
from aserve.runner.graph_device import CudaGraphDevice
from aserve.runner.graph_keys import FILTERED as FILTERS
from aserve.runner.graph_keys import GREEDY, Kind
from aserve.runner.mixed_graphs import MixedGraphs
from aserve.runner.runner import ModelRunner
from aserve.scheduler.scheduler import Scheduler
from tests.runner.fake_cuda import FakeCuda
from tests.runner.recordable import CONTEXT_LEN, LAYOUTS, TapeGraphs, recordable_runner
from tests.runner.toy import answer, chunk, fed, init, request

pytestmark = pytest.mark.torch

SHAPES: Final = Path(__file__).parents[2] / "scripts/shapes"
FILTERED = RowSampling(columns.NEUTRAL._replace(temperature=0.9, top_k=7, top_p=0.9, seed=5))
TWO_PROMPTS = StepPlan(0, (chunk(0, 0, [1, 2, 3], 1, 2, 3), chunk(1, 0, [4], 4, 5)), (init(0), init(1)))
MIXED = StepPlan(
    1,
    (fed(0, 3), chunk(2, 0, [5, 6, 7, 8, 9], 6, 7), chunk(3, 0, [5] * 6, 8, 9, num_samples=0), fed(1, 1)),
    (init(2, sampling=FILTERED), init(3)),
)
REST = StepPlan(2, (chunk(3, 6, [5, 5]), fed(0, 4), fed(2, 5), fed(1, 2)))


@pytest.fixture(autouse=True)
def at_first_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "CAPTURE_AFTER", 0)


def results_of(runner: ModelRunner, *plans: StepPlan) -> list[tuple[int, ...]]:
    try:
        return [runner.run(plan).token_ids for plan in plans]
    finally:
        runner.close()


@pytest.mark.parametrize(("layout", "seed"), [("one group", 0), ("two groups", 1)])
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 40}, {"max_num_batched_tokens": 5}], ids=str)
async def test_random_traffic_is_answered_as_without_graphs(layout: str, limits: dict[str, int], seed: int) -> None:
    """Prompts are cut, sequences are preempted and come back, rows change hands; nobody is controlled."""
    rng, tape = random.Random(seed), TapeGraphs()
    ways = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.1, "seed": 4, "top_k": 7, "top_p": 0.9}]
    requests = [
        request(
            f"request {i}",
            [rng.randrange(80) for _ in range(rng.randrange(1, 20))],
            max_tokens=rng.randrange(1, 20),
            **rng.choice(ways),
        )
        for i in range(30)
    ]

    async def answers(graphs: TapeGraphs | None) -> dict[str, list[int]]:
        kv_layout = LAYOUTS[layout]
        options = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 12, "max_num_batched_tokens": 32, **limits}
        if kv_layout is not None:
            options |= {"windows": kv_layout.windows, "num_blocks": 2 * options["num_blocks"]}
        scheduler = Scheduler(max_model_len=CONTEXT_LEN, watermark=0.0, **options)
        runner = recordable_runner(graphs, layout=kv_layout, num_blocks=options["num_blocks"])
        return await answer(runner, scheduler, requests, depth=2)

    assert await answers(tape) == await answers(None)
    assert tape.num_replays > 20


def test_every_kind_of_step_with_prompts_is_a_graph() -> None:
    tape = TapeGraphs()
    expected = results_of(recordable_runner(None), TWO_PROMPTS, MIXED, REST)
    assert results_of(recordable_runner(tape), TWO_PROMPTS, MIXED, REST) == expected
    assert (tape.num_captures, tape.num_replays) == (2, 3)  # the last two are of one size


def test_on_a_model_of_a_gpu_they_say_the_same_while_steps_are_in_flight() -> None:
    gpu = FakeCuda()
    expected = results_of(recordable_runner(None), TWO_PROMPTS, MIXED, REST)
    runner = recordable_runner(CudaGraphDevice(gpu), device=CudaDevice(torch.device("cpu"), gpu))
    flights = [runner.launch(plan) for plan in (TWO_PROMPTS, MIXED, REST)]
    assert [flight._landed.result(60).token_ids for flight in flights] == expected
    runner.close()
    assert gpu.num_replays == 3


def test_a_chunk_that_is_not_whole_yields_nothing_and_changes_nobody() -> None:
    plans = [
        TWO_PROMPTS,
        StepPlan(1, (chunk(2, 0, [5, 6, 7], 6, 7, num_samples=0),), (init(2),)),
        StepPlan(2, (fed(0, 3),)),
    ]
    tape = TapeGraphs()
    assert results_of(recordable_runner(tape), *plans) == results_of(recordable_runner(None), *plans)
    assert tape.num_replays == 2


def test_a_row_that_a_graph_set_up_anew_is_not_taken_for_the_one_before() -> None:
    """The batch that an eager step left behind knows the row's sampling, which is another sequence's by now."""
    plans = [
        TWO_PROMPTS,
        StepPlan(1, (fed(0, 3), fed(1, 1))),
        StepPlan(2, (chunk(1, 0, [7, 8], 10, 11),), (init(1, sampling=FILTERED),)),
        StepPlan(3, (fed(0, 4), fed(1, 2))),
    ]
    assert results_of(recordable_runner(TapeGraphs()), *plans) == results_of(recordable_runner(None), *plans)


SCORED = RowSampling(num_logprobs=1)
PENALIZED = RowSampling(controls=RowControls(columns.NO_PENALTY._replace(presence_penalty=1.0)))
EAGER = {
    "scores": StepPlan(0, (chunk(0, 0, [1, 2], 1),), (init(0, sampling=SCORED),)),
    "penalties": StepPlan(0, (chunk(0, 0, [1, 2], 1),), (init(0, sampling=PENALIZED),)),
    "tokens": StepPlan(0, (chunk(0, 0, [1] * 58, *range(1, 16)),), (init(0),)),
    "no slice": StepPlan(0, (), (init(0, 1),)),
}


def test_a_small_model_is_padded_as_long_as_that_takes_less_than_its_launches() -> None:
    """Qwen3-0.6B on an H200: 28 layers, 5.6 ms of launches, 1.2 GFLOP a token. A tenth of its speed has none of it."""
    spec = read_spec(json.loads((SHAPES / "qwen3-0.6b/config.json").read_text()))
    h200 = mixed_graphs.tokens_while_launching(spec, 6e14)
    assert 2500 < h200 < 3000
    for unknown in {"intermediate_size": 0}, {"num_ranks": 2}:
        assert mixed_graphs.tokens_while_launching(msgspec.structs.replace(spec, **unknown), 6e14) == 0
    sizes = mixed_graphs.padded_sizes(256, 4096, h200)
    assert sizes.all()[0] == (256, 2048)
    assert sizes.choose(40, 1, 600) == (64, 1024)
    slow = mixed_graphs.tokens_while_launching(spec, 6e13)
    assert mixed_graphs.padded_sizes(256, 4096, slow).tokens == mixed_graphs.padded_sizes(256, 4096).tokens
    assert msgspec.structs.replace(sizes, cheap_tokens=slow).choose(40, 1, 600) is None


def test_the_sizes_are_those_of_the_rows_and_contexts_that_there_are() -> None:
    assert mixed_graphs.padded_sizes(12, 100).all() == [(12, 64), (8, 64), (0, 64)]
    assert mixed_graphs.padded_sizes(12, 60).all() == []
    assert recordable_runner(None).graph_sizes is None
    assert recordable_runner(TapeGraphs()).graph_sizes == mixed_graphs.padded_sizes(12, CONTEXT_LEN)


@pytest.mark.parametrize(
    ("wanted", "stands_in"),
    [
        ((8, 64, 2048, GREEDY), True),
        ((8, 128, 2048, FILTERS), True),
        ((9, 64, 2048, GREEDY), False),
        ((8, 129, 2048, GREEDY), False),
        ((8, 64, 8192, GREEDY), False),
        ((0, 64, 2048, GREEDY), True),
    ],
    ids=str,
)
def test_a_larger_graph_stands_in(wanted: tuple[int, int, int, Kind], stands_in: bool) -> None:
    there = mixed_graphs.MixedKey(8, 128, 2048, FILTERS)
    assert there.covers(mixed_graphs.MixedKey(*wanted), 256) == stands_in


def test_what_stands_in_is_no_dearer_than_launches_and_filters_where_it_has_to() -> None:
    there = mixed_graphs.MixedKey(8, 128, 2048, GREEDY)
    assert there.covers(mixed_graphs.MixedKey(8, 64, 2048, GREEDY), 136)
    assert not there.covers(mixed_graphs.MixedKey(8, 64, 2048, GREEDY), 135)
    assert not there.covers(mixed_graphs.MixedKey(8, 128, 2048, FILTERS), 256)


@pytest.mark.parametrize(
    ("launch_tokens", "first", "num_needed"),
    [
        (283, [(0, 256), (0, 512), (0, 384), (8, 256), (192, 64), (128, 128), (64, 192), (8, 512), (8, 384)], 34),
        (594, [(0, 512), (192, 384), (64, 512), (256, 256), (96, 512), (128, 512)], 9),
        (2800, [(0, 2048), (256, 2048)], 2),
    ],
    ids=["8B", "4B", "0.6B"],
)
def test_graphs_that_are_needed_the_most_come_first(
    launch_tokens: int, first: list[tuple[int, int]], num_needed: int
) -> None:
    """The fault: on an H200 a second of start-up went to graphs of 8B for 192 and 256 sequences, and load had none.

    First those that nothing stands in for: prompts alone, the largest of the cheap ones, then those of few sequences.
    """
    sizes = mixed_graphs.padded_sizes(256, 4096, launch_tokens)
    runner = recordable_runner(TapeGraphs(), max_num_seqs=256)
    graphs: MixedGraphs = runner._stages[3]._mixed  # type: ignore[index, union-attr]
    graphs.sizes, graphs._by_need, graphs._max_model_len = sizes, mixed_graphs.by_need(sizes), 4096
    captured: list[tuple[int, int]] = []
    without: list[tuple[int, int]] = []

    def capture(key: mixed_graphs.MixedKey) -> bool:
        """Takes no time: of these sizes a step would."""
        size = (key.num_decodes, key.num_tokens)
        captured.append(size)
        if graphs._stand_in(key) is None:
            without.append(size)
        graphs._graphs[key] = None  # type: ignore[assignment]
        graphs._stand_ins.clear()
        return True

    graphs._capture = capture  # type: ignore[method-assign]
    while graphs.capture_next(FILTERS):
        pass
    runner.close()
    assert sorted(captured) == sorted(sizes.all())
    assert captured[: len(first)] == first
    assert without == captured[:num_needed]


def test_the_graph_that_start_up_captures_stands_in_for_every_step_with_prompts() -> None:
    tape = TapeGraphs()
    runner = recordable_runner(tape)
    runner.capture_largest()
    num_captures = tape.num_captures
    assert results_of(runner, TWO_PROMPTS, MIXED, REST) == results_of(recordable_runner(None), TWO_PROMPTS, MIXED, REST)
    assert (tape.num_captures, tape.num_replays) == (num_captures, 3)


@pytest.mark.parametrize("why", EAGER)
def test_what_is_controlled_or_too_large_goes_the_eager_way(why: str) -> None:
    tape = TapeGraphs()
    results_of(recordable_runner(tape), EAGER[why])
    assert (tape.num_captures, tape.num_replays) == (0, 0)
