"""Captured decoding steps give what eager ones give, whatever joins, leaves, grows or is sampled how."""

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch

from aserve.core import columns
from aserve.core.ids import Row
from aserve.core.plan import RowControls, RowSampling, StepPlan
from aserve.core.request import Request
from aserve.runner import graphs as graphs_module
from aserve.runner import runner as runner_module
from aserve.runner.cuda import TorchCuda
from aserve.runner.graph_device import CudaGraphDevice, graph_device
from aserve.runner.graph_keys import buckets, capture_order, context_bound
from aserve.runner.graphs import CAPTURE_AFTER, REPLACE_AFTER, decodes_alone
from aserve.runner.masks import num_mask_bytes
from aserve.runner.runner import ModelRunner
from aserve.scheduler.scheduler import Scheduler
from tests.runner.recordable import CONTEXT_LEN, LAYOUTS, VOCAB_SIZE, TapeGraphs, recordable_runner
from tests.runner.test_streams import plans, runner_on
from tests.runner.toy import GREEDY, answer, chunk, fed, init, request, until

pytestmark = pytest.mark.torch

DRAWN = RowSampling(columns.NEUTRAL._replace(temperature=0.9, seed=5))


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """Of many lengths, and ways to sample."""
    ways: list[dict[str, object]] = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.1, "seed": 4, "top_k": 7, "top_p": 0.9},
        {"temperature": 0.7, "seed": 9, "min_p": 0.1},
        {"min_tokens": 3, "stop_token_ids": [5, 6]},
        {"logprobs": 2},
        {"presence_penalty": 0.5},
    ]
    weights = [6, 3, 3, 1, 1, 1, 1]
    return [
        request(
            f"request {i}",
            [rng.randrange(80) for _ in range(rng.randrange(1, 20))],
            max_tokens=rng.randrange(1, 40),
            **rng.choices(ways, weights)[0],
        )
        for i in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "limits", "seed", "warm"),
    [
        ("one group", {}, 0, False),
        ("one group", {"num_blocks": 40}, 1, True),
        ("one group", {"max_num_batched_tokens": 5}, 2, True),
        ("two groups", {}, 1, True),
        ("two groups", {"num_blocks": 40}, 2, True),
        ("two groups", {"max_num_batched_tokens": 5}, 0, False),
    ],
    ids=str,
)
async def test_random_traffic_is_answered_as_without_graphs(
    layout: str, limits: dict[str, int], seed: int, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """warm: the largest graphs stand in from the first step on, and others are captured between requests."""
    monkeypatch.setattr(graphs_module, "START_UP_S", 0.0)
    monkeypatch.setattr(runner_module, "IDLE_S", 0.0)
    requests = random_requests(random.Random(seed), 30)
    tape = TapeGraphs()

    async def answers(graphs: TapeGraphs | None) -> dict[str, list[int]]:
        kv_layout = LAYOUTS[layout]
        options = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 12, "max_num_batched_tokens": 32, **limits}
        if kv_layout is not None:
            options |= {"windows": kv_layout.windows, "num_blocks": 2 * options["num_blocks"]}
        scheduler = Scheduler(max_model_len=CONTEXT_LEN, watermark=0.0, **options)
        runner = recordable_runner(graphs, layout=kv_layout, num_blocks=options["num_blocks"])
        if warm:
            runner.warm_up()
        return await answer(runner, scheduler, requests, depth=2)

    assert await answers(tape) == await answers(None)
    assert tape.num_captures >= 1
    assert tape.num_replays > 10


def test_a_graph_is_captured_after_a_few_eager_steps_and_replayed_from_then_on() -> None:
    tape = TapeGraphs()
    runner = recordable_runner(tape)
    runner.run(StepPlan(0, (chunk(0, 0, [1, 2, 3], 1), chunk(1, 0, [4], 2)), (init(0), init(1))))
    for step in range(CAPTURE_AFTER):
        runner.run(StepPlan(1 + step, (fed(0, 3 + step, *[3 + step][: step == 1]), fed(1, 1 + step))))
    assert tape.num_captures == 0
    for step in range(2, 5):
        runner.run(StepPlan(1 + step, (fed(0, 3 + step, *[5][: step == 5]), fed(1, 1 + step, *[6][: step == 3]))))
    runner.close()
    assert (tape.num_captures, tape.num_replays) == (1, 3)


def test_until_it_has_its_own_a_batch_borrows_the_graph_of_a_larger_one() -> None:
    def tokens(graphs: TapeGraphs | None) -> list[tuple[int, ...]]:
        runner = recordable_runner(graphs)
        results = [runner.run(four_prompts()).token_ids]
        for k in range(8 + REPLACE_AFTER + 2):
            rows = range(4) if k < 4 else range(3) if k < 8 else range(1)
            results.append(runner.run(StepPlan(1, tuple(fed(row, 3 + k) for row in rows))).token_ids)
        runner.close()
        return results

    tape = TapeGraphs()
    assert tokens(tape) == tokens(None)
    # 2 eager steps of four rows, one capture; three rows borrow it. One row borrows it for a while and gets its own.
    assert (tape.num_captures, tape.num_replays) == (2, 2 + 4 + REPLACE_AFTER + 2)


