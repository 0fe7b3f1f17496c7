"""A client who leaves, at whatever moment, frees all that was held for him, and nobody else notices."""

import asyncio

import pytest

from aserve.http import create_app
from tests.engines import scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.peer import Peer, until

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True})
TEXT = ("/v1/completions", {"prompt": "hi", "max_tokens": 100, "ignore_eos": True})
LIST = ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 100, "ignore_eos": True})
GROUP = ("/v1/completions", {**TEXT[1], "n": 4})
EVERY_ROUTE = pytest.mark.parametrize(
    ("path", "body"), [CHAT, TEXT, LIST, GROUP], ids=["chat", "text", "list", "group"]
)
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture
def runner():
    return ScriptedRunner(model=FakeScript(b"endless "))


@pytest.fixture
async def engine(runner):
    async with scripted_engine(runner=runner, max_num_seqs=3) as engine:
        before = asyncio.all_tasks()
        yield engine
        runner.let_land()
        await until(lambda: held(engine) == (0, 0, 0))
        assert asyncio.all_tasks() <= before | {asyncio.current_task()}


def held(engine):
    statistics = engine.statistics()
    return statistics.num_used_blocks, statistics.num_running, statistics.num_waiting


@EVERY_ROUTE
@BOTH_WAYS
async def test_leaving_while_running(engine, runner, path, body, stream):
    runner.hold()
    peer = Peer(create_app(engine), path, {**body, "stream": stream})
    task = peer.start()
    await until(lambda: engine.statistics().num_running > 0)
    peer.leave()
    await task
    assert peer.sent == []
    assert held(engine) == (0, 0, 0)


@EVERY_ROUTE
@BOTH_WAYS
async def test_leaving_while_queued(engine, runner, path, body, stream):
    runner.hold()
    app = create_app(engine)
    others = [Peer(app, *TEXT) for _ in range(3)]
    tasks = [other.start() for other in others]
    await until(lambda: engine.statistics().num_running == 3)
    before = held(engine)
    peer = Peer(app, path, {**body, "stream": stream})
    task = peer.start()
    await until(lambda: engine.statistics().num_waiting > 0)
    peer.leave()
    await task
    assert held(engine) == before
    runner.let_land()
    await asyncio.gather(*tasks)
    assert {other.text.count("endless endless") for other in others} == {6}


@EVERY_ROUTE
async def test_leaving_in_the_midst_of_a_stream(engine, path, body):
    peer = Peer(create_app(engine), path, {**body, "stream": True})
    task = peer.start()
    await peer.receive_messages(10)
    peer.leave()
    await task
    assert "[DONE]" not in peer.text
    assert held(engine) == (0, 0, 0)


async def test_leaving_while_the_client_does_not_read(engine):
    peer = Peer(create_app(engine), CHAT[0], {**CHAT[1], "stream": True})
    task = peer.start()
    await peer.receive_messages(3)
    peer.stop_reading()
    peer.leave()
    await task
    assert held(engine) == (0, 0, 0)


async def test_leaving_before_the_body_has_come(engine):
    peer = Peer(create_app(engine), CHAT[0], None)
    task = peer.start()
    peer.leave()
    await task
    assert peer.sent == []


async def test_a_send_that_says_that_the_connection_is_closed(engine):
    """ASGI 2.4: an OSError. The request ends without a word to the server's error log."""
    await Peer(create_app(engine), CHAT[0], {**CHAT[1], "stream": True}, breaks_after=3).start()
    assert held(engine) == (0, 0, 0)


async def test_a_server_that_cancels_the_request_frees_it_too(engine, runner):
    runner.hold()
    task = Peer(create_app(engine), *LIST).start()
    await until(lambda: engine.statistics().num_running > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held(engine) == (0, 0, 0)


async def test_a_stalled_reader_gets_the_rest_in_fewer_pieces(engine):
    peer = Peer(create_app(engine), CHAT[0], {**CHAT[1], "stream": True})
    task = peer.start()
    await peer.receive_messages(3)
    peer.stop_reading()
    await until(lambda: held(engine) == (0, 0, 0))
    peer.read_on()
    await task
    assert len(peer.sent) < 10
    assert peer.text.endswith("data: [DONE]\n\n")
