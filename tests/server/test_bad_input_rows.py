"""Bad input over a raw socket, row by row, against the whole application: what comes back, that nothing hidden in it is
executed, and that a neighbour's stream and the next request are as if it had not been there.
"""

import asyncio
import json
from typing import NamedTuple

import pytest

from aserve.http import create_app
from tests.engines import says, scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.server.wire import Client, Site, num_files, request, serving, until

KEY = b"Authorization: Bearer key"
JSON = b"Content-Type: application/json"
CHUNKED = b"Transfer-Encoding: chunked"
COMPLETIONS = b"/v1/completions"
SMUGGLED = request(b"/v1/smuggled", b"GET", KEY)
PROMPT = b'{"prompt": "hi", "max_tokens": 1}'


class Row(NamedTuple):
    """What is sent, and the status that it gets, always as the client's mistake."""

    data: bytes
    status: int


def get(target: bytes = b"/v1/models", *headers: bytes) -> bytes:
    return request(target, b"GET", KEY, *headers)


def post(*headers: bytes, body: bytes = b"", target: bytes = COMPLETIONS) -> bytes:
    """A POST whose framing is the row's business."""
    return request(target, b"POST", KEY, JSON, *headers) + body


def chunks(*heads_and_data: bytes) -> bytes:
    return post(CHUNKED, body=b"".join(heads_and_data))


