"""A server's life, in this process, over a scripted engine: H3 and H4 of Hypercorn's facts, and the exit codes."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from aserve.core.errors import CheckpointError
from aserve.core.plan import StepResult
from aserve.engine import Engine, EngineState
from aserve.http import create_app
from aserve.server import Server, ServerConfig, lifecycle
from aserve.server.connections import Connections
from tests.engines import says, scripted_engine, scripted_loader
from tests.fakes import FakeScript, ScriptedRunner
from tests.server.wire import Answer, Client, request, until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class PausingRunner(ScriptedRunner):
    """Stops after a few steps until it is told to go on, so that a request can be caught under way."""

    def launch(self, plan):
        if len(self.plans) == 4:
            self.hold()
        return super().launch(plan)


@dataclass
class Run:
    """A server that runs, what it said, and its clients."""

    server: Server
    lines: list[str]
    task: asyncio.Task[int]
    clients: list[Client] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.lines[0].rpartition(":")[2])

    async def connect(self) -> Client:
        self.clients.append(await Client.connect(self.port))
        return self.clients[-1]

    async def exit_code(self) -> int:
        async with asyncio.timeout(60):
            return await self.task


@asynccontextmanager
async def running(engine: Engine, *, ready: bool = True, **config: object) -> AsyncGenerator[Run]:
    tasks_before = asyncio.all_tasks()
    lines: list[str] = []
    loaded = asyncio.Event()

    def on_ready(url: str) -> None:
        assert lines == [f"aserve: listening on {url}"]
        loaded.set()

    server = Server(
        engine, create_app(engine), ServerConfig(**{"port": 0, **config}), on_ready=on_ready, say=lines.append
    )
    run = Run(server, lines, asyncio.create_task(server.run()))
    try:
        await until(lambda: bool(lines) or run.task.done())
        if ready:
            async with asyncio.timeout(60):
                await loaded.wait()
        yield run
    finally:
        for client in run.clients:
            await client.close()
        server.stop()
        server.stop()
        await asyncio.wait({run.task})
        assert asyncio.all_tasks() <= tasks_before


def chat(*, stream: bool) -> bytes:
    body = json.dumps({**CHAT, "stream": stream}).encode()
    return request(b"/v1/chat/completions", b"POST", b"Content-Type: application/json", body=body)


async def begin_stream(run: Run) -> Client:
    """A client whose stream has begun."""
    client = await run.connect()
    assert (await client.ask_head(chat(stream=True))).status == 200
    assert b'"role":"assistant"' in await client.chunk()
    return client


def paused_engine() -> tuple[Engine, ScriptedRunner]:
    runner = PausingRunner(model=FakeScript(says("a long answer")))
    return scripted_engine(runner=runner), runner


def loading_engine(go_on: threading.Event) -> Engine:
    def load(report):
        go_on.wait(10)
        return scripted_loader()(report)

    return Engine(load)


async def test_the_socket_answers_while_the_model_loads():
    go_on = threading.Event()
    engine = loading_engine(go_on)
    async with running(engine, ready=False) as run:
        client = await run.connect()
        assert (await client.ask(request(b"/health"))).status == 200
        answer = await client.ask(request(b"/ready"))
        assert (answer.status, "retry-after" in answer.headers) == (503, True)
        assert (await client.ask(chat(stream=False))).status == 503
        go_on.set()
        await until(lambda: engine.state is EngineState.READY)
        assert (await client.ask(request(b"/ready"))).status == 200
        run.server.stop()
        assert await run.exit_code() == 0
    assert engine.state is EngineState.CLOSED


async def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1():
    def load(report):
        raise CheckpointError("no-such-model: there is no such folder")

    async with running(Engine(load), ready=False) as run:
        assert await run.exit_code() == 1
        assert run.lines[1:] == ["aserve: no-such-model: there is no such folder"]


async def test_a_port_in_use_is_one_line_and_exit_code_1():
    async with running(scripted_engine()) as first, running(scripted_engine(), ready=False, port=first.port) as second:
        assert await second.exit_code() == 1
        (line,) = second.lines
        assert f"127.0.0.1:{first.port}" in line
        assert "in use" in line


async def test_stopping_while_the_model_loads_does_not_wait_for_it():
    go_on = threading.Event()
    async with running(loading_engine(go_on), ready=False) as run:
        run.server.stop()
        assert await run.exit_code() == 0
        assert run.server.left_behind
        go_on.set()


async def test_a_server_with_nothing_to_do_stops_at_once():
    async with running(scripted_engine()) as run:
        client = await run.connect()
        assert (await client.ask(request(b"/health"))).status == 200
        run.server.stop()
        assert await run.exit_code() == 0
        assert not run.server.left_behind
        assert await client.rest() == b""


async def test_what_was_written_is_taken_before_the_server_ends(monkeypatch):
    """Catches an end that drops what a client who reads slowly has not been sent yet of its answer."""
    num_cut = []

    class Noted(Connections):
        def abort(self) -> None:
            num_cut.append(len(self))
            super().abort()

    monkeypatch.setattr(lifecycle, "Connections", Noted)
    async with running(scripted_engine()) as run:
        client = await run.connect()
        assert (await client.ask(request(b"/health"))).status == 200
        run.server.stop()
        assert await run.exit_code() == 0
    assert num_cut == [0]


async def test_h3_h4_a_stream_under_way_is_finished_and_new_requests_are_refused():
    engine, runner = paused_engine()
    async with running(engine) as run:
        idle = await run.connect()
        assert (await idle.ask(request(b"/ready"))).status == 200
        waiting = await run.connect()
        assert (await waiting.ask(request(b"/ready"))).status == 200
        streaming = await begin_stream(run)
        run.server.stop()
        await until(lambda: engine.state is EngineState.DRAINING)
        with pytest.raises(ConnectionRefusedError):
            await run.connect()
        for client, asked in ((idle, request(b"/ready")), (waiting, chat(stream=True))):
            answer = await client.ask(asked)
            assert answer.status == 503
            assert (answer.headers["connection"], "retry-after" in answer.headers) == ("close", True)
            assert answer.error["code"] == "engine_unavailable"
        assert not run.task.done()
        runner.let_land()
        rest = await streaming.chunks()
        assert b'"finish_reason":"stop"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await run.exit_code() == 0
    assert "finishing 1 request" in run.lines[1]


async def test_h3_h4_at_the_deadline_a_stream_gets_an_error_and_its_proper_end():
    engine, _ = paused_engine()
    async with running(engine, drain_timeout_s=0.05) as run:
        streaming = await begin_stream(run)
        whole = await run.connect()
        await whole.send(chat(stream=False))
        await until(lambda: engine.statistics().num_running + engine.statistics().num_waiting == 2)
        run.server.stop()
        *_, error, done, end = (await streaming.chunks()).split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
        assert (done, end) == (b"data: [DONE]", b"")
        answer: Answer = await whole.answer()
        assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
        assert await run.exit_code() == 0
    assert "ending 2 requests" in run.lines[2]


async def test_a_second_signal_stops_at_once():
    engine, _ = paused_engine()
    async with running(engine, drain_timeout_s=60) as run:
        streaming = await begin_stream(run)
        run.server.stop(signal.SIGTERM)
        await until(lambda: engine.state is EngineState.DRAINING)
        run.server.stop(signal.SIGINT)
        assert await run.exit_code() == 128 + signal.SIGINT
        with pytest.raises(asyncio.IncompleteReadError):
            await streaming.chunks()
    assert engine.state is EngineState.CLOSED


async def test_in_the_delay_only_ready_says_no():
    engine, runner = paused_engine()
    async with running(engine, drain_delay_s=60) as run:
        streaming = await begin_stream(run)
        run.server.stop(signal.SIGTERM)
        await until(lambda: len(run.lines) == 2)
        assert "requests are taken for 60 s more" in run.lines[1]
        client = await run.connect()
        answer = await client.ask(request(b"/ready"))
        assert (answer.status, answer.error["code"], "retry-after" in answer.headers) == (
            503,
            "engine_unavailable",
            True,
        )
        for path in (b"/health", b"/metrics", b"/v1/models"):
            assert (await client.ask(request(path))).status == 200
        runner.let_land()
        assert (await client.ask(chat(stream=False))).status == 200
        assert (await streaming.chunks()).endswith(b"data: [DONE]\n\n")
        assert not run.task.done()
        run.server.stop(signal.SIGTERM)
        assert await run.exit_code() == 128 + signal.SIGTERM


async def test_after_the_delay_the_listener_closes_and_what_is_open_is_finished():
    engine, runner = paused_engine()
    async with running(engine, drain_delay_s=0.01) as run:
        streaming = await begin_stream(run)
        run.server.stop(signal.SIGTERM)
        await until(lambda: engine.state is EngineState.DRAINING)
        with pytest.raises(ConnectionRefusedError):
            await run.connect()
        runner.let_land()
        assert (await streaming.chunks()).endswith(b"data: [DONE]\n\n")
        assert await run.exit_code() == 0


async def test_ctrl_c_spares_the_delay_and_says_what_it_waits_for_again_and_again():
    engine, runner = paused_engine()
    async with running(engine, drain_delay_s=60, tell_every_s=0.01) as run:
        streaming = await begin_stream(run)
        run.server.stop(signal.SIGINT)
        await until(lambda: len(run.lines) >= 4)
        assert run.lines[1:4] == [
            "aserve: finishing 1 request; 30 s at most, Ctrl-C again to stop at once",
            "aserve: 1 request still open; 30 s left",
            "aserve: 1 request still open; 30 s left",
        ]
        runner.let_land()
        assert (await streaming.chunks()).endswith(b"data: [DONE]\n\n")
        assert await run.exit_code() == 0


async def test_a_path_can_be_listened_on_and_is_removed(tmp_path):
    path = tmp_path / "aserve.sock"
    for _ in range(2):
        async with running(scripted_engine(), uds=str(path)) as run:
            assert run.lines == [f"aserve: listening on unix:{path}"]
            client = Client(*await asyncio.open_unix_connection(path))
            assert (await client.ask(request(b"/ready"))).status == 200
            await client.close()
        assert not path.exists()


class FatalRunner(ScriptedRunner):
    """Launches a few steps; then lands one that nobody planned, which no scheduler can make sense of."""

    def launch(self, plan):
        flight = super().launch(plan)
        return FatalFlight(flight) if len(self.plans) == 4 else flight


class FatalFlight:
    def __init__(self, flight):
        self._flight = flight

    async def land(self):
        result = await self._flight.land()
        return StepResult(result.step_id + 100, result.token_ids)


async def test_a_dead_engine_ends_the_server_with_one_line_and_an_exit_code_of_its_own(caplog):
    engine = scripted_engine(runner=FatalRunner(model=FakeScript(says("a long answer"))))
    async with running(engine) as run:
        streaming = await begin_stream(run)
        *_, error, done, end = (await streaming.chunks()).split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
        assert (done, end) == (b"data: [DONE]", b"")
        assert await run.exit_code() == 70
        assert engine.state is EngineState.DEAD
        assert run.lines[1:] == [
            "aserve: the engine died (AssertionError, see above); the server ends with exit code 70"
        ]
        access, record = caplog.records
        assert (access.name, access.fields["error"]) == ("aserve.access", "engine_unavailable")
        assert (record.name, record.levelname) == ("aserve.server.lifecycle", "CRITICAL")
        assert "landed before" not in caplog.text


async def test_a_signal_more_leaves_a_server_that_does_not_stop_a_tenth_of_a_second(monkeypatch):
    """In a thread that does not keep the process: what hangs is left behind."""
    timers = []

    class Timer:
        daemon = False

        def __init__(self, *given: object) -> None:
            self.given = given
            timers.append(self)

        def start(self) -> None:
            self.given += (self.daemon,)

    class Stubborn:
        stopping = False

        def stop(self, signum: int) -> None:
            self.stopping = True

        async def run(self) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: self.stopping)
            assert not timers
            os.kill(os.getpid(), signal.SIGINT)
            await until(lambda: bool(timers))
            return 7

    monkeypatch.setattr(lifecycle, "threading", SimpleNamespace(Timer=Timer))
    assert await lifecycle.run_until_signal(Stubborn()) == 7
    assert [each.given for each in timers] == [(lifecycle.BACKSTOP_S, os._exit, [128 + signal.SIGINT], True)]
