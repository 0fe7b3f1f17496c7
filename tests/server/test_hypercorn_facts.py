"""What Hypercorn 0.18, sse-starlette and Starlette do on their own, H1 to H18, and that none of it reaches aserve.

H2, H5, H6, H7 in part and H16 are faults of HTTP/2, which is not spoken. Shutdown (H3, H4) is in test_lifecycle.py.
"""

import ast
import asyncio
import gc
from pathlib import Path

import pytest

import aserve
from aserve.server.sockets import SEND_BUFFER_BYTES
from aserve.server.writing import WRITE_BUFFER_BYTES
from tests.server.wire import Recorder, Stream, guard, num_files, reply, request, serving, until

CHUNKED = b"Transfer-Encoding: chunked"


async def deaf(scope, receive, send):
    """Answers without having read the body."""
    await reply(send, 404, b"nothing here")


@pytest.mark.parametrize("app", [guard(deaf), deaf], ids=["guarded", "bare"])
async def test_h1_an_unread_body_leaks_no_task(app):
    """Thirty pieces fill Hypercorn's queue of ten; behind it, it would hear neither the rest nor the departure."""

    async def visit() -> None:
        client = await site.connect()
        await client.send(request(b"/nope", b"POST", CHUNKED) + b"1\r\nx\r\n" * 30)
        await client.close()

    async with serving(app, leave_s=0.05) as site:
        await visit()
        await site.quiet()
        before = len(asyncio.all_tasks()), num_files()
        for _ in range(2):
            await asyncio.gather(*(visit() for _ in range(50)))
            await site.quiet()
        assert (len(asyncio.all_tasks()), num_files()) == before


@pytest.mark.parametrize(
    "opening",
    [
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="preface"),
        pytest.param(b"PRI * HTTP/2.0\r\nHost: x\r\n\r\nSM\r\n\r\n", id="preface with a host"),
    ],
)
async def test_h2_h5_h6_h16_http2_is_refused(opening):
    async with serving(guard(Recorder())) as site:
        client = await site.connect()
        answer = await client.ask(opening)
        assert answer.status in (400, 505)
        assert answer.error["type"] == "invalid_request_error"
        assert await client.rest() == b""
        await client.close()
        await site.quiet()


async def test_h7_an_answer_that_breaks_off_can_be_told_from_a_whole_one(caplog):
    async def breaks(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("a bug")

    async with serving(guard(breaks)) as site:
        client = await site.connect()
        assert (await client.ask_head(request())).status == 200
        assert await client.rest() == b"4\r\nhalf\r\n"  # and no last chunk
        await client.close()
        await site.quiet()
    assert "RuntimeError" in caplog.text
    assert "a bug" not in caplog.text


async def test_h8_a_client_that_pipelines_and_leaves_is_noticed():
    app = Stream()
    async with serving(guard(app)) as site:
        client = await site.connect()
        await client.send(request(b"/first") + request(b"/second"))
        await client.head()
        await client.close()
        await until(lambda: app.num_left == 1)
        await site.quiet()
        assert app.num_begun == 1


async def test_h9_the_end_of_sending_counts_as_leaving():
    app = Stream()
    async with serving(guard(app)) as site:
        client = await site.connect()
        await client.ask_head(request())
        client.writer.write_eof()
        await until(lambda: app.num_left == 1)


async def test_h9_an_answer_given_at_once_still_reaches_who_has_ended_sending():
    async with serving(guard(Recorder())) as site:
        client = await site.connect()
        client.writer.write(request())
        client.writer.write_eof()
        assert (await client.answer()).body == b"ok"


async def test_h10_a_stalled_body_is_answered_and_given_up():
    app = Recorder()
    async with serving(guard(app, body_timeout_s=0.05)) as site:
        client = await site.connect()
        answer = await client.ask(request(b"/", b"POST", b"Content-Length: 10") + b"half")
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert await client.rest() == b""
    assert not app.asked


async def test_h10_a_head_that_drips_is_cut_off():
    async with serving(guard(Recorder()), head_timeout_s=0.05) as site:
        client = await site.connect()
        rest = asyncio.create_task(client.rest())
        for letter in b"GET / HTTP/1.1\r\nHost: " * 1000:
            client.writer.write(bytes([letter]))
            done, _ = await asyncio.wait({rest}, timeout=0.005)
            if done:
                break
        assert await rest == b""


async def test_h11_a_reader_who_does_not_read_is_cut_off():
    num_sent = 0
    left = asyncio.Event()

    async def endless(scope, receive, send):
        nonlocal num_sent
        await receive()
        gone = asyncio.create_task(receive())
        gone.add_done_callback(lambda _: left.set())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 1024, "more_body": True})
            num_sent += 1024
            await asyncio.sleep(0)

    async with serving(endless, send_timeout_s=0.1) as site:
        client = await site.connect(receive_buffer_bytes=4096)
        client.writer.transport.pause_reading()
        await client.send(request())
        async with asyncio.timeout(60):
            await left.wait()
        await client.close()
        await site.quiet()
    assert num_sent < 2 * (WRITE_BUFFER_BYTES + 2 * SEND_BUFFER_BYTES + 4096)


