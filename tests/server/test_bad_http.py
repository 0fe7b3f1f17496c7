"""Requests that are wrong as HTTP, in raw bytes: what is answered, and that the server is as before afterwards."""

import asyncio

import pytest

from aserve.http import middleware
from tests.server.wire import Recorder, Site, Stream, guard, num_files, request, serving

POST = b"POST / HTTP/1.1\r\nHost: x\r\n"

MALFORMED = {
    "two differing lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "length with a sign": POST + b"Content-Length: +3\r\n\r\nabc",
    "negative length": POST + b"Content-Length: -1\r\n\r\n",
    "length of 23 digits": POST + b"Content-Length: 12345678901234567890123\r\n\r\n",
    "chunk size in C's notation": POST + b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "chunk without its end": POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcXX0\r\n\r\n",
    "space before the colon": b"GET / HTTP/1.1\r\nHost: x\r\nX-A : b\r\n\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\nHost: x\r\nX-A: b\x00c\r\n\r\n",
    "bare CR in a header": b"GET / HTTP/1.1\r\nHost: x\r\nX-A: b\rc\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "path in the host": b"GET / HTTP/1.1\r\nHost: a/health?\r\n\r\n",
    "user in the host": b"GET / HTTP/1.1\r\nHost: a@b\r\n\r\n",
    "non-ASCII host": b"GET / HTTP/1.1\r\nHost: \xc3\xa4\r\n\r\n",
    "empty host": b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    "non-ASCII path": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS hello": bytes.fromhex("16030100a5010000a10303") + bytes(range(64)) + b"\r\n\r\n",
    "random bytes": bytes(range(128, 256)) + b"\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
}
REFUSED = {
    "64 KiB URL": (b"GET /" + b"x" * 65_536 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "9 KiB URL": (request(b"/" + b"x" * 9_000), 414),
    "header that never ends": (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 70_000, 431),
    "unknown transfer encoding": (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: x\r\n\r\n", 505),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 405),
    "TRACE": (request(b"/", b"TRACE"), 405),
}


@pytest.fixture
async def site():
    """A server of an application that keeps what reaches it."""
    async with serving(guard(Recorder(), api_keys=["key"], max_body_bytes=1000)) as site:
        yield site


async def refused(site: Site, data: bytes, status: int) -> None:
    """The server answers with an error in our shape, ends the connection, and holds nothing afterwards."""
    client = await site.connect()
    answer = await client.ask(data)
    assert answer.status == status
    assert answer.error["message"]
    assert answer.headers["connection"] == "close"
    assert await client.rest() == b""
    await client.close()
    await site.quiet()
    assert (await site.ask(request(b"/health"))).status == 200
    await site.quiet()


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_not_http_is_a_400_and_the_end_of_the_connection(site: Site, data: bytes):
    await refused(site, data, 400)


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED)
async def test_what_is_too_much_or_not_spoken_is_refused(site: Site, data: bytes, status: int):
    await refused(site, data, status)


@pytest.mark.parametrize(
    "target",
    [
        *(b"/../../etc/passwd", b"//v1/models", b"/v1%2fmodels", b"/%00", b"/%ff", b"/health/", b"//health"),
        *(
            b"/x/../health",
            b"/health%2f..",
            b"/HEALTH",
            b"/health;x",
            b"/metrics/../v1/models",
            b"*",
            b"http://x/v1/models",
        ),
    ],
)
async def test_no_spelling_of_a_path_opens_it_without_a_key(site: Site, target: bytes):
    await refused(site, request(target), 401)


async def test_a_body_that_is_too_long_by_its_length_is_refused_before_it_is_sent(site: Site):
    await refused(site, request(b"/health", b"POST", b"Content-Length: 1001"), 413)


async def test_a_body_that_grows_too_long_is_refused(site: Site):
    chunked = request(b"/health", b"POST", b"Transfer-Encoding: chunked")
    await refused(site, chunked + b"3e9\r\n" + b"x" * 1001 + b"\r\n", 413)


async def test_a_body_in_too_many_pieces_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Of 513, not of 65,537: a loaded machine takes longer for those than the body's time allows."""
    assert middleware.MAX_BODY_PIECES == 65_536
    monkeypatch.setattr(middleware, "MAX_BODY_PIECES", 512)
    app = Recorder()
    async with serving(guard(app)) as site:
        chunked = request(b"/", b"POST", b"Transfer-Encoding: chunked")
        await refused(site, chunked + b"1\r\nx\r\n" * 513, 413)
    assert [path for _, path, _ in app.asked] == ["/health"]


async def test_bad_requests_do_not_disturb_a_neighbour_and_leave_nothing():
    app = Stream()
    async with serving(guard(app)) as site:
        neighbour = await site.connect()
        await neighbour.ask_head(request())
        before = len(asyncio.all_tasks()), num_files()
        for data in MALFORMED.values():
            client = await site.connect()
            assert (await client.ask(data)).status == 400
            await client.close()
        await site.quiet(num_open=1)
        assert (len(asyncio.all_tasks()), num_files()) == before
        app.end.set()
        assert await neighbour.chunks() == b"begunended"


async def test_a_message_split_anywhere_means_the_same():
    data = request(b"/a", b"POST", b"Transfer-Encoding: chunked") + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    app = Recorder()
    async with serving(guard(app)) as site:
        client = await site.connect()
        for split in range(1, len(data)):
            await client.send(data[:split])
            await asyncio.sleep(0)
            assert (await client.ask(data[split:])).status == 200
    assert app.asked == [("POST", "/a", b"abcde")] * (len(data) - 1)


async def test_an_empty_line_before_a_request_is_overlooked(site: Site):
    """RFC 9112, 2.2: some clients end the body before with one that is not counted."""
    client = await site.connect()
    for data in (b"\r\n" + request(b"/health"), request(b"/health"), b"\r\n" + request(b"/health")):
        assert (await client.ask(data)).status == 200
    await client.close()
    await refused(site, b"\n" + request(b"/health"), 400)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("behind", [b"\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 4000])
@pytest.mark.parametrize("at_once", [True, False])
async def test_what_comes_behind_a_connections_last_request_costs_it_no_answer(version, behind, at_once: bool):
    app, may_end = Recorder(), asyncio.Event()

    async def slow(scope, receive, send):
        await may_end.wait()
        await app(scope, receive, send)

    async with serving(guard(slow)) as site:
        client = await site.connect()
        last = b"POST / HTTP/%b\r\nHost: x\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc" % version
        await client.send(last + behind if at_once else last)
        await asyncio.sleep(0.02)
        if not at_once:
            await client.send(behind)
            await asyncio.sleep(0.02)
        may_end.set()
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"ok")
        assert await client.rest() == b""
        await client.close()
        await site.quiet()
    assert app.asked == [("POST", "/", b"abc")]