def four_prompts() -> StepPlan:
    """Greedy, drawn, filtered and greedy; with room for 29 tokens more."""
    samplings = (GREEDY, DRAWN, RowSampling(DRAWN.columns._replace(top_k=7)), GREEDY)
    blocks = [range(1 + 8 * row, 9 + 8 * row) for row in range(4)]
    chunks = tuple(chunk(row, 0, [row + 1] * 3, *blocks[row]) for row in range(4))
    return StepPlan(0, chunks, tuple(init(row, sampling=sampling) for row, sampling in enumerate(samplings)))


def decoded(runner: ModelRunner) -> list[tuple[int, ...]]:
    """Tokens of four rows, then of each alone, so that all kinds of sampling have their turn."""
    results = [runner.run(four_prompts()).token_ids]
    positions = [3] * 4
    for rows in [*[(0, 1, 2, 3)] * 3, (0,), (1,), (2,), (0,), (3, 1)]:
        results.append(runner.run(StepPlan(1, tuple(fed(row, positions[row]) for row in rows))).token_ids)
        for row in rows:
            positions[row] += 1
    return results


def test_after_start_up_no_decoding_step_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest graph of each kind of sampling stands in for whatever comes; and there is one for prompts."""
    monkeypatch.setattr(graphs_module, "START_UP_S", 0.0)
    monkeypatch.setattr(runner_module, "IDLE_S", 3600.0)
    tape = TapeGraphs()
    eager, warm = recordable_runner(None), recordable_runner(tape)
    warm.warm_up()
    assert tape.num_captures == 6  # those that mask have two parts, those of prompts are one
    before = tape.num_replays
    assert decoded(warm) == decoded(eager)
    assert (tape.num_captures, tape.num_replays - before) == (6, 9)  # of which one step has prompts
    warm.close()
    eager.close()


@pytest.mark.parametrize(("most_s", "num_captures"), [(1.0, 4), (0.5, 4), (0.26, 4), (0.25, 4), (0.21, 5)])
def test_start_up_captures_for_a_second_and_no_longer_unless_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, most_s: float, num_captures: int
) -> None:
    """Each capture takes 0.3 s: after four of them a second is over, after five where 0.2 s of each are counted.

    The fault: a machine's first start spent its second on compiling, and steps of an H200 waited for 30 captures.
    """
    monkeypatch.setattr(graphs_module, "MOST_OF_A_CAPTURE_S", most_s)
    tape = TapeGraphs()
    runner = recordable_runner(tape)
    times_s = (0.3 * tick for tick in range(100))
    runner._with_graphs(lambda graphs: graphs.capture_at_start_up(times_s.__next__))
    runner.close()
    assert tape.num_captures == 6 + num_captures


def test_what_is_missing_is_captured_while_nothing_is_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "START_UP_S", 0.0)
    monkeypatch.setattr(runner_module, "IDLE_S", 0.001)
    tape = TapeGraphs()
    runner = recordable_runner(tape)
    runner.warm_up()
    until(lambda: tape.num_captures > 4)  # nothing has been asked yet
    runner.run(four_prompts())
    num_mixed = 3 * 1 * 2  # sequences that decode, tokens, kinds of sampling
    until(lambda: tape.num_captures == len(capture_order(12, CONTEXT_LEN)) + num_mixed)
    until(lambda: not runner._fills_in)
    runner.close()


def test_without_graphs_nothing_is_done_between_steps() -> None:
    """Once the cache's pages are taken. Where one step runs at a time, each is followed by none for a moment."""
    runner = recordable_runner(None)
    runner.warm_up()
    until(lambda: not runner._fills_in)
    runner.close()


def test_a_row_that_a_new_sequence_takes_is_sampled_its_way() -> None:
    """Same rows, same positions, another sequence: what is loaded is of no use."""

    def tokens(graphs: TapeGraphs | None) -> list[tuple[int, ...]]:
        runner = recordable_runner(graphs)
        results = []
        for round_, sampling in enumerate((DRAWN, RowSampling(DRAWN.columns._replace(seed=77)))):
            runner.run(StepPlan(0, (chunk(0, 0, [1, 2, 3], 1 + round_),), (init(0, sampling=sampling),)))
            results += [runner.run(StepPlan(1, (fed(0, 3 + k, *[10 + k][: k in (1, 5)]),))).token_ids for k in range(6)]
        runner.close()
        return results

    assert tokens(TapeGraphs()) == tokens(None)


class BrokenGraphs:
    """A `GraphDevice` on which every capture fails."""

    num_captures = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_where_capturing_fails_steps_stay_eager_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def tokens(graphs: BrokenGraphs | None) -> list[tuple[int, ...]]:
        runner = recordable_runner(graphs)
        runner.run(StepPlan(0, (chunk(0, 0, [1, 2, 3], 1, 2, 3),), (init(0),)))
        results = [runner.run(StepPlan(1, (fed(0, 3 + k),))).token_ids for k in range(8)]
        runner.close()
        return results

    graphs = BrokenGraphs()
    assert tokens(graphs) == tokens(None)
    assert graphs.num_captures == 1
    assert "not permitted" in caplog.text


