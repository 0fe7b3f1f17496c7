"""Connections over real sockets: order, departure, deadlines, bounds."""

import asyncio
from contextlib import nullcontext

import pytest

from aserve.server.connection import MAX_INBOX_BYTES, Connection
from tests.server.wire import PATIENCE_S, Recorder, Stream, num_files, reply, request, serving, until


async def test_requests_follow_each_other_on_one_connection():
    app = Recorder()
    async with serving(app) as site:
        client = await site.connect()
        for path in (b"/a", b"/b", b"/c"):
            answer = await client.ask(request(path))
            assert (answer.status, answer.body) == (200, b"ok")
        await client.close()
        await site.quiet()
    assert app.asked == [("GET", "/a", b""), ("GET", "/b", b""), ("GET", "/c", b"")]


def watch_writes(monkeypatch, see):
    """From now on `see` is called with what a connection writes, before it is written."""
    made = Connection.connection_made

    class Spy:
        def __init__(self, transport):
            self._transport = transport

        def __getattr__(self, name):
            return getattr(self._transport, name)

        def write(self, data):
            see(bytes(data))
            self._transport.write(data)

    monkeypatch.setattr(Connection, "connection_made", lambda connection, transport: made(connection, Spy(transport)))


async def test_a_head_goes_out_with_what_is_written_behind_it_unless_that_is_late(monkeypatch):
    written, may_go_on = [], asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["path"] == "/late":
            await may_go_on.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    watch_writes(monkeypatch, written.append)
    async with serving(app) as site:
        client = await site.connect()
        assert (await client.ask(request(b"/"))).body == b"ok"
        assert [data[-6:] for data in written if data] == [b"\r\n\r\nok"]
        written.clear()
        await client.ask_head(request(b"/late"))
        may_go_on.set()
        await until(lambda: len(written) > 1)
        assert [data[-4:] for data in written if data] == [b"\r\n\r\n", b"ok"]


@pytest.mark.parametrize("is_late", [False, True])
async def test_an_answer_whose_head_cannot_be_written_ends_its_connection_and_is_told(is_late, monkeypatch):
    told, failed = asyncio.Event(), []

    def fail(data):
        if data.startswith(b"HTTP/1.1 200"):
            raise OSError("no memory for a buffer")

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if not is_late:
            await send({"type": "http.response.body", "body": b"ok"})
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()

    watch_writes(monkeypatch, fail)
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failed.append(context["exception"]))
    async with serving(app) as site:
        client = await site.connect()
        await client.send(request())
        assert await client.rest() == b""
        async with asyncio.timeout(PATIENCE_S):
            if is_late:
                await told.wait()
        await site.quiet()
    assert [type(error) for error in failed] == [OSError] * is_late


async def test_pipelined_requests_are_answered_in_order():
    app = Recorder()
    async with serving(app) as site:
        client = await site.connect()
        await client.send(request(b"/a") + request(b"/b") + request(b"/c"))
        assert [(await client.answer()).status for _ in range(3)] == [200, 200, 200]
        assert [path for _, path, _ in app.asked] == ["/a", "/b", "/c"]


async def test_a_connection_closes_after_an_answer_to_close():
    async with serving(Recorder()) as site:
        client = await site.connect()
        answer = await client.ask(request(b"/", b"GET", b"Connection: close"))
        assert answer.status == 200
        assert await client.rest() == b""


@pytest.mark.parametrize(("error", "passes"), [(SystemExit(3), True), (OSError("no descriptor"), False)])
async def test_what_is_no_fault_of_a_connections_beginning_ends_more_than_that(error, passes):
    """A wish that the process should end is somebody else's to fulfil."""

    class Transport:
        aborted = False

        def set_write_buffer_limits(self, **_: object) -> None:
            raise error

        def abort(self) -> None:
            self.aborted = True

    async with serving(Recorder()) as site:
        connection, transport = Connection(site.connections), Transport()
        with pytest.raises(SystemExit) if passes else nullcontext():
            connection.connection_made(transport)
        assert transport.aborted is not passes
        site.connections.forget(connection)