LENGTH = b"Content-Length: %d"
HTTP_ROWS = {
    "both framings": Row(post(CHUNKED, LENGTH % 5, body=b"0\r\n\r\n" + SMUGGLED), 400),
    "two lengths": Row(post(LENGTH % 3, LENGTH % 4, body=b"abcd" + SMUGGLED), 400),
    "a list of lengths": Row(post(b"Content-Length: 3, 3", body=b"abc" + SMUGGLED), 400),
    "a list of lengths, in lower case": Row(post(b"content-length: 3,3", body=b"abc" + SMUGGLED), 400),
    "length +3": Row(post(b"Content-Length: +3", body=b"abc" + SMUGGLED), 400),
    "length -1": Row(post(b"Content-Length: -1", body=SMUGGLED), 400),
    "length of 23 digits": Row(post(b"Content-Length: " + b"1" * 23, body=SMUGGLED), 400),
    "length 0x3": Row(post(b"Content-Length: 0x3", body=b"abc" + SMUGGLED), 400),
    "chunk size 0x3": Row(chunks(b"0x3\r\nabc\r\n0\r\n\r\n", SMUGGLED), 400),
    "chunk size of 20 digits": Row(chunks(b"f" * 20 + b"\r\n"), 400),
    "chunk size of 9 digits": Row(chunks(b"000000003\r\nabc\r\n0\r\n\r\n", SMUGGLED), 400),
    "chunk size of 20 digits, second": Row(chunks(b"3\r\nabc\r\n", b"f" * 20, b"\r\n", SMUGGLED), 400),
    "chunk without its end": Row(chunks(b"3\r\nabcXX0\r\n\r\n", SMUGGLED), 400),
    "CR in a chunk's extension": Row(chunks(b"3;a\rb\r\nabc\r\n0\r\n\r\n", SMUGGLED), 400),
    "LF in a chunk's extension": Row(chunks(b"3;a\nb\r\nabc\r\n0\r\n\r\n", SMUGGLED), 400),
    "chunked twice": Row(post(CHUNKED, CHUNKED, body=b"0\r\n\r\n" + SMUGGLED), 501),
    "gzip, chunked": Row(post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n" + SMUGGLED), 501),
    "space before the colon": Row(get(b"/v1/models", b"X-A : b") + SMUGGLED, 400),
    "folded header": Row(get(b"/v1/models", b"X-A: b\r\n  Transfer-Encoding: chunked") + SMUGGLED, 400),
    "folded header, by a tab": Row(get(b"/v1/models", b"X-A: b\r\n\tc") + SMUGGLED, 400),
    "folded first header": Row(b"GET /v1/models HTTP/1.1\r\n X: y\r\nHost: x\r\n\r\n" + SMUGGLED, 400),
    "NUL in a header": Row(get(b"/v1/models", b"X-A: b\0c") + SMUGGLED, 400),
    "bare CR in a header": Row(get(b"/v1/models", b"X-A: b\rc") + SMUGGLED, 400),
    "no host": Row(b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "two hosts": Row(get(b"/v1/models", b"Host: y"), 400),
    "host with a path": Row(b"GET /v1/models HTTP/1.1\r\nHost: a/health?\r\n\r\n", 400),
    "host with a user": Row(b"GET /v1/models HTTP/1.1\r\nHost: a@b\r\n\r\n", 400),
    "non-ASCII host": Row(b"GET /v1/models HTTP/1.1\r\nHost: \xc3\xa4\r\n\r\n", 400),
    "host of 10 KB": Row(b"GET /v1/models HTTP/1.1\r\nHost: " + b"a" * 10_000 + b"\r\n\r\n", 400),
    "17 KiB of headers": Row(get(b"/v1/models", b"X: " + b"x" * 17 * 1024), 431),
    "101 headers": Row(get(b"/v1/models", *[b"X: y"] * 99), 431),
    "64 KiB of URL": Row(get(b"/" + b"x" * 65_536), 414),
    "method in lower case": Row(get().replace(b"GET", b"get", 1) + SMUGGLED, 501),
    "method in mixed case": Row(post(LENGTH % 33, body=PROMPT).replace(b"POST", b"Post", 1), 501),
    "method that HTTP has not": Row(get().replace(b"GET", b"BREW", 1), 501),
    "method that the path has not": Row(get().replace(b"GET", b"PUT", 1), 405),
    "CONNECT": Row(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n" + SMUGGLED, 405),
    "TRACE": Row(request(b"/", b"TRACE", KEY), 405),
    "HTTP/1.2": Row(b"GET /v1/models HTTP/1.2\r\nHost: x\r\n\r\n", 505),
    "HTTP/2 preface": Row(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "no version": Row(b"GET /v1/models\r\n\r\n", 400),
    "TLS hello": Row(bytes.fromhex("16030100a5010000a10303") + bytes(range(64)) + b"\r\n\r\n", 400),
    "random bytes": Row(bytes(range(128, 256)) + b"\r\n\r\n", 400),
    "line break in the path": Row(get(b"/v1/%0aforged"), 404),
    "up and away": Row(get(b"/../../etc/passwd"), 404),
    "two slashes": Row(get(b"//v1/models"), 404),
    "encoded slash": Row(get(b"/v1%2fmodels"), 404),
    "encoded slash, in upper case": Row(get(b"/v1%2Fmodels"), 404),
    "encoded slash of a public path": Row(get(b"%2fhealth"), 404),
    "NUL in the path": Row(get(b"/v1/models%00"), 404),
    "no UTF-8 in the path": Row(get(b"/%ff"), 404),
    "absolute form of a path that is not there": Row(get(b"http://x/nope"), 404),
    "absolute form with a user": Row(get(b"http://a@b/v1/models"), 400),
    "absolute form without a host": Row(get(b"http:///v1/models"), 400),
    "absolute form without a key": Row(request(b"http://x/v1/models"), 401),
    "key in the query": Row(request(b"/v1/models?api_key=key"), 401),
    "key of 1 KB": Row(request(b"/v1/models", b"GET", b"Authorization: Bearer " + b"k" * 1024), 401),
    "non-ASCII key": Row(request(b"/v1/models", b"GET", b"Authorization: Bearer \xff"), 401),
    "body over the limit, by its length": Row(post(LENGTH % 100_001), 413),
    "body over the limit, by chunks": Row(chunks(b"186a1\r\n" + b"x" * 100_001 + b"\r\n"), 413),
    "no body": Row(post(LENGTH % 0), 400),
    "text": Row(request(COMPLETIONS, b"POST", KEY, b"Content-Type: text/plain", body=PROMPT), 415),
    "a form": Row(request(COMPLETIONS, b"POST", KEY, b"Content-Type: multipart/form-data", body=PROMPT), 415),
    "gzip": Row(post(b"Content-Encoding: gzip", LENGTH % 33, body=PROMPT), 415),
}
BODY_ROWS = {
    **{
        repr(body): Row(request(COMPLETIONS, b"POST", KEY, JSON, body=body), 400)
        for body in (b"[]", b'"x"', b"42", b"null", b"{", b'{"prompt": "\xff"}', b'{"prompt": "\xc0\xaf"}', b"\0")
    },
    **{
        json.dumps(fields): Row(request(COMPLETIONS, b"POST", KEY, JSON, body=json.dumps(fields).encode()), status)
        for fields, status in (
            ({"prompt": "hi", "temprature": 1}, 400),
            ({"prompt": "hi", "n": 10**30}, 400),
            ({"prompt": "hi", "top_p": float("nan")}, 400),
            ({"prompt": "hi", "temperature": float("inf")}, 400),
            ({"prompt": "hi", "seed": 2**64}, 400),
            ({"prompt": [2**31]}, 400),
            ({"prompt": [-1]}, 400),
            ({"prompt": "hi" * 200}, 400),
            ({"prompt": "hi", "model": "../../etc/passwd"}, 404),
            ({"prompt": "hi", "model": "%2e\0\n"}, 404),
            ({"prompt": "hi", "stop": [""]}, 400),
        )
    },
}


class Spy:
    """Passes requests on, and keeps their paths."""

    def __init__(self, app) -> None:
        self._app = app
        self.paths: list[str] = []

    async def __call__(self, scope, receive, send) -> None:
        self.paths.append(scope["path"])
        await self._app(scope, receive, send)


class Stand:
    """The server, a neighbour in the middle of his stream, and what reached the application."""

    def __init__(self, site: Site, spy: Spy, runner: ScriptedRunner, neighbour: Client) -> None:
        self.site = site
        self.spy = spy
        self.runner = runner
        self.neighbour = neighbour

    async def check(self, name: str, row: Row) -> None:
        """Send it, read to the end of the connection, and look around."""
        client = await self.site.connect()
        answer = await client.ask(row.data)
        assert (name, answer.status, answer.error["type"]) == (name, row.status, "invalid_request_error")
        assert answer.headers["content-type"] == "application/json"
        client.writer.write_eof()
        assert await client.rest() == b"", "nothing of what followed was answered"
        await client.close()
        await self.site.quiet(num_open=1)
        assert not any("smuggled" in path for path in self.spy.paths)
        healthy = await self.site.ask(request(b"/health"))
        assert healthy.status == 200
        await self.site.quiet(num_open=1)


class Pausing(ScriptedRunner):
    """Stops within the first answer."""

    def launch(self, plan):
        if len(self.plans) == 4:
            self.hold()
        return super().launch(plan)


@pytest.fixture
async def stand():
    runner = Pausing(model=FakeScript(says("a long answer")))
    async with scripted_engine(runner=runner) as engine:
        spy = Spy(create_app(engine, api_keys=["key"], max_body_bytes=100_000))
        async with serving(spy) as site:
            neighbour = await site.connect()
            body = b'{"prompt": "hi", "stream": true}'
            assert (await neighbour.ask_head(request(COMPLETIONS, b"POST", KEY, JSON, body=body))).status == 200
            yield Stand(site, spy, runner, neighbour)
            runner.let_land()
            assert (await neighbour.chunks()).endswith(b"data: [DONE]\n\n")
            await neighbour.close()
            await site.quiet()
        statistics = engine.statistics()
        assert (statistics.num_used_blocks, statistics.num_running, statistics.num_waiting) == (0, 0, 0)


async def test_every_row_is_refused_and_leaves_nothing(stand: Stand):
    await stand.check("no host", HTTP_ROWS["no host"])
    before = len(asyncio.all_tasks()), num_files()
    for name, row in (HTTP_ROWS | BODY_ROWS).items():
        await stand.check(name, row)
    assert (len(asyncio.all_tasks()), num_files()) == before


async def test_the_absolute_form_is_the_path_and_its_host(stand: Stand):
    for target in (b"http://x/v1/models", b"HTTP://other:80/v1/models?x=y", b"https://x/v1/models"):
        answer = await stand.site.ask(get(target))
        assert answer.status == 200
        assert json.loads(answer.body)["object"] == "list"
    assert (await stand.site.ask(request(b"http://x/health"))).status == 200
    assert b"<html" in (await stand.site.ask(get(b"http://x"))).body  # the page at /


async def test_an_encoded_slash_within_a_models_name_is_its_own(stand: Stand):
    for spelled in (b"also/scripted", b"also%2Fscripted", b"also%2fscripted"):
        answer = await stand.site.ask(get(b"/v1/models/" + spelled))
        assert json.loads(answer.body)["id"] == "also/scripted"


async def test_chunks_in_any_pieces_are_read(stand: Stand):
    """Data that looks like a chunk's head, heads that come alone, ends that come in two."""
    digits = b'{"prompt": [' + b"1" * 2 + b'], "max_tokens": 1, "user": "' + b"0123456789abcdef" * 3 + b'"}'
    body = b"%x\r\n" % 30 + digits[:30] + b"\r\n%x;ext\r\n" % (len(digits) - 30) + digits[30:] + b"\r\n0\r\n\r\n"
    stand.runner.let_land()
    for split in range(1, len(body), 3):
        client = await stand.site.connect()
        await client.send(post(CHUNKED))
        for piece in (body[:split], body[split : split + 1], body[split + 1 :]):
            await client.send(piece)
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200
        await client.close()


async def test_a_chunks_head_is_checked_wherever_the_pieces_end(stand: Stand):
    body = b"3\r\nabc\r\n" + b"f" * 20 + b"\r\n"
    for split in range(1, len(body)):
        client = await stand.site.connect()
        await client.send(post(CHUNKED) + body[:split])
        await asyncio.sleep(0)
        assert (await client.ask(body[split:])).status == 400
        await client.close()


async def test_a_head_that_does_not_end_and_one_that_drips_are_cut(stand: Stand):
    async with serving(stand.spy, head_timeout_s=0.05) as site:
        client = await site.connect()
        await client.send(b"GET /v1/models HTTP/1.1\r\nHost:")
        assert await client.rest() == b""
        await until(lambda: len(site.connections) == 0)