def test_which_plans_can_be_graphs() -> None:
    assert decodes_alone(StepPlan(0, (fed(0, 3), fed(1, 9))), {})
    for plan in (
        StepPlan(0, ()),
        StepPlan(0, (fed(0, 3), chunk(1, 0, [5], 1))),
        StepPlan(0, (fed(0, 3),), (init(1),)),
        StepPlan(0, (msgspec.structs.replace(fed(0, 3), num_samples=0),)),
        StepPlan(0, (msgspec.structs.replace(fed(0, 3), target_ids=(4,)),)),
    ):
        assert not decodes_alone(plan, {})
    banned_below_6 = {Row(0): 6}
    assert not decodes_alone(StepPlan(0, (fed(0, 4),)), banned_below_6)
    assert decodes_alone(StepPlan(0, (fed(0, 5), fed(1, 1))), banned_below_6)


@pytest.mark.parametrize(
    "changes",
    [
        {"controls": RowControls(columns.NO_PENALTY._replace(presence_penalty=1.0))},
        {"num_logprobs": 0},
        {"banned_ids": (1,), "banned_before": 99},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_rows_with_something_to_control_go_the_eager_way(changes: dict[str, object]) -> None:
    tape = TapeGraphs()
    runner = recordable_runner(tape)
    sampling = msgspec.structs.replace(DRAWN, **changes)
    runner.run(StepPlan(0, (chunk(0, 0, [1, 2, 3], 1, 2, 3),), (init(0, sampling=sampling),)))
    for k in range(6):
        runner.run(StepPlan(1, (fed(0, 3 + k),)))
    runner.close()
    assert tape.num_captures == 0


def test_masked_steps_have_graphs_and_masks_are_read_where_they_lie() -> None:
    """Rows with a mask and without, in one step, that come and go: a mask of a step before, of another row, or of
    padding would change a token. Each row's mask changes with each token.
    """

    def tokens(graphs: TapeGraphs | None) -> list[tuple[int, ...]]:
        runner = recordable_runner(graphs)
        masks = {0: OneOf(3), 2: OneOf(5)}
        inits = tuple(msgspec.structs.replace(init(row), mask=masks.get(row)) for row in range(4))
        results = [runner.run(msgspec.structs.replace(four_prompts(), inits=inits)).token_ids]
        starts = [3] * 4
        for rows in [[3, 2, 1, 0]] * 6 + [[1, 3]] * 3 + [[0, 1, 2]] * 5:
            results.append(runner.run(StepPlan(1, tuple(fed(row, starts[row]) for row in rows))).token_ids)
            for row in rows:
                starts[row] += 1
        runner.close()
        return results

    tape = TapeGraphs()
    found = tokens(tape)
    assert found == tokens(None)
    assert all(result[1] % 5 == result[3] % 3 == 0 for result in found[1:7])
    assert tape.num_captures == 2, (
        "both parts of one graph, which stands in where fewer rows, or none with a mask, go on"
    )
    assert tape.num_replays == 2 * (14 - CAPTURE_AFTER)


class OneOf:
    """Masks of every so-manieth token, but for one that changes from token to token."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._num_told = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        self._num_told += len(token_ids)

    def masks(self, draft_ids: Sequence[int]) -> bytes:
        assert not draft_ids
        ids = range(self._every * (self._num_told % 7), VOCAB_SIZE, self._every)
        return sum(1 << token_id for token_id in ids).to_bytes(num_mask_bytes(VOCAB_SIZE), "little")


def test_buckets_reach_the_largest_batch() -> None:
    assert buckets(1) == (1,)
    assert buckets(5) == (1, 2, 4, 5)
    assert buckets(36) == (1, 2, 4, 8, 16, 24, 32, 36)
    assert buckets(256)[-2:] == (248, 256)


def test_contexts_are_bounded_in_steps_of_four() -> None:
    assert [context_bound(n, 40000) for n in (1, 2048, 2049, 8193, 40000)] == [2048, 2048, 8192, 32768, 40000]
    assert context_bound(5, 100) == 100


def test_a_cpu_has_no_graphs() -> None:
    assert graph_device(torch.device("cpu")) is None


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_a_capture_repeats_on_the_same_memory() -> None:
    x = torch.zeros(3, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        replay = CudaGraphDevice(TorchCuda(torch.device("cuda"))).capture(lambda: x.add_(1))
        replay()
        replay()
    torch.cuda.synchronize()
    assert x.tolist() == [2, 2, 2]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_cuda_captured_steps_say_what_eager_ones_do_and_never_wait() -> None:
    eager, captured = runner_on("cuda"), runner_on("cuda", graphs=True)
    expected = [eager.run(plan).token_ids for plan in plans()]
    assert [captured.run(plan).token_ids for plan in plans()] == expected
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert [captured.run(plan).token_ids for plan in plans()] == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for runner in (eager, captured):
            runner.close()
