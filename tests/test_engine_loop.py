"""The loop of five verbs: who gets what, who leaves, what a failed step costs, and that nothing is left behind."""

import asyncio
import itertools
from contextlib import asynccontextmanager
from functools import partial

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from aserve.core.errors import (
    ContextLengthError,
    DeviceLostError,
    InsufficientMemoryError,
    InternalError,
    InvalidRequestError,
    StepFailedError,
    StepTimeoutError,
    UnavailableError,
)
from aserve.core.ids import RequestId
from aserve.core.outputs import FinishReason
from aserve.core.params import SamplingParams
from aserve.core.request import Request
from aserve.engine_loop import WATCH_S, EngineLoop
from aserve.metrics.engine_metrics import EngineMetrics
from aserve.scheduler.scheduler import Scheduler
from aserve.stepping import MAX_RESTARTS
from aserve.text.stream import TextStream
from aserve.text.tokenizer import Tokenizer
from tests.fakes import FakeClock, FakeKV, FakeScript, ScriptedRunner, continuation

BYTES = range(256)


class Panic(BaseException):
    """What a library raises that is no Exception."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Every byte is a token, and nothing else is."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = RawTokenizer(models.BPE(vocab=alphabet, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


class Bench:
    """A loop over fakes, and the means to ask it things."""

    def __init__(self, tokenizer, runner, num_blocks=64, max_in_flight=2, plans_behind_prompts=True, **options):
        self.tokenizer = tokenizer
        self.clock = FakeClock()
        self.new_stream = TextStream
        self.runner = runner
        self.scheduler = Scheduler(
            block_size=4,
            num_blocks=num_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=16,
            max_model_len=128,
            max_in_flight=max_in_flight,
            plans_behind_prompts=plans_behind_prompts,
        )
        self.metrics = EngineMetrics(CollectorRegistry(), "model", self.scheduler.statistics)
        self.loop = EngineLoop(self.scheduler, runner, self.metrics, self.clock, tokenizer.token_texts, **options)

    def open(self, name, prompt, max_tokens, **fields):
        params = SamplingParams(**fields)
        request = Request(
            id=RequestId(name),
            prompt_token_ids=tuple(prompt),
            params=params,
            max_tokens=max_tokens,
            seed=0,
            arrival_s=0.0,
            stop_ids=frozenset(params.stop_token_ids),
        )
        return self.loop.open(request, partial(self.new_stream, self.tokenizer, params))

    async def ask(self, name, prompt, max_tokens, **fields):
        """(token ids, finish reason, stop reason) of a request that is read to its end."""
        async with self.open(name, prompt, max_tokens, **fields) as mailbox:
            deltas = [delta async for delta in mailbox]
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return ids, deltas[-1].finish_reason, deltas[-1].stop_reason

    def held(self):
        self.scheduler.check()
        statistics = self.scheduler.statistics()
        return statistics.num_used_blocks, statistics.num_running, statistics.num_waiting, self.loop.num_readers


@asynccontextmanager
async def running(bench):
    task = asyncio.create_task(bench.loop.run())
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def fake_kv(**options):
    return ScriptedRunner(block_size=4, vocabulary=BYTES, **options)


async def test_requests_together_get_what_each_would_alone(tokenizer):
    async with running(Bench(tokenizer, fake_kv())) as bench:
        prompts = {f"r{i}": list(range(1, 2 + 5 * i)) for i in range(12)}
        answers = await asyncio.gather(*(bench.ask(name, prompt, 9) for name, prompt in prompts.items()))
        for prompt, answer in zip(prompts.values(), answers, strict=True):
            assert answer == (continuation(prompt, 9, vocabulary=BYTES), FinishReason.LENGTH, None)
        assert bench.held() == (0, 0, 0, 0)


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
async def test_the_loop_runs_ahead_of_the_device(tokenizer, max_in_flight):
    bench = Bench(tokenizer, fake_kv(), max_in_flight=max_in_flight)
    bench.runner.hold()
    async with running(bench), bench.open("a", [1, 2, 3], 5) as mailbox:
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(bench.runner.plans) == max_in_flight
        assert all(plan.slices[0].token_ids == () for plan in bench.runner.plans[1:])
        bench.runner.let_land()
        ids = [token_id async for delta in mailbox for token_id in delta.token_ids]
        assert ids == continuation([1, 2, 3], 5, vocabulary=BYTES)


async def test_a_step_takes_as_long_as_the_device_had_it(tokenizer, monkeypatch):
    """From its launch, or from where the step before it landed, if that was later: not while nothing was asked."""
    bench = Bench(tokenizer, fake_kv())
    commit, told = bench.scheduler.commit, []

    def commit_and_go_on(result, took_s):
        told.append(took_s)
        bench.clock.advance(3.0)
        return commit(result, took_s)

    monkeypatch.setattr(bench.scheduler, "commit", commit_and_go_on)
    bench.clock.advance(50.0)
    bench.runner.hold()
    async with running(bench), bench.open("a", [1, 2, 3], 4) as mailbox:
        for _ in range(10):
            await asyncio.sleep(0)
        bench.clock.advance(2.0)
        bench.runner.let_land()
        assert await choices_of(mailbox, 1) == [continuation([1, 2, 3], 4, vocabulary=BYTES)]
        assert told == [2.0, 3.0, 3.0, 3.0]
        bench.clock.advance(100.0)
        await bench.ask("b", [1, 2, 3], 1)
        assert told[4:] == [0.0]


async def test_nothing_is_planned_behind_a_prompt_where_it_is_worth_waiting_for(tokenizer):
    """Who comes while a step with prompts runs is in the very next one; decoding, the loop runs ahead."""
    bench = Bench(tokenizer, fake_kv(), plans_behind_prompts=False)
    async with running(bench):
        bench.runner.hold()
        async with bench.open("a", [1, 2, 3], 9) as first:
            for _ in range(10):
                await asyncio.sleep(0)
            assert [plan.num_tokens for plan in bench.runner.plans] == [3]
            async with bench.open("b", [4, 5, 6, 7], 9) as second:
                bench.runner.let_land()
                for mailbox, prompt in ((first, [1, 2, 3]), (second, [4, 5, 6, 7])):
                    ids = [token_id async for delta in mailbox for token_id in delta.token_ids]
                    assert ids == continuation(prompt, 9, vocabulary=BYTES)
    assert [plan.num_tokens for plan in bench.runner.plans[:3]] == [3, 1 + 4, 2]
    assert bench.scheduler.max_in_flight == 2


async def test_a_reader_who_leaves_frees_his_blocks_at_once(tokenizer):
    async with running(Bench(tokenizer, fake_kv())) as bench:
        async with bench.open("a", [1] * 9, 100) as mailbox:
            await anext(mailbox)
            assert bench.held()[0] > 0
        assert bench.held() == (0, 0, 0, 0)
        prompt = [2] * 5
        assert (await bench.ask("b", prompt, 4))[0] == continuation(prompt, 4, vocabulary=BYTES)


async def test_a_reader_who_leaves_while_queued_leaves_the_queue(tokenizer):
    bench = Bench(tokenizer, fake_kv())
    async with bench.open("a", [1, 2, 3], 5):  # nothing runs yet
        assert bench.held() == (0, 0, 1, 1)
    assert bench.held() == (0, 0, 0, 0)


async def test_a_stop_string_ends_the_sequence_before_the_next_plan(tokenizer):
    script = tokenizer.encode("abcSTOPdef", add_special_tokens=False)
    async with running(Bench(tokenizer, ScriptedRunner(model=FakeScript(script)))) as bench:
        async with bench.open("a", [1, 2], 100, stop=("STOP",)) as mailbox:
            deltas = [delta async for delta in mailbox]
            assert bench.held()[:3] == (0, 0, 0)
        assert "".join(delta.text for delta in deltas) == "abc"
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "STOP")
        assert len(bench.runner.plans) <= len("abcSTOP") + 1  # one step was in flight


async def test_a_stop_token_is_named(tokenizer):
    script = tokenizer.encode("ab!", add_special_tokens=False)
    async with running(Bench(tokenizer, ScriptedRunner(model=FakeScript(script)))) as bench:
        assert await bench.ask("a", [1], 100, stop_token_ids=(script[2],)) == (
            list(script),
            FinishReason.STOP,
            script[2],
        )


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
@pytest.mark.parametrize("where", ["launch_errors", "land_errors"])
@pytest.mark.parametrize("error", [ValueError(), StopIteration(), MemoryError(), asyncio.CancelledError(), Panic()])
async def test_a_step_that_raises_once_costs_nobody_anything(tokenizer, where, max_in_flight, error):
    runner = fake_kv(**{where: {2: error, 3: error}})
    async with running(Bench(tokenizer, runner, max_in_flight=max_in_flight)) as bench:
        answers = await asyncio.gather(*(bench.ask(f"r{i}", [i, 2, 3], 20) for i in range(5)))
        assert [ids for ids, _, _ in answers] == [continuation([i, 2, 3], 20, vocabulary=BYTES) for i in range(5)]
        assert bench.held() == (0, 0, 0, 0)


def poisoned_by(token_id, error):
    """Steps fail that compute this token of a prompt."""
    return lambda plan: error if any(token_id in piece.token_ids for piece in plan.slices) else None


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (ValueError("a secret of the device"), StepFailedError),
        (StopIteration(), StepFailedError),
        (asyncio.CancelledError(), StepFailedError),
        (Panic("a secret"), StepFailedError),
        (MemoryError(), InsufficientMemoryError),
        (InsufficientMemoryError("a secret"), InsufficientMemoryError),
    ],
)
async def test_the_culprit_of_a_failed_step_ends_alone(tokenizer, caplog, max_in_flight, error, ending):
    runner = fake_kv(poison=poisoned_by(99, error))
    async with running(Bench(tokenizer, runner, max_in_flight=max_in_flight)) as bench:
        asking = [asyncio.create_task(bench.ask(f"r{i}", [i, 2, 3], 20)) for i in range(6)]
        with pytest.raises(ending) as caught:
            await bench.ask("culprit", [1, 99, 3], 50)
        answers = await asyncio.gather(*asking)
        assert [ids for ids, _, _ in answers] == [continuation([i, 2, 3], 20, vocabulary=BYTES) for i in range(6)]
        assert bench.held() == (0, 0, 0, 0)
    assert "secret" not in str(caught.value) + caplog.text
    [line] = [record.message for record in caplog.records if "fault" in record.message]
    assert "of request culprit" in line
    assert line.split()[1] in str(caught.value)


async def test_a_device_that_computes_nothing_any_more_ends_the_loop(tokenizer):
    runner = fake_kv(land_errors={1: ValueError()}, lost=ValueError("a secret"))
    bench = Bench(tokenizer, runner)
    task = asyncio.create_task(bench.loop.run())
    answers = await asyncio.gather(*(bench.ask(f"r{i}", [i], 20) for i in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [UnavailableError] * 3
    with pytest.raises(DeviceLostError):
        await task


async def test_a_step_that_never_lands_ends_the_loop_and_says_where_the_threads_are(tokenizer, caplog):
    bench = Bench(tokenizer, fake_kv(), step_timeout_s=5.0)
    bench.runner.hold()
    task, watch = asyncio.create_task(bench.loop.run()), asyncio.create_task(bench.loop.watch())
    asking = asyncio.create_task(bench.ask("a", [1], 20))
    await asyncio.sleep(2 * WATCH_S)  # whoever keeps watch has seen the step
    bench.clock.advance(6.0)
    with pytest.raises(UnavailableError):
        await asking
    with pytest.raises(StepTimeoutError):
        await task
    watch.cancel()
    assert "thread MainThread" in caplog.text
    assert "engine_loop.py" in caplog.text


@pytest.mark.parametrize("verb", ["plan", "commit"])
@pytest.mark.parametrize("error", [ValueError("a secret"), Panic("a secret"), StopIteration(), MemoryError()])
async def test_bookkeeping_that_tears_once_costs_nobody_anything(tokenizer, caplog, verb, error):
    bench = Bench(tokenizer, fake_kv())
    call, num_calls = getattr(bench.scheduler, verb), itertools.count()
    setattr(bench.scheduler, verb, lambda *args: raise_(error) if next(num_calls) == 6 else call(*args))
    async with running(bench):
        answers = await asyncio.gather(*(bench.ask(f"r{i}", [i, 2, 3], 20) for i in range(5)))
        assert [ids for ids, _, _ in answers] == [continuation([i, 2, 3], 20, vocabulary=BYTES) for i in range(5)]
        assert bench.held() == (0, 0, 0, 0)
    assert caplog.text.count("in scheduling") == 1
    assert "secret" not in caplog.text


async def test_bookkeeping_may_tear_many_times_before_it_goes_on(tokenizer):
    bench = Bench(tokenizer, fake_kv())
    plan, num_calls = bench.scheduler.plan, itertools.count(1)
    bench.scheduler.plan = lambda now: raise_(ValueError()) if next(num_calls) <= MAX_RESTARTS else plan(now)
    async with running(bench):
        ids, _, _ = await bench.ask("a", [1, 2, 3], 5)
        assert ids == continuation([1, 2, 3], 5, vocabulary=BYTES)


async def test_bookkeeping_that_tears_for_ever_ends_the_loop(tokenizer):
    bench = Bench(tokenizer, fake_kv())
    bench.scheduler.plan = lambda _now: raise_(ValueError())
    task = asyncio.create_task(bench.loop.run())
    answers = await asyncio.gather(*(bench.ask(f"r{i}", [i], 20) for i in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [UnavailableError] * 3
    with pytest.raises(ValueError):  # noqa: PT011  it says nothing
        await task


@pytest.mark.parametrize(
    "error", [ValueError("a secret"), Panic("a secret"), StopIteration(), asyncio.CancelledError()]
)
@pytest.mark.parametrize("method", ["push", "is_plain"])
async def test_a_text_that_cannot_be_made_ends_its_request_alone(tokenizer, caplog, method, error):
    class Broken(TextStream):
        def push(self, delta):
            return raise_(error) if method == "push" else super().push(delta)

        @property
        def is_plain(self):
            return raise_(error) if method == "is_plain" and self.has_text else False

        @is_plain.setter
        def is_plain(self, _value):
            self.has_text = hasattr(self, "has_text")

    async with running(Bench(tokenizer, fake_kv())) as bench:
        asking = [asyncio.create_task(bench.ask(f"r{i}", [i, 2, 3], 20)) for i in range(3)]
        await asyncio.sleep(0)
        bench.new_stream = Broken
        with pytest.raises(InternalError):
            await bench.ask("broken", [9], 20)
        answers = await asyncio.gather(*asking)
        assert [ids for ids, _, _ in answers] == [continuation([i, 2, 3], 20, vocabulary=BYTES) for i in range(3)]
        assert bench.held() == (0, 0, 0, 0)
    assert "in publishing of request broken" in caplog.text
    assert "secret" not in caplog.text


async def test_a_text_that_cannot_be_begun_leaves_nothing_behind(tokenizer):
    async with running(Bench(tokenizer, fake_kv())) as bench:
        bench.new_stream = lambda *_: raise_(ValueError())
        with pytest.raises(ValueError):  # noqa: PT011  it says nothing
            await bench.ask("a", [9], 20, n=2)
        assert bench.held() == (0, 0, 0, 0)


def raise_(error):
    raise error


async def test_what_can_never_fit_is_refused_with_both_numbers(tokenizer):
    bench = Bench(tokenizer, fake_kv(), num_blocks=5)
    with pytest.raises(ContextLengthError, match=r"17.*16|16.*17"):
        async with bench.open("a", range(1, 18), 1):
            pass
    assert bench.held() == (0, 0, 0, 0)


async def test_the_end_of_the_loop_ends_every_request(tokenizer):
    bench = Bench(tokenizer, fake_kv())
    async with running(bench), asyncio.TaskGroup() as group:
        bench.runner.hold()
        readers = [group.create_task(expect_unavailable(bench.ask(f"r{i}", [i], 5))) for i in range(3)]
        for _ in range(10):
            await asyncio.sleep(0)
        group.create_task(stop_soon(bench))
    assert all(reader.done() for reader in readers)
    with pytest.raises(UnavailableError):
        await bench.ask("late", [1], 1)


async def test_no_branches_are_taken_up_once_the_loop_has_ended(tokenizer):
    """Caught: branches that the scheduler takes in and nobody steps, so that who reads them waits for ever."""
    bench = Bench(tokenizer, fake_kv())
    async with running(bench), bench.open("a", [1, 2, 3], 30) as mailbox:
        await anext(mailbox)
        request, history = bench.loop.request(RequestId("a")), bench.scheduler.history(RequestId("a"))
        await stop_soon(bench)
        branch = replace(request, id=RequestId("b"), prompt_token_ids=history)
        with pytest.raises(UnavailableError):
            async with bench.loop.fork(RequestId("a"), 0, [branch], [partial(TextStream, tokenizer, branch.params)]):
                pass
    assert bench.held() == (0, 0, 0, 0)


async def stop_soon(bench):
    (task,) = (task for task in asyncio.all_tasks() if task.get_coro().__name__ == "run")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def expect_unavailable(coroutine):
    with pytest.raises(UnavailableError):
        await coroutine


async def test_sixty_four_readers_some_of_whom_leave(tokenizer):
    """Random aborts among many: every completed answer equals its solo run, and nothing is left."""
    async with running(Bench(tokenizer, fake_kv(), num_blocks=40)) as bench:

        async def reader(i):
            prompt = [i % 7, *range(i % 11)]
            async with bench.open(f"r{i}", prompt, 3 + i % 9) as mailbox:
                ids = []
                async for delta in mailbox:
                    ids += delta.token_ids
                    if i % 3 == 0 and len(ids) > i % 5:
                        return
            assert ids == continuation(prompt, 3 + i % 9, vocabulary=BYTES)

        await asyncio.gather(*(reader(i) for i in range(64)))
        assert bench.held() == (0, 0, 0, 0)
    assert len(asyncio.all_tasks()) == 1


async def choices_of(mailbox, num_choices):
    ids = [[] for _ in range(num_choices)]
    async for delta in mailbox:
        ids[delta.index] += delta.token_ids
    return ids


async def test_choices_are_streamed_under_their_index_and_end_on_their_own(tokenizer):
    runner = ScriptedRunner(model=FakeKV(4, BYTES, seeded=True))
    async with running(Bench(tokenizer, runner)) as bench:
        async with bench.open("a", [1, 2, 3, 4, 5], 9, n=3) as mailbox:
            ids = await choices_of(mailbox, 3)
        assert ids == [continuation([1, 2, 3, 4, 5], 9, vocabulary=BYTES, seed=seed) for seed in range(3)]
        assert bench.held() == (0, 0, 0, 0)


async def test_a_stop_string_ends_its_choice_alone(tokenizer):
    runner = ScriptedRunner(model=FakeKV(4, BYTES, seeded=True))
    answers = [continuation([1], 12, vocabulary=BYTES, seed=seed) for seed in range(2)]
    told = (token for token in answers[1][3:] if tokenizer.decode([token]).isascii() and token not in answers[0])
    token = next(told)
    stop = tokenizer.decode([token])
    async with running(Bench(tokenizer, runner)) as bench:
        async with bench.open("a", [1], 12, n=2, stop=(stop,)) as mailbox:
            ids = await choices_of(mailbox, 2)
        assert ids == [answers[0], answers[1][: answers[1].index(token) + 1]]
        assert bench.held() == (0, 0, 0, 0)


async def test_branches_of_an_open_request_are_read_beside_it(tokenizer):
    async with running(Bench(tokenizer, fake_kv())) as bench, bench.open("a", [1, 2, 3], 30) as mailbox:
        await anext(mailbox)
        history = bench.scheduler.history(RequestId("a"))
        branches = [
            Request(
                id=RequestId(name),
                prompt_token_ids=history,
                params=SamplingParams(),
                max_tokens=6,
                seed=0,
                arrival_s=0.0,
            )
            for name in ("b", "c")
        ]
        makers = [partial(TextStream, tokenizer, SamplingParams())] * 2
        async with bench.loop.fork(RequestId("a"), 0, branches, makers) as mailboxes:
            for branch in mailboxes:
                assert await choices_of(branch, 1) == [continuation(history, 6, vocabulary=BYTES)]
        assert bench.loop.num_readers == 1
        with pytest.raises(InvalidRequestError, match="'b' is not open"):
            bench.loop.request(RequestId("b"))


async def test_a_failed_step_is_counted_and_a_count_that_fails_is_told_to_the_log_alone(tokenizer, monkeypatch, caplog):
    """Caught: the call of `step_failed` removed, or its place in the log swapped with the log."""
    async with running(Bench(tokenizer, fake_kv(poison=poisoned_by(99, ValueError())))) as bench:
        with pytest.raises(StepFailedError):
            await bench.ask("culprit", [1, 99, 3], 5)
        assert bench.metrics.num_step_failures > 0
        monkeypatch.setattr(bench.metrics, "step_failed", lambda _error: 1 // 0)
        with pytest.raises(StepFailedError):
            await bench.ask("another", [1, 99, 3], 5)
        assert (await bench.ask("neighbour", [1, 2, 3], 5))[0] == continuation([1, 2, 3], 5, vocabulary=BYTES)
    assert any("counting" in record.message and "ZeroDivisionError" in record.message for record in caplog.records)


@pytest.mark.parametrize("verb", ["plan", "revert"])
async def test_a_wish_to_end_passes_by_every_verb(tokenizer, monkeypatch, verb):
    """Caught: `raise` removed where a step's edges let cancellation through."""
    bench = Bench(tokenizer, fake_kv(poison=poisoned_by(99, ValueError())))

    def wish(*_args, **_options):
        raise asyncio.CancelledError

    monkeypatch.setattr(bench.scheduler, verb, wish)
    task = asyncio.create_task(bench.loop.run())
    asking = asyncio.create_task(bench.ask("culprit", [1, 99, 3], 5))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
