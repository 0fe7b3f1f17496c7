"""ModelRunner with a model that shows what it reads: order, overlap, failure, and the end."""

import asyncio
import gc
import threading
import weakref

import msgspec
import pytest
import torch

from aserve.core.errors import InsufficientMemoryError
from aserve.core.ids import BlockId
from aserve.core.plan import BlockOps, RowSampling, StepPlan
from aserve.kernels.cpu import CpuOps
from aserve.runner.flight import BrokenStepError
from aserve.runner.kv_store import allocate_kv
from aserve.runner.runner import ModelRunner, SkippedStepError
from aserve.scheduler.scheduler import Scheduler
from tests.kernels.cases import native_ops
from tests.runner.toy import (
    BOMB,
    POISON,
    ToyError,
    ToyLM,
    answer,
    chunk,
    continuation,
    fed,
    init,
    request,
    toy_runner,
    until,
)

pytestmark = pytest.mark.torch

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(params=[CpuOps, native_ops])
def runner(request):
    """Of our own kernels, too, by which it tells of steps late."""
    runner = toy_runner(ops=request.param())
    yield runner
    runner.close()


def small_scheduler(**changes: object) -> Scheduler:
    limits = {
        "block_size": 4,
        "num_blocks": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "watermark": 0.0,
    }
    return Scheduler(**{**limits, **changes})


async def test_two_steps_in_flight_feed_each_other_on_the_device(runner):
    flights = [
        runner.launch(StepPlan(0, (chunk(0, 0, PROMPT, 3, 1),), (init(0),))),
        runner.launch(StepPlan(1, (fed(0, 6),))),
    ]
    third = runner.launch(StepPlan(2, (fed(0, 7),))), runner.launch(StepPlan(3, (fed(0, 8, 2),)))
    results = [await flight.land() for flight in (*flights, *third)]
    assert [result.step_id for result in results] == [0, 1, 2, 3]
    assert [token for result in results for token in result.token_ids] == continuation(PROMPT, 4)


async def test_results_are_in_the_plans_order_whatever_the_batchs(runner):
    runner.run(StepPlan(0, (chunk(0, 0, [1, 2], 1), chunk(1, 0, [3], 2)), (init(0), init(1))))
    mixed = StepPlan(1, (chunk(2, 0, PROMPT, 3, 4), fed(1, 1), chunk(3, 0, [4], 5), fed(0, 2)), (init(2), init(3)))
    expected = [continuation(PROMPT, 1)[0], continuation([3], 2)[1], *continuation([4], 1), continuation([1, 2], 2)[1]]
    assert list(runner.run(mixed).token_ids) == expected


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "limits",
    [{}, {"max_num_batched_tokens": 3}, {"num_blocks": 12}, {"num_blocks": 12, "enable_prefix_caching": False}],
    ids=["roomy", "chunked", "preempting", "preempting, no prefix cache"],
)
async def test_every_answer_is_that_of_the_model_alone(depth, limits):
    prompts = {f"request {i}": [3, 1, 4, 1, 5][: 1 + i % 5] * (1 + i % 3) for i in range(10)}
    scheduler = small_scheduler(**limits)
    tokens = await answer(
        toy_runner(**{k: v for k, v in limits.items() if k == "num_blocks"}),
        scheduler,
        [request(name, prompt) for name, prompt in prompts.items()],
        depth=depth,
    )
    assert tokens == {name: continuation(prompt, 10) for name, prompt in prompts.items()}
    assert scheduler.statistics().num_preemptions > 0 or "num_blocks" not in limits


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "limits", [{}, {"max_num_batched_tokens": 3}, {"num_blocks": 14}, {"num_blocks": 14, "swaps": 1}]
)
async def test_culprits_change_nobodys_answer(depth, limits):
    """One makes steps raise, one has no finite logits; what is counted of others' tokens is counted anew."""
    host = {"num_host_blocks": 20} if limits.get("swaps") else {}
    blocks = {"num_blocks": limits["num_blocks"]} if "num_blocks" in limits else {}
    limits = {name: value for name, value in limits.items() if name != "swaps"} | host

    def others():
        plain = [request(f"plain {i}", [i, 2, 3, 4, 5]) for i in range(3)]
        drawn = [request(f"drawn {i}", [i, 7], temperature=1.0, seed=i, frequency_penalty=1.5) for i in range(2)]
        return [*plain, *drawn, request("scored", PROMPT, logprobs=1)]

    culprits = [request("raising", [1, 2, BOMB, 4]), request("not finite", [4, POISON, 2])]
    expected = await answer(toy_runner(**blocks, **host), small_scheduler(**limits), others(), depth=depth)
    crowd = others()
    scheduler = small_scheduler(**limits)
    tokens = await answer(toy_runner(**blocks, **host), scheduler, [*crowd[:3], *culprits, *crowd[3:]], depth=depth)
    assert tokens == expected | {"raising": None, "not finite": None}
    scheduler.check()
    assert scheduler.statistics().num_used_blocks == 0


