"""A carried request through a real application: pieces, the direct line, and what happens when it is left."""

import asyncio

import pytest

from aserve.http import create_app
from aserve.ray import exchange
from aserve.ray.carried import Carried, Head, Tail
from aserve.ray.exchange import MAX_BEHIND_BYTES, Exchange
from tests.engines import says, scripted_engine
from tests.fakes import FakeScript, ScriptedRunner

BODY = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}'
HEADERS = ((b"content-type", b"application/json"), (b"host", b"aserve"))


def carried(body: bytes = BODY) -> Carried:
    path = "/v1/chat/completions"
    return Carried(method="POST", path=path, raw_path=path.encode(), headers=HEADERS, body=body, request_id="r")


async def items_of(app, request: Carried) -> list:
    return [item async for item in Exchange(app, request, "a").items()]


async def test_an_answer_is_a_head_pieces_and_a_tail():
    """Catches a token that the direct line loses, or says out of its turn."""
    async with scripted_engine() as engine:
        head, *pieces, tail = await items_of(create_app(engine), carried())
    assert isinstance(head, Head)
    assert (head.status, head.replica, tail) == (200, "a", Tail(None))
    events = b"".join(pieces).split(b"\n\n")
    contents = [event.partition(b'"content":"')[2].partition(b'"')[0] for event in events if b'"content":"' in event]
    assert b"".join(contents) == b"Hello, world!"
    assert events[-2:] == [b"data: [DONE]", b""]


async def test_an_error_is_an_answer():
    async with scripted_engine() as engine:
        head, piece, tail = await items_of(create_app(engine), carried(b'{"messages": 3}'))
    assert (head.status, tail.error) == (400, "invalid_request_error")
    assert b'"param":"messages"' in piece


async def test_leaving_cancels_in_the_engine():
    """Catches a replica that computes for nobody."""
    runner = ScriptedRunner(model=FakeScript(says("x" * 100)))
    async with scripted_engine(runner=runner) as engine:
        items = Exchange(create_app(engine), carried(), "a").items()
        assert isinstance(await anext(items), Head)
        assert engine.statistics().num_running == 1
        await items.aclose()
        for _ in range(100):
            await asyncio.sleep(0)
        assert engine.statistics().num_running == 0


async def test_pieces_that_nobody_takes_are_one_when_somebody_does_and_have_an_end():
    """Catches memory that grows with a stream that is not taken."""
    sent = []

    async def application(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for index in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 1024, "more_body": True})
            sent.append(index)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    items = Exchange(application, carried(), "a").items()
    await anext(items)
    for _ in range(2000):
        await asyncio.sleep(0)
    assert len(sent) <= MAX_BEHIND_BYTES // 1024 + 2
    first = await anext(items)
    assert len(first) > MAX_BEHIND_BYTES
    rest = [item async for item in items]
    assert sum(len(item) for item in [first, *rest[:-1]]) == 1000 * 1024
    assert rest[-1] == Tail()


async def test_who_leaves_waits_until_the_application_has_ended(monkeypatch):
    """Catches work that goes on behind a request that is over, and an error that nobody has looked at."""
    monkeypatch.setattr(exchange, "LEAVE_S", 0.0)
    ended = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            ended.append(True)

    items = Exchange(application, carried(), "a").items()
    assert isinstance(await anext(items), Head)
    await items.aclose()
    assert ended == [True]


async def test_what_the_application_raises_is_raised():
    async def application(scope, receive, send):
        raise LookupError("no")

    with pytest.raises(LookupError):
        await items_of(application, carried())
