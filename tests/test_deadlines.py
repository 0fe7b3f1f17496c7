"""Deadlines through the whole engine: what a client gets when its time is up, or was too short from the start."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from aserve.core.errors import InvalidRequestError, OverloadedError, QueueTimeoutError
from aserve.core.outputs import DEADLINE, FinishReason
from aserve.core.params import SamplingParams
from aserve.engine import Engine
from aserve.http import create_app
from aserve.scheduler.scheduler import Scheduler
from tests.engines import says, scripted_loader
from tests.fakes import FakeClock, FakeScript, ScriptedRunner
from tests.http.conftest import client_of

PROMPT = {"prompt": "go on", "max_tokens": 100}
ANSWER = says("Hello, world! " * 9)


class Bench:
    """An engine that runs one request at a time, and whose steps land when they are let."""

    def __init__(self, request_timeout: float | None = None, max_num_queued_reqs: int | None = None) -> None:
        self.clock = FakeClock()
        self.runner = ScriptedRunner(model=FakeScript(ANSWER))
        load = scripted_loader(runner=self.runner)
        limits = {"block_size": 8, "num_blocks": 64, "max_num_batched_tokens": 64, "max_model_len": 128}
        self.scheduler = Scheduler(**limits, max_num_seqs=1, max_num_queued_reqs=max_num_queued_reqs)

        def parts(report):
            loaded = load(report)
            config = msgspec.structs.replace(loaded.config, request_timeout=request_timeout)
            return replace(loaded, scheduler=self.scheduler, config=config)

        self.engine = Engine(parts, clock=self.clock)

    async def steps(self, count: int) -> None:
        """Let the loop go round."""
        for _ in range(count):
            await asyncio.sleep(0)

    def held(self) -> tuple[int, int, int]:
        counts = self.engine.statistics()
        return counts.num_used_blocks, counts.num_running, counts.num_waiting


@asynccontextmanager
async def serving(**options):
    bench = Bench(**options)
    async with bench.engine, client_of(create_app(bench.engine)) as client:
        yield bench, client


async def test_at_its_deadline_an_answer_ends_with_what_it_has():
    async with (
        serving() as (bench, _),
        bench.engine.open("go on", SamplingParams(max_tokens=100), timeout_s=5.0) as box,
    ):
        first = await anext(box)
        bench.runner.hold()
        bench.clock.advance(5.0)
        *_, last = [first] + [delta async for delta in box]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, DEADLINE)
        assert bench.held() == (0, 0, 0)
        bench.runner.let_land()


async def test_it_does_so_although_no_step_lands():
    """The prompt's own step hangs: nothing but the clock can end it."""
    async with serving() as (bench, client):
        bench.runner.hold()
        asking = asyncio.create_task(client.post("/v1/completions", json=PROMPT | {"timeout_s": 5, "stream": True}))
        await bench.steps(50)
        bench.clock.advance(5.0)
        answer = await asking
        bench.runner.let_land()
    chunks = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert (answer.status_code, chunks[-1]) == (200, "[DONE]")
    choice = json.loads(chunks[-2])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "length", "deadline")


async def test_who_waited_in_vain_is_told_so_and_was_never_computed():
    async with serving() as (bench, client), bench.engine.open("go on", SamplingParams(max_tokens=100)) as box:
        bench.runner.hold()
        asking = asyncio.create_task(client.post("/v1/completions", json=PROMPT | {"timeout_s": 0.5}))
        await bench.steps(50)
        assert bench.held()[1:] == (1, 1)
        bench.clock.advance(0.5)
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
        assert "retry-after" in answer.headers
        bench.runner.let_land()
        assert len([delta async for delta in box]) > 0
        assert {piece.seq_id for plan in bench.runner.plans for piece in plan.slices} == {0}