async def test_the_answer_reaches_a_client_that_is_still_sending():
    async def refuse(scope, receive, send):
        await reply(send, 403, b"no")

    async with serving(refuse) as site:
        client = await site.connect()
        answer = await client.ask(request(b"/", b"POST", b"Content-Length: 1000000"))
        await client.send(b"x" * 100_000)  # into a connection that the server has ended: read, and thrown away
        assert (answer.status, answer.body) == (403, b"no")
        assert await client.rest() == b""
        await client.close()
        await site.quiet()


async def test_however_much_a_client_sends_behind_its_answer_the_connection_is_not_reset():
    """Which might take the answer with it, where it has not been read yet."""
    async with serving(Recorder(), linger_s=PATIENCE_S) as site:
        client = await site.connect()
        assert (await client.ask(request(b"/", b"GET", b"Connection: close"))).status == 200
        await client.send(b"x" * 2**22)
        assert await client.rest() == b""
        await client.close()
        await site.quiet()


async def test_a_client_that_is_gone_is_told_to_the_application():
    app = Stream()
    async with serving(app) as site:
        client = await site.connect()
        await client.ask_head(request())
        await client.close()
        await until(lambda: app.num_left == 1)
        await site.quiet()


async def test_a_reset_is_told_to_the_application():
    app = Stream()
    async with serving(app) as site:
        client = await site.connect()
        await client.ask_head(request())
        client.reset()
        await until(lambda: app.num_left == 1)
        await site.quiet()


async def test_an_application_that_ignores_the_departure_is_cancelled():
    cancelled = asyncio.Event()

    async def stubborn(scope, receive, send):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving(stubborn, leave_s=0.02) as site:
        client = await site.connect()
        await client.send(request())
        await until(lambda: site.connections.num_busy == 1)
        await client.close()
        await site.quiet()
        assert cancelled.is_set()


async def test_an_application_that_raises_is_a_500_and_the_next_connection_is_fine(caplog, capfd):
    async def broken(scope, receive, send):
        if scope["path"] == "/broken":
            raise RuntimeError("a bug")
        await reply(send, 200, b"ok")

    async with serving(broken) as site:
        assert (await site.ask(request(b"/broken"))).status == 500
        assert (await site.ask(request(b"/fine"))).status == 200
        await site.quiet()
    (record,) = caplog.records
    assert "in the application: builtins.RuntimeError" in record.getMessage()
    assert "a bug" not in caplog.text + capfd.readouterr().err


class Panic(BaseException):
    """As libraries in Rust raise it."""


async def test_what_python_counts_as_no_exception_ends_its_connection_alone_and_is_told_without_its_text(caplog):
    async def panicking(scope, receive, send):
        raise Panic("a prompt")

    async with serving(panicking) as site:
        client = await site.connect()
        await client.send(request())
        await client.rest()
        await site.quiet()
    (record,) = caplog.records
    assert record.getMessage().startswith("a connection failed: ")
    assert "tests.server.test_connection.Panic" in record.getMessage()
    assert "a prompt" not in caplog.text


async def test_a_silent_connection_is_closed():
    async with serving(Recorder(), keep_alive_s=0.02) as site:
        client = await site.connect()
        assert await client.rest() == b""
        await site.quiet()


async def test_silence_is_borne_longer_while_there_is_room():
    """One of few may take its time to say something; of many, those that come last are given the time of a head."""
    async with serving(Recorder(), head_timeout_s=0.02, keep_alive_s=60, max_connections=8) as site:
        early = [await site.connect() for _ in range(6)]
        await until(lambda: len(site.connections) == 6)
        late = [await site.connect() for _ in range(2)]
        assert [await client.rest() for client in late] == [b"", b""]
        for client in early:
            assert (await client.ask(request())).status == 200
        await site.quiet(num_open=6)


