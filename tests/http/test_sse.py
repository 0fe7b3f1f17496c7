"""The stream itself: keep-alive comments, clients who do not read, errors when the status is already sent."""

import asyncio

import pytest

from aserve.core.errors import UnavailableError
from aserve.http import sse
from aserve.http.connection import ClientGone, while_connected
from aserve.http.direct import DirectLine
from aserve.http.openai.chunks import DONE, Chunks
from aserve.http.sse import EventStream, StreamLimits, event

SCOPE = {"type": "http", "method": "POST"}


class Frames:
    """An async iterator that is fed by hand."""

    def __init__(self):
        self.queue = asyncio.Queue()

    def __aiter__(self):
        return self

    async def __anext__(self):
        item = await self.queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item


async def run(stream, sent):
    async def send(message):
        sent.append(message)

    await stream(SCOPE, asyncio.Queue().get, send)


def body_of(sent):
    assert sent[0]["type"] == "http.response.start"
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    return [message["body"] for message in sent[1:-1]]


def stream_of(frames, limits=None):
    return EventStream(b"a", frames, limits or StreamLimits(), Chunks(b"").failure)


async def test_each_piece_is_one_message():
    frames, sent = Frames(), []
    for item in (b"b", b"c", None):
        frames.queue.put_nowait(item)
    await run(stream_of(frames), sent)
    assert body_of(sent) == [b"a", b"b", b"c"]


async def test_silence_is_broken_by_comments():
    frames, sent = Frames(), []

    async def send(message):
        sent.append(message)
        if len(sent) == 4:
            frames.queue.put_nowait(None)

    await stream_of(frames, StreamLimits(ping_s=0.01))(SCOPE, asyncio.Queue().get, send)
    assert body_of(sent)[:3] == [b"a", b": keep-alive\n\n", b": keep-alive\n\n"]


@pytest.mark.parametrize("limits", [StreamLimits(15.0, 0.01), StreamLimits(0.01, 0.02)], ids=["data", "ping"])
async def test_a_client_that_does_not_read_is_given_up(limits):
    frames = Frames()

    async def send(message):
        if message.get("body") in (b"b", b": keep-alive\n\n"):
            await asyncio.Event().wait()

    if limits.ping_s > 1:
        frames.queue.put_nowait(b"b")
    with pytest.raises(ClientGone):
        await stream_of(frames, limits)(SCOPE, asyncio.Queue().get, send)


async def test_an_error_is_the_last_event_before_done():
    frames, sent = Frames(), []
    frames.queue.put_nowait(UnavailableError("it has stopped"))
    await run(stream_of(frames), sent)
    error = b'{"error":{"message":"it has stopped","type":"server_error","param":null,"code":"engine_unavailable"}}'
    assert body_of(sent) == [b"a", event(error) + DONE]


async def test_an_unforeseen_error_says_nothing_of_its_cause(caplog):
    frames, sent = Frames(), []
    frames.queue.put_nowait(ValueError("the prompt was: secret"))
    await run(stream_of(frames), sent)
    assert b"internal error" in body_of(sent)[1]
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text + repr(sent)


async def test_a_client_that_leaves_ends_the_block_quietly():
    incoming = asyncio.Queue()
    incoming.put_nowait({"type": "http.disconnect"})
    reached = []
    async with while_connected(incoming.get):
        reached.append("in")
        await asyncio.Event().wait()
        reached.append("never")
    assert reached == ["in"]


async def test_a_block_that_ends_first_leaves_no_watcher():
    before = asyncio.all_tasks()
    async with while_connected(asyncio.Queue().get):
        pass
    assert asyncio.all_tasks() == before


async def test_what_is_written_directly_breaks_the_silence_as_well(monkeypatch):
    """Caught: `self._since_s = self._time()` removed from `write_now`: comments would come between tokens."""
    stream = stream_of(Frames(), StreamLimits(ping_s=15.0))
    line, now, turn, slept = DirectLine(), 100.0, asyncio.sleep, []

    async def sleep(seconds):
        slept.append(seconds)
        await asyncio.Event().wait()

    monkeypatch.setattr(sse.asyncio, "sleep", sleep)
    stream._time = lambda: now
    stream._line = line
    line.connect(lambda: True, lambda piece: True)
    assert stream.write_now(b"token")
    now = 110.0
    keeper = asyncio.create_task(stream._keep_alive(None))
    while not slept:
        await turn(0)
    keeper.cancel()
    assert slept == [5.0], "a comment is due 15 s after the token, and 10 s have passed"