@pytest.mark.parametrize(("timeout_s", "ends_s"), [(None, 3.0), (1.0, 1.0), (50.0, 3.0)])
async def test_the_servers_own_limit_holds_unless_the_requests_is_shorter(timeout_s, ends_s):
    async with serving(request_timeout=3.0) as (bench, _):
        bench.runner.hold()
        async with bench.engine.open("go on", timeout_s=timeout_s) as box:
            await bench.steps(5)
            assert bench.scheduler.expire(ends_s - 0.01) is None
            bench.clock.advance(ends_s)
            (last,) = [delta async for delta in box]
            assert last.stop_reason == DEADLINE
        bench.runner.let_land()


@pytest.mark.parametrize(("timeout_s", "ends_s"), [(None, 3.0), (1.0, 2.5), (50.0, 4.5)])
async def test_so_it_does_of_a_branch_from_when_that_came(timeout_s, ends_s):
    """Unless a time is given, a branch has the rest of its generation's."""
    async with serving(request_timeout=3.0) as (bench, _), bench.engine.open("go on") as origin:
        await anext(origin)
        bench.runner.hold()
        bench.clock.advance(1.5)
        async with bench.engine.fork(origin, 1, timeout_s=timeout_s):
            assert bench.scheduler.next_deadline_s == min(3.0, ends_s)
            bench.scheduler.expire(3.0)
            assert bench.scheduler.next_deadline_s == (ends_s if ends_s > 3.0 else float("inf"))
        bench.runner.let_land()


@pytest.mark.parametrize("timeout_s", [0, -1, 1.1e9, 1e30])
async def test_a_timeout_out_of_bounds_is_a_400_that_names_it(timeout_s):
    async with serving() as (bench, client):
        for path, body in (
            ("/v1/completions", PROMPT),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            answer = await client.post(path, json=body | {"timeout_s": timeout_s})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout_s")
        with pytest.raises(InvalidRequestError, match="timeout_s must be in"):
            bench.engine.check_room(timeout_s=float("nan"))


async def test_all_prompts_and_choices_of_a_request_end_with_what_they_have():
    async with serving() as (bench, client):
        body = PROMPT | {"prompt": ["go", "on"], "n": 2, "timeout_s": 5}
        bench.runner.hold()
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await bench.steps(50)
        bench.clock.advance(5.0)
        answer = await asking  # the first prompt's choices have begun, the second's have not
        assert answer.status_code == 503
        assert bench.held() == (0, 0, 0)
        bench.runner.let_land()


async def test_a_full_queue_refuses_before_it_looks_at_the_body():
    async with serving(max_num_queued_reqs=1) as (bench, client):
        bench.runner.hold()
        opened = [bench.engine.open("go on"), bench.engine.open("and on")]
        async with opened[0]:
            await bench.steps(5)
            async with opened[1]:
                answer = await client.post("/v1/completions", content=b"{ this is not JSON")
                assert (answer.status_code, answer.json()["error"]["code"]) == (429, "engine_overloaded")
                assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
        bench.runner.let_land()


async def test_a_wait_that_is_too_long_is_refused_before_a_prompt_is_rendered():
    async with serving() as (bench, client):
        bench.runner.hold()
        async with bench.engine.open("go on"):
            await bench.steps(5)
            async with bench.engine.open("x" * 100):
                for now, num_tokens in ((0.0, 0), (0.0, 10), (1.0, 0)):  # ten tokens a second
                    bench.scheduler._admission.throughput.planned(now, num_tokens, is_full=True)
                with pytest.raises(OverloadedError):
                    bench.engine.check_room(timeout_s=9.0)
                bench.engine.check_room(timeout_s=11.0)
                body = {"messages": [{"role": "user", "content": "x" * 200}], "timeout_s": 6}
                answer = await client.post("/v1/chat/completions", json=body)  # which could not fit, either
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")
        bench.runner.let_land()


async def test_an_engine_that_embeds_hears_of_it_by_name():
    async with serving() as (bench, _):
        bench.runner.hold()
        async with bench.engine.open("go on"):
            await bench.steps(5)
            async with bench.engine.open("and on", timeout_s=0.1) as box:
                bench.clock.advance(0.1)
                with pytest.raises(QueueTimeoutError):
                    await anext(box)
        bench.runner.let_land()