async def test_an_idle_connection_is_closed_and_a_slow_answer_is_not():
    app = Stream()
    async with serving(app, keep_alive_s=0.02) as site:
        idle, busy = await site.connect(), await site.connect()
        await busy.ask_head(request())
        assert await idle.rest() == b""
        app.end.set()
        assert await busy.chunks() == b"begunended"
        assert await busy.rest() == b""


async def test_the_head_deadline_starts_again_with_each_request():
    async with serving(Recorder(), head_timeout_s=0.05) as site:
        client = await site.connect()
        assert (await client.ask(request())).status == 200
        await client.send(b"GET / HT")
        assert await client.rest() == b""


async def test_an_idle_connection_that_is_gone_is_not_idle_any_more():
    async with serving(Recorder(), keep_alive_s=0.02) as site:
        client = await site.connect()
        assert (await client.ask(request())).status == 200
        assert await client.rest() == b""
        await site.quiet()
        assert (len(site.connections), site.connections.num_busy) == (0, 0)


async def test_an_idle_connection_makes_room_for_a_new_one():
    async with serving(Recorder(), max_connections=2) as site:
        first, second = await site.connect(), await site.connect()
        assert (await first.ask(request())).status == 200  # the second is now idle for longer
        assert (await site.ask(request())).status == 200
        assert await second.rest() == b""
        assert (await first.ask(request())).status == 200


async def test_a_full_server_says_so():
    async with serving(Stream(), max_connections=1) as site:
        busy = await site.connect()
        await busy.ask_head(request())
        refused = await (await site.connect()).answer()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")


async def test_a_pipeliner_without_measure_is_cut_off():
    app = Stream()
    async with serving(app) as site:
        client = await site.connect()
        await client.ask_head(request())
        for _ in range(2 + 2 * MAX_INBOX_BYTES // 65_536):
            client.writer.write(b"x" * 65_536)
        await client.rest()
        await until(lambda: app.num_left == 1)
        await client.close()
        await site.quiet()


async def test_a_large_body_waits_for_an_application_that_reads_slowly():
    go = asyncio.Event()
    received = bytearray()

    async def slow(scope, receive, send):
        await go.wait()
        more = True
        while more:
            message = await receive()
            received.extend(message["body"])
            more = message["more_body"]
        await reply(send, 200, b"ok")

    size = 4_000_000
    async with serving(slow) as site:
        client = await site.connect()
        client.writer.write(request(b"/", b"POST", b"Content-Length: %d" % size) + b"x" * size)
        await until(lambda: site.connections.num_busy == 1)
        go.set()
        assert (await client.answer()).status == 200
        assert len(received) == size


async def test_many_connections_leave_nothing_behind():
    async with serving(Recorder()) as site:

        async def visit() -> None:
            clients = await asyncio.gather(*(site.connect() for _ in range(50)))
            await asyncio.gather(*(client.ask(request()) for client in clients))
            await asyncio.gather(*(client.close() for client in clients))
            await site.quiet()

        await visit()
        before = len(asyncio.all_tasks()), num_files()
        for _ in range(4):
            await visit()
        assert (len(asyncio.all_tasks()), num_files()) == before


async def test_draining_ends_each_connection_after_its_answer():
    app = Stream()
    async with serving(app) as site:
        busy, idle = await site.connect(), await site.connect()
        await busy.ask_head(request())
        await until(lambda: len(site.connections) == 2)
        draining = asyncio.create_task(site.connections.drain())
        await until(site.connections.context.terminated.is_set)
        answer = await idle.ask_head(request())
        assert answer.headers["connection"] == "close"
        assert not draining.done()
        app.end.set()
        assert await busy.chunks() == await idle.chunks() == b"begunended"
        assert await idle.rest() == b""
        await draining


async def test_draining_leaves_who_has_just_connected_a_moment_for_its_first_bytes():
    async def short(scope, receive, send):
        await reply(send, 200, b"done")

    async with serving(short) as site:
        client = await site.connect()
        await until(lambda: len(site.connections) == 1)
        draining = asyncio.create_task(site.connections.drain())
        await until(site.connections.context.terminated.is_set)
        assert not draining.done()
        answer = await client.ask(request())
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        await draining


async def test_draining_waits_for_no_bytes_of_who_has_sent_some_before(monkeypatch):
    monkeypatch.setattr("aserve.server.connections.FIRST_BYTES_S", 600.0)
    async with serving(Recorder()) as site:
        client = await site.connect()
        await client.ask(request())
        await until(lambda: site.connections.num_busy == 0)
        async with asyncio.timeout(10.0):
            await site.connections.drain()


@pytest.mark.parametrize("num_bytes", [100_000, 1_000_000])
async def test_draining_waits_until_the_last_answer_is_taken(num_bytes: int):
    async def large(scope, receive, send):
        await reply(send, 200, b"x" * num_bytes)

    async with serving(large) as site:
        client = await site.connect(receive_buffer_bytes=4096)
        await client.send(request())
        await until(lambda: site.connections.num_busy == 1)
        draining = asyncio.create_task(site.connections.drain())
        assert len((await client.answer()).body) == num_bytes
        await draining
        await site.connections.close()
        assert len(site.connections) == 0


async def test_an_answer_to_a_client_that_has_left_goes_nowhere_and_breaks_nothing(capfd):
    ended = asyncio.Event()

    async def late(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"too late"})
        ended.set()

    async with serving(late) as site:
        client = await site.connect()
        await client.send(request())
        client.reset()
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
        await site.quiet()
    assert capfd.readouterr() == ("", "")


