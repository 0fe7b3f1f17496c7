"""Requests with an Idempotency-Key: answered once, and the same way again."""

import asyncio

import pytest

from aserve.core.config import EngineConfig
from aserve.http import AppOptions, create_app
from aserve.http.idempotency import Idempotency
from aserve.stores.idempotency import IdempotencyStore
from tests.engines import says, scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.conftest import client_of

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 1.0}
KEY = {"Idempotency-Key": "order 66"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_same_answer(client, stream):
    """Catches a second computation, and an answer that is put together otherwise than it was."""
    body = {**CHAT, "stream": stream}
    answers = [await client.post("/v1/chat/completions", json=body, headers=KEY) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.content for answer in answers}) == 1  # the id among it, which is random
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, "true", "true"]
    other = await client.post("/v1/chat/completions", json=body, headers={"Idempotency-Key": "another"})
    assert other.content != answers[0].content
    assert "idempotent-replayed" not in (await client.post("/v1/chat/completions", json=body)).headers


async def test_another_request_under_the_same_key_is_refused(client):
    first = await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
    other = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}, headers=KEY)
    assert (first.status_code, other.status_code) == (200, 422)
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    elsewhere = await client.post("/v1/completions", json={"prompt": "Hi"}, headers=KEY)
    assert elsewhere.status_code == 200  # a key is of one path


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\u00e9"])
async def test_a_key_has_bounds(client, key):
    headers = [(b"idempotency-key", key.encode())]
    answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency-key")


async def test_what_failed_is_tried_again(client):
    bad = {**CHAT, "max_tokens": -1}
    first = await client.post("/v1/chat/completions", json=bad, headers=KEY)
    assert first.status_code == 400
    again = await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
    assert (again.status_code, again.headers.get("idempotent-replayed")) == (200, None)


async def test_nobody_finds_anothers_answer():
    """Catches a key that is looked for without whose it is."""
    async with scripted_engine() as engine, client_of(create_app(engine, api_keys=["one", "two"])) as client:
        answers = []
        for key in ("one", "two", "one"):
            headers = {**KEY, "Authorization": f"Bearer {key}"}
            answers.append(await client.post("/v1/chat/completions", json=CHAT, headers=headers))
        assert answers[0].content == answers[2].content != answers[1].content
        refused = await client.post("/v1/chat/completions", json=CHAT, headers={**KEY, "Authorization": "Bearer x"})
        assert refused.status_code == 401


async def test_without_room_for_answers_the_header_says_nothing():
    options = AppOptions(idempotency_bytes=0)
    async with scripted_engine() as engine, client_of(create_app(engine, options=options)) as client:
        answers = [await client.post("/v1/chat/completions", json=CHAT, headers=KEY) for _ in range(2)]
        assert answers[0].content != answers[1].content


class Talker:
    """An application that says what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.has_left = False
        self.words: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def __call__(self, scope, receive, send) -> None:
        self.num_calls += 1
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.create_task(receive())
        while True:
            word = asyncio.create_task(self.words.get())
            await asyncio.wait({word, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not word.done():
                self.has_left = True
                word.cancel()
                return
            await send({"type": "http.response.body", "body": word.result() or b"", "more_body": bool(word.result())})
            if word.result() is None:
                leaving.cancel()
                return


class Client:
    """One connection, which may be closed at any time."""

    def __init__(self, app, body: bytes = b"{}") -> None:
        self.got: list[bytes] = []
        self.is_whole = False
        self._messages: asyncio.Queue[dict] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        headers = [(b"idempotency-key", b"k")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        self.task = asyncio.create_task(app(scope, self._messages.get, self._send))

    async def _send(self, message) -> None:
        if message["type"] == "http.response.body":
            self.got.append(message.get("body", b""))
            self.is_whole = not message.get("more_body", False)

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def has(self, content: bytes) -> None:
        for _ in range(1000):
            if b"".join(self.got) == content:
                return
            await asyncio.sleep(0)
        raise AssertionError(b"".join(self.got))


async def test_who_comes_back_finds_it_going_on():
    """Catches a request that ends with its first client, or is asked for twice."""
    talker = Talker()
    app = Idempotency(talker, IdempotencyStore(), linger_s=60.0)
    first = Client(app)
    talker.words.put_nowait(b"one ")
    await first.has(b"one ")
    first.leave()
    await first.task
    talker.words.put_nowait(b"two ")
    second, third = Client(app), Client(app)
    await second.has(b"one two ")
    talker.words.put_nowait(None)
    await asyncio.gather(second.task, third.task)
    assert second.is_whole
    assert b"".join(third.got) == b"one two "
    assert (talker.num_calls, talker.has_left) == (1, False)


async def test_what_nobody_comes_back_for_is_cancelled():
    """Catches a computation for nobody, and a key that is lost with it."""
    talker = Talker()
    app = Idempotency(talker, IdempotencyStore(), linger_s=0.0)
    first = Client(app)
    talker.words.put_nowait(b"one ")
    await first.has(b"one ")
    first.leave()
    await first.task
    for _ in range(100):
        await asyncio.sleep(0)
    assert talker.has_left
    second = Client(app)
    talker.words.put_nowait(b"anew")
    await second.has(b"anew")
    talker.words.put_nowait(None)
    await second.task
    assert talker.num_calls == 2


@pytest.mark.parametrize("call", ["find", "begin", "settle"])
async def test_a_store_that_raises_ends_that_request_alone(call):
    """Catches a fault that a later request meets, or that nobody is told of."""

    class Broken(IdempotencyStore):
        is_broken = True

        def __getattribute__(self, name):
            if name == call and IdempotencyStore.__getattribute__(self, "is_broken"):
                raise LookupError("broken")
            return IdempotencyStore.__getattribute__(self, name)

    store, talker = Broken(), Talker()
    app = Idempotency(talker, store)
    talker.words.put_nowait(b"one")
    talker.words.put_nowait(None)
    first = Client(app)
    if call == "settle":  # the answer is whole by then
        await first.task
        assert first.is_whole
    else:
        with pytest.raises(LookupError):
            await first.task
    store.is_broken = False
    for word in (b"two", None):
        talker.words.put_nowait(word)
    again = Client(app, b"{}")
    await again.task
    assert again.is_whole


async def test_a_stream_that_ends_with_an_error_is_not_kept():
    """Catches an error that a retry gets for an hour."""
    runner = ScriptedRunner(model=FakeScript(says("Hello")))
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        assert isinstance(engine.config, EngineConfig)
        body = {**CHAT, "stream": True}
        runner.hold()
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=KEY))
        for _ in range(200):
            await asyncio.sleep(0)
        await engine.aclose()
        runner.let_land()
        first = await asking
        assert b"error" in first.content
        again = await client.post("/v1/chat/completions", json=body, headers=KEY)
        assert (again.status_code, again.headers.get("idempotent-replayed")) == (503, None)