async def test_a_seeded_request_says_the_same_alone_in_a_batch_in_chunks_and_preempted():
    def seeded(name: str, prompt: list[int]):
        return request(name, prompt, temperature=1.0, top_p=0.9, seed=41)

    others = [request(f"other {i}", [i, i], temperature=1.5, seed=i) for i in range(6)]
    alone = await answer(toy_runner(), small_scheduler(), [seeded("it", PROMPT)], depth=2)
    for limits in ({}, {"max_num_batched_tokens": 3}, {"num_blocks": 9}):
        scheduler = small_scheduler(**limits)
        crowd = await answer(
            toy_runner(num_blocks=limits.get("num_blocks", 32)), scheduler, [*others, seeded("it", PROMPT)], depth=2
        )
        assert crowd["it"] == alone["it"]
    assert scheduler.statistics().num_preemptions > 0
    assert alone["it"] != continuation(PROMPT, 10)


async def test_an_exception_surfaces_at_land_and_the_runner_goes_on(runner):
    broken = runner.launch(StepPlan(0, (chunk(0, 0, [1, BOMB], 1),), (init(0),)))
    on_top = runner.launch(StepPlan(1, (chunk(1, 0, PROMPT, 2, 3),), (init(1),)))
    with pytest.raises(ToyError):
        await broken.land()
    with pytest.raises(SkippedStepError):  # it may stand on a row that was never set up
        await on_top.land()
    await runner.recover().land()
    whole = runner.launch(StepPlan(2, (chunk(1, 0, PROMPT, 2, 3),), (init(1),)))
    assert list((await whole.land()).token_ids) == continuation(PROMPT, 1)


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, asyncio.CancelledError, SystemExit, BaseException])
async def test_whatever_a_step_raises_resolves_its_flight_as_an_exception(runner, kind):
    raising = msgspec.structs.replace(chunk(0, 0, PROMPT, 1, 2), token_ids=Raising(kind))
    with pytest.raises(BrokenStepError, match=kind.__name__):
        await runner.launch(StepPlan(0, (raising,), (init(0),))).land()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    ],
)
async def test_memory_that_runs_out_is_told_as_such(runner, error):
    raising = msgspec.structs.replace(chunk(0, 0, PROMPT, 1, 2), token_ids=Raising(error))
    with pytest.raises(InsufficientMemoryError):
        await runner.launch(StepPlan(0, (raising,), (init(0),))).land()


class Raising(tuple):
    """Token ids that nobody can look at."""

    def __new__(cls, error):
        ids = super().__new__(cls, PROMPT)
        ids.error = error
        return ids

    def __len__(self):
        raise self.error


async def test_logits_that_are_not_numbers_name_their_sequences_and_nobody_elses(runner):
    plan = StepPlan(0, (chunk(0, 0, PROMPT, 1, 2), chunk(1, 0, [1, POISON], 3)), (init(0), init(1)))
    poisoned = runner.launch(plan)
    on_top = runner.launch(StepPlan(1, (fed(0, 6), fed(1, 2))))
    results = [await poisoned.land(), await on_top.land(), runner.run(StepPlan(2, (fed(0, 7),)))]
    assert [result.failed for result in results] == [(101,), (101,), ()]
    assert [result.token_ids[0] for result in results] == continuation(PROMPT, 3)