async def test_h12_a_body_with_two_lengths_is_refused_and_nothing_in_it_is_executed():
    app = Recorder()
    smuggled = b"0\r\n\r\n" + request(b"/smuggled")
    async with serving(guard(app)) as site:
        client = await site.connect()
        answer = await client.ask(request(b"/", b"POST", CHUNKED, b"Content-Length: %d" % len(smuggled)) + smuggled)
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"
        assert await client.rest() == b""
    assert not app.asked


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param([b"X-Large: " + b"x" * 17_000], id="17 KB"),
        pytest.param([b"X-%d: x" % number for number in range(101)], id="101 headers"),
    ],
)
async def test_h12_too_many_headers_are_refused(headers):
    app = Recorder()
    async with serving(guard(app)) as site:
        assert (await site.ask(request(b"/", b"GET", *headers))).status == 431
    assert not app.asked


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.3"])
async def test_h13_an_upgrade_is_not_taken(protocol):
    headers = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + protocol, b"HTTP2-Settings: AAMAAABk"]
    headers += [b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", b"Sec-WebSocket-Version: 13"]
    app = Recorder()
    async with serving(guard(app)) as site:
        answer = await site.ask(request(b"/plain", b"GET", *headers))
        assert (answer.status, answer.body) == (200, b"ok")
    assert app.asked == [("GET", "/plain", b"")]


async def test_h14_nothing_that_a_client_sends_is_printed(capfd):
    async with serving(guard(Recorder())) as site:
        await site.ask(request(b"/%0aforged%1b[31m", b"GET", b"User-Agent: forged\x1b[31m", b"Referer: forged"))
        await site.ask(b"forged \x00\r\n\r\n")
        await site.quiet()
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


async def test_h15_idle_connections_do_not_keep_others_out():
    async with serving(guard(Recorder()), max_connections=20) as site:
        for _ in range(60):
            await site.connect()
        assert (await site.ask(request(b"/health"))).status == 200
        assert len(site.connections) <= 21  # one may still be closing


async def test_h17_the_departure_reaches_the_application_through_the_guard():
    app = Stream()
    async with serving(guard(app, api_keys=["key"])) as site:
        client = await site.connect()
        await client.ask_head(request(b"/", b"POST", b"Authorization: Bearer key", body=b"a body"))
        await client.close()
        await until(lambda: app.num_left == 1)


def test_h17_no_middleware_hides_the_departure():
    """BaseHTTPMiddleware and what is built on it answer `receive` themselves."""
    for path in Path(aserve.__file__).parent.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert "BaseHTTPMiddleware" not in names, path


async def test_h18_a_generator_is_closed_when_its_reader_leaves():
    """By its owner and at once, not by the garbage collector at some time."""
    from starlette.responses import StreamingResponse

    closed = asyncio.Event()

    async def pieces():
        try:
            while True:
                yield b"x" * 65_536
        finally:
            closed.set()

    async def app(scope, receive, send):
        stream = pieces()
        try:
            await StreamingResponse(stream)(scope, receive, send)
        finally:
            await stream.aclose()

    async with serving(guard(app)) as site:
        gc.disable()
        try:
            client = await site.connect()
            await client.ask_head(request())
            client.reset()
            async with asyncio.timeout(60):
                await closed.wait()
        finally:
            gc.enable()
