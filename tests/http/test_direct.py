"""The direct line changes who writes, and no byte of what is written."""

import json
import re

import pytest

from aserve.http import create_app
from aserve.http.direct import STATE_KEY, DirectLine, direct_line
from aserve.http.openai.chat import ChatWire
from aserve.http.openai.completions import TextWire
from tests.engines import says, scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.server.wire import reply, request, serving, until

ANSWER = says("The answer \N{EN DASH} caf\u00e9, \U0001f600 and more \u2014 in full.")
TEXT = (b"/v1/completions", {"prompt": "hi", "max_tokens": 90})
CHAT = (b"/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})


def without_line(app):
    """The slow twin: an application whose server offers no line."""

    async def plain(scope, receive, send):
        scope.get("state", {}).pop(STATE_KEY, None)
        await app(scope, receive, send)

    return plain


def rewriting(app):
    """A layer that makes other bodies, as one that compresses would, though these say the same."""

    async def rewritten(scope, receive, send):
        async def send_other(message):
            if "body" in message:
                message = {**message, "body": bytes(bytearray(message["body"]))}
            await send(message)

        await app(scope, receive, send_other)

    return rewritten


class Counting:
    """Counts the messages that an application sends."""

    def __init__(self, app):
        self._app = app
        self.num_sent = 0

    async def __call__(self, scope, receive, send):
        async def send_counted(message):
            self.num_sent += 1
            await send(message)

        await self._app(scope, receive, send_counted)


async def streamed(app, path, fields):
    """The bytes of a stream, but for what differs between two runs of the same."""
    body = json.dumps({**fields, "stream": True}).encode()
    async with serving(app) as site:
        asked = request(path, b"POST", b"Content-Type: application/json", b"X-Request-Id: same", body=body)
        answer = await site.ask(asked)
    assert answer.status == 200
    return re.sub(rb'"created":[0-9]+', b"", answer.body)


@pytest.mark.parametrize(("path", "fields"), [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2},
        {"stop": ["more"]},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": True},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
async def test_with_the_line_and_without_it_a_stream_is_the_same(path, fields, options):
    async with scripted_engine(ANSWER) as engine:
        app = create_app(engine)
        counted, twin = Counting(app), Counting(without_line(app))
        directly = await streamed(counted, path, {**fields, **options})
        assert directly == await streamed(twin, path, {**fields, **options})
        assert counted.num_sent < 10 < twin.num_sent


@pytest.mark.parametrize(("path", "fields", "wire"), [(*TEXT, TextWire), (*CHAT, ChatWire)], ids=["text", "chat"])
async def test_most_tokens_are_put_between_the_two_halves_of_a_chunk(monkeypatch, path, fields, wire):
    spelled = []
    delta_of = wire.delta
    monkeypatch.setattr(wire, "delta", lambda self, delta, usage: spelled.append(delta) or delta_of(self, delta, usage))
    async with scripted_engine(ANSWER) as engine:
        app = create_app(engine)
        directly = await streamed(app, path, fields)
        assert directly.count(b"data: {") > 30
        assert len(spelled) < 25  # the first, the last and those that are parts of characters


async def test_a_layer_that_rewrites_bodies_is_not_passed_by():
    async with scripted_engine(ANSWER) as engine:
        app = create_app(engine)
        passed = Counting(rewriting(app))
        assert await streamed(passed, *TEXT) == await streamed(without_line(app), *TEXT)
        assert passed.num_sent > 30


async def test_a_reader_who_lags_gets_everything_in_fewer_pieces():
    text = "word " * 1600
    async with scripted_engine(says(text), max_model_len=10_000, num_blocks=2_000) as engine:
        app = Counting(create_app(engine))
        async with serving(app) as site:
            client = await site.connect(receive_buffer_bytes=4096)
            body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 9_000}).encode()
            await client.send(request(b"/v1/completions", b"POST", b"Content-Type: application/json", body=body))
            await until(lambda: engine.statistics().num_running == 1)
            await until(lambda: engine.statistics().num_running == 0)  # the answer is complete, and nobody has read it
            assert (await client.head()).status == 200
            *events, done, end = (await client.chunks()).split(b"\n\n")
            assert (done, end) == (b"data: [DONE]", b"")
    texts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == text
    assert len(texts) < len(text)
    assert max(map(len, texts)) > 1000


async def test_a_client_who_leaves_a_direct_stream_frees_what_it_held():
    runner = ScriptedRunner(model=FakeScript(b"endless "))
    async with scripted_engine(runner=runner, max_model_len=100_000, num_blocks=20_000) as engine:
        async with serving(create_app(engine)) as site:
            client = await site.connect()
            body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 90_000, "ignore_eos": True}).encode()
            await client.send(request(b"/v1/completions", b"POST", b"Content-Type: application/json", body=body))
            await client.head()
            for _ in range(5):
                await client.chunk()
            client.reset()
            await until(lambda: engine.statistics().num_used_blocks == 0)
        assert not engine.statistics().num_running


@pytest.mark.parametrize(
    ("head", "headers", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", [], True),
        (b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n", [], False),
        (b"GET / HTTP/1.0\r\n\r\n", [], False),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", [(b"content-length", b"5")], False),
    ],
    ids=["chunked", "head", "http 1.0", "of known length"],
)
async def test_the_line_is_open_only_for_bodies_in_chunks(head, headers, expected):
    open_lines = []

    async def app(scope, receive, send):
        line = direct_line(scope)
        line.request(first := b"first")
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        open_lines.append(line.is_clear())
        await send({"type": "http.response.body", "body": b""})
        assert not line.is_clear()

    async with serving(app) as site:
        client = await site.connect()
        await client.send(head)
        await until(lambda: bool(open_lines))
        await client.close()
    assert open_lines == [expected]


async def test_the_line_of_a_connection_serves_one_response_after_another():
    async def app(scope, receive, send):
        if scope["path"] == "/whole":
            await reply(send, 200, b"whole")
            return
        line = direct_line(scope)
        line.request(first := b"a")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        assert line.is_clear()
        assert line.write(b"b" * 300)
        await send({"type": "http.response.body", "body": b"c"})

    async with serving(app) as site:
        client = await site.connect()
        for path, expected in (
            (b"/", b"a" + b"b" * 300 + b"c"),
            (b"/whole", b"whole"),
            (b"/", b"a" + b"b" * 300 + b"c"),
        ):
            assert (await client.ask(request(path))).body == expected


def test_a_dead_line_is_never_clear_and_takes_nothing():
    line = DirectLine()
    assert not line.is_clear()
    assert not line.write(b"x")


def test_other_servers_have_no_line():
    assert direct_line({"type": "http"}) is None
    assert direct_line({"type": "http", "state": {STATE_KEY: "something else"}}) is None