async def test_a_send_that_waits_is_let_go_when_the_client_resets():
    """Caught: `_writable.set()` removed from `connection_lost`: it would wait out its limit, here an hour."""
    paused, let_go = asyncio.Event(), asyncio.Event()

    class Watched(Connection):
        def pause_writing(self):
            super().pause_writing()
            paused.set()

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not paused.is_set():
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
        let_go.set()

    async with serving(endless, Watched, send_timeout_s=3600, leave_s=3600) as site:
        client = await site.connect(receive_buffer_bytes=4096)
        client.writer.transport.pause_reading()
        await client.send(request())
        async with asyncio.timeout(PATIENCE_S):
            await paused.wait()
            assert not let_go.is_set()
            client.reset()
            await let_go.wait()
        await site.quiet()


async def test_the_client_hears_of_the_end_at_once_and_has_its_own_time_to_leave():
    async with serving(Recorder(), linger_s=3600) as site:
        client = await site.connect()
        assert (await client.ask(request(b"/", b"GET", b"Connection: close"))).status == 200
        async with asyncio.timeout(PATIENCE_S):
            assert await client.reader.read() == b"", "no more will come"
        assert len(site.connections) == 1
        await client.close()
        await site.quiet()


async def test_who_takes_an_answer_slowly_gets_all_of_it_and_who_takes_nothing_is_cut():
    """All takes longer than a client may take nothing, and the last of it longer than a client may take to go away."""
    body = bytes(range(256)) * 4096

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async with serving(app, send_timeout_s=0.3, linger_s=0.05) as site:
        client = await site.connect(receive_buffer_bytes=4096)
        client.writer.transport.set_write_buffer_limits()
        await client.send(request(b"/", b"GET", b"Connection: close"))
        await client.head()
        got = b""
        while piece := await client.reader.read(2**15):
            got += piece
            await asyncio.sleep(0.02)
        assert got == body
        deaf = await site.connect(receive_buffer_bytes=4096)
        await deaf.ask_head(request(b"/"))
        deaf.writer.transport.pause_reading()
        await site.quiet()