def test_blocks_are_scrubbed_before_a_step_that_asks_for_it():
    """Whoever gets such a block may multiply what lies behind its own end by 0. What others share is as it was."""
    kv = allocate_kv(ToyLM.spec, num_blocks=8, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    runner = ModelRunner(ToyLM(), CpuOps(), kv, max_num_seqs=2, max_model_len=16)
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    shared = kv.planes_YBX[:, 1].clone()
    kv.planes_YBX[:, 3, 1:] = torch.nan
    assert runner.run(StepPlan(1, (chunk(1, 4, [POISON], 3),), (init(1, 1),))).failed
    runner.run(StepPlan(2, (fed(0, 6),), block_ops=BlockOps(scrubs=(BlockId(3), BlockId(1)))))
    assert kv.planes_YBX.isfinite().all()
    assert kv.planes_YBX[:, 1].equal(shared)
    assert shared.any()
    runner.close()


async def test_banned_ids_are_not_sampled_until_their_position(runner):
    first, second = continuation(PROMPT, 2)
    banning = RowSampling(banned_ids=(first, second), banned_before=7)
    [token] = runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0, sampling=banning),))).token_ids
    assert token not in (first, second)
    runner.run(StepPlan(1, (chunk(0, 6, [first]),)))
    assert list(runner.run(StepPlan(2, (chunk(0, 6, [first]),))).token_ids) == [second]


async def test_land_yields_to_the_event_loop_even_when_the_step_is_over(runner):
    flight = runner.launch(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    runner.run(StepPlan(1, (fed(0, 6),)))  # steps run in order: the first is over too
    others_ran = []
    asyncio.get_running_loop().call_soon(others_ran.append, True)
    await flight.land()
    assert others_ran == [True]


async def test_a_flight_whose_reader_was_cancelled_can_still_land(runner):
    gate = threading.Event()
    runner._worker.submit(gate.wait)
    flight = runner.launch(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    reader = asyncio.create_task(flight.land())
    await asyncio.sleep(0)
    reader.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert list((await flight.land()).token_ids) == continuation(PROMPT, 1)


def test_warm_up_leaves_nothing_that_a_sequence_could_see(runner):
    runner.warm_up()
    result = runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    assert list(result.token_ids) == continuation(PROMPT, 1)


def test_pages_are_taken_while_nothing_is_to_do_and_a_step_does_not_wait_for_all_of_them(runner):
    """Catches pages taken in another thread, or all at once, or no more after a step, or for ever."""
    events, has_begun, goes_on = [], threading.Event(), threading.Event()

    class Pages:
        def take_next(self) -> bool:
            assert threading.current_thread().name.startswith("aserve-runner")
            events.append("pages")
            has_begun.set()
            goes_on.wait(10)
            return events.count("pages") < 4

    runner.warm_up()
    runner._pages, runner._fills_in = Pages(), True
    when_landed = runner._device.when_landed
    runner._device.when_landed = lambda land: (events.append("step"), when_landed(land))
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    assert has_begun.wait(10)
    threading.Timer(0.1, goes_on.set).start()
    assert list(runner.run(StepPlan(1, (fed(0, 6),))).token_ids) == continuation(PROMPT, 2)[1:]
    while runner._fills_in:
        threading.Event().wait(0.01)
    assert events == ["step", "pages", "step", "pages", "pages", "pages"]


def test_what_fails_while_nothing_is_to_do_is_in_the_log_by_its_kind_alone(runner, caplog):
    """Catches an exception's text in the log, and a runner that computes no more, or tries again for ever."""

    class Pages:
        def take_next(self) -> bool:
            raise RuntimeError("a secret")

    runner.warm_up()
    runner._pages, runner._fills_in = Pages(), True
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    until(lambda: not runner._fills_in)
    assert list(runner.run(StepPlan(1, (fed(0, 6),))).token_ids) == continuation(PROMPT, 2)[1:]
    assert "filling in" in caplog.text
    assert "RuntimeError" in caplog.text
    assert "a secret" not in caplog.text


async def test_close_waits_for_launched_steps_and_gives_back_threads_and_memory():
    before = set(threading.enumerate())
    model = ToyLM()
    kv = allocate_kv(model.spec, num_blocks=8, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    held = [weakref.ref(model), weakref.ref(kv.planes_YBX)]
    runner = ModelRunner(model, CpuOps(), kv, max_num_seqs=2, max_model_len=16)
    flight = runner.launch(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    del model, kv
    runner.close()
    runner.close()
    assert list((await flight.land()).token_ids) == continuation(PROMPT, 1)
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    assert set(threading.enumerate()) <= before
