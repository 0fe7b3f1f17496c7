"""The guard, driven as ASGI: no socket, no server."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.http import middleware as middleware_module
from aserve.http.middleware import MAX_HEADER_BYTES, MAX_HEADERS, SMALL_BODY_BYTES, check_head, guard
from tests.http.peer import until

DISCONNECT = {"type": "http.disconnect"}


class Echo:
    """Answers with the body it was given, in one message; keeps what it received."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []

    async def __call__(self, scope, receive, send):
        while not self.received or self.received[-1]["more_body"]:
            self.received.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"".join(message["body"] for message in self.received)})


@dataclass
class Exchange:
    """One request put to an application: its messages one by one, then silence; and the answer."""

    messages: list[dict[str, Any]]
    sent: list[dict[str, Any]] = field(default_factory=list)
    num_received: int = 0

    async def receive(self) -> dict[str, Any]:
        if not self.messages:
            await asyncio.Event().wait()
        self.num_received += 1
        return self.messages.pop(0)

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if not message.get("more_body", True) or "body" in message:
            self.messages = [DISCONNECT]  # what servers say once the answer is complete

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


def scope_of(path: str = "/v1/models", method: str = "GET", headers: Iterable = (), **more: Any) -> dict[str, Any]:
    line = {"type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode()}
    return {**line, "query_string": b"", "headers": [(b"host", b"x"), *headers], **more}


def pieces(*bodies: bytes) -> list[dict[str, Any]]:
    last = len(bodies) - 1
    return [{"type": "http.request", "body": body, "more_body": i < last} for i, body in enumerate(bodies)]


async def put(app, scope: dict[str, Any], messages: Sequence[dict[str, Any]] = tuple(pieces(b""))) -> Exchange:
    exchange = Exchange(list(messages))
    async with asyncio.timeout(60):
        await app(scope, exchange.receive, exchange.send)
    return exchange


def bearer(key: bytes) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + key


# Keys


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [bearer(b"")],
        [bearer(b"wrong")],
        [bearer(b"k")],
        [bearer(b"key1 ,key2")],
        [bearer(b"\xff\x00")],
        [bearer(b"x" * 10_000)],
        [(b"authorization", b"key1")],
        [(b"authorization", b"Basic key1")],
        [(b"authorization", b"Bearerkey1")],
        [(b"x-authorization", b"Bearer key1")],
        [bearer(b"key1"), bearer(b"key2")],
    ],
    ids=lambda headers: str(headers)[:40],
)
async def test_without_a_valid_key_a_request_is_refused(headers):
    app = Echo()
    exchange = await put(guard(app, api_keys=["key1", "key2"]), scope_of(headers=headers))
    assert (exchange.status, exchange.error["code"]) == (401, "invalid_api_key")
    assert exchange.headers[b"www-authenticate"] == b"Bearer"
    assert not app.received


@pytest.mark.parametrize("credentials", [b"Bearer key1", b"Bearer key2", b"bearer key2", b"Bearer  key1 "])
async def test_any_of_the_keys_opens(credentials):
    app = guard(Echo(), api_keys=["key1", "key2"])
    assert (await put(app, scope_of(headers=[(b"authorization", credentials)]))).status == 200


async def test_without_keys_nothing_is_asked_for():
    assert (await put(guard(Echo()), scope_of())).status == 200


async def test_a_key_in_the_query_is_none():
    app = guard(Echo(), api_keys=["key1"])
    assert (await put(app, scope_of(query_string=b"api_key=key1&key=key1"))).status == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/metrics"])
async def test_public_paths_need_no_key(path):
    assert (await put(guard(Echo(), api_keys=["key"]), scope_of(path))).status == 200


@given(st.text(alphabet="/.%hHealtmricsv1\\;?# \x00é", max_size=20))
def test_every_other_path_needs_one(path):
    if path in ("/health", "/metrics"):
        return
    exchange = asyncio.run(put(guard(Echo(), api_keys=["key"]), scope_of(path)))
    assert exchange.status == 401


async def test_a_mounted_application_has_its_public_paths_below_its_root():
    app = guard(Echo(), api_keys=["key"])
    assert (await put(app, scope_of("/llm/health", root_path="/llm"))).status == 200
    assert (await put(app, scope_of("/llm/v1/models", root_path="/llm"))).status == 401
    for path in ("/llmhealth", "/abc/health"):
        assert (await put(app, scope_of(path, root_path="/llm"))).status == 401


# Heads


@pytest.mark.parametrize("method", ["CONNECT", "TRACE"])
def test_methods_that_reach_through_are_refused(method):
    refusal = check_head(scope_of(method=method))
    assert refusal is not None
    assert (refusal.status, "allow" in refusal.headers) == (405, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"x", b"y")] * (MAX_HEADERS - 1), None),
        ([(b"x", b"y")] * MAX_HEADERS, 431),
        ([(b"x", b"y" * (MAX_HEADER_BYTES - 6))], None),
        ([(b"x", b"y" * (MAX_HEADER_BYTES - 5))], 431),
        ([(b"content-length", b"1"), (b"transfer-encoding", b"chunked")], 400),
        ([(b"host", b"x")], 400),
    ],
)
def test_headers_have_limits_and_one_meaning(headers, status):
    refusal = check_head(scope_of(headers=headers))
    assert (refusal and refusal.status) == status


@pytest.mark.parametrize("host", [b"x", b"localhost:8000", b"a.b-c.d", b"my_service:80", b"127.0.0.1", b"[::1]:8000"])
def test_hosts(host):
    assert check_head({**scope_of(), "headers": [(b"host", host)]}) is None


@pytest.mark.parametrize(
    "host", [b"", b"a/b", b"a@b", b"a b", b"a:b", b"a:123456", b"\xc3\xa4", b"[x]", b"a?b", b"a,b"]
)
def test_what_is_no_host(host):
    refusal = check_head({**scope_of(), "headers": [(b"host", host)]})
    assert refusal is not None
    assert refusal.status == 400


def test_a_request_of_http_1_0_needs_no_host():
    assert check_head({**scope_of(), "http_version": "1.0", "headers": []}) is None


# Bodies


@pytest.mark.parametrize(
    ("bodies", "received"),
    [
        ([b"ab", b"", b"cd"], [b"abcd"]),
        ([b"a" * SMALL_BODY_BYTES, b""], [b"a" * SMALL_BODY_BYTES]),
        ([b"a" * SMALL_BODY_BYTES, b"b", b""], [b"a" * SMALL_BODY_BYTES, b"b", b""]),
    ],
)
async def test_the_application_gets_a_small_body_whole_and_a_large_one_as_it_came(bodies, received):
    app = Echo()
    exchange = await put(guard(app), scope_of(method="POST"), pieces(*bodies))
    assert (exchange.status, exchange.body) == (200, b"".join(bodies))
    assert app.received == pieces(*received)


async def test_after_the_body_comes_the_disconnect():
    received = []

    async def app(scope, receive, send):
        received.extend([await receive(), await receive()])

    await put(guard(app), scope_of(method="POST"), [*pieces(b"ab"), DISCONNECT])
    assert received == [{"type": "http.request", "body": b"ab", "more_body": False}, DISCONNECT]


@pytest.mark.parametrize(
    ("length", "bodies", "status"),
    [
        (b"10", [b"0123456789"], 200),
        (b"11", [b"0123456789", b"a"], 413),
        (None, [b"01234", b"56789"], 200),
        (None, [b"01234", b"56789", b"a"], 413),
        (b"1" * 18, [b""], 413),
        (b"1" * 19, [b""], 400),
        (b"+1", [b"1"], 400),
        (b"\xb2", [b"1"], 400),
        (b"", [b""], 400),
    ],
)
async def test_bodies_have_a_limit(length, bodies, status):
    app = Echo()
    headers = [(b"transfer-encoding", b"chunked")] if length is None else [(b"content-length", length)]
    exchange = await put(guard(app, max_body_bytes=10), scope_of(method="POST", headers=headers), pieces(*bodies))
    assert exchange.status == status
    assert bool(app.received) == (status == 200)


async def test_a_length_over_the_limit_is_refused_before_anything_is_read():
    seen = []

    async def receive():
        seen.append(len(sent))
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message):
        sent.append(message)

    headers = [(b"content-length", b"1000")]
    await guard(Echo(), max_body_bytes=10)(scope_of(method="POST", headers=headers), receive, send)
    assert sent[0]["status"] == 413
    assert seen == [2]  # first the whole answer, then what is thrown away


@pytest.mark.parametrize(("num_pieces", "status"), [(20, 200), (21, 413)])
async def test_a_body_in_too_many_pieces_is_refused(num_pieces, status, monkeypatch):
    monkeypatch.setattr(middleware_module, "MAX_BODY_PIECES", 20)
    app = Echo()
    piece = {"type": "http.request", "body": b"x", "more_body": True}
    messages = [*[piece] * (num_pieces - 1), piece | {"more_body": False}]
    assert (await put(guard(app), scope_of(method="POST"), messages)).status == status
    assert bool(app.received) == (status == 200)


async def test_a_body_that_stalls_is_refused():
    app = Echo()
    exchange = await put(guard(app, body_timeout_s=0.02), scope_of(method="POST"), pieces(b"half", b"")[:1])
    assert (exchange.status, exchange.error["code"]) == (408, "request_timeout")
    assert exchange.headers[b"connection"] == b"close"
    assert not app.received


async def test_a_body_that_drips_is_refused():
    """Each byte comes in time; all of them together do not."""
    app, sent, num_bytes = Echo(), [], 0
    ended = asyncio.Event()

    async def receive():
        nonlocal num_bytes
        if ended.is_set():
            return DISCONNECT
        num_bytes += 1
        arrived = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, arrived.set)
        await arrived.wait()
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message):
        sent.append(message)
        if "body" in message:
            ended.set()

    await guard(app, body_timeout_s=0.05)(scope_of(method="POST"), receive, send)
    assert sent[0]["status"] == 408
    assert num_bytes <= 6, "0.05 s have passed after 5, or after fewer where the machine is busy"
    assert not app.received


async def test_a_client_that_leaves_within_its_body_reaches_nobody():
    app = Echo()
    exchange = await put(guard(app), scope_of(method="POST"), [*pieces(b"half", b"")[:1], DISCONNECT])
    assert exchange.sent == []
    assert not app.received


async def test_a_refusal_reads_on_beside_the_answer():
    """As behind a server whose queue of messages is full: the answer gets through only if the queue is emptied."""
    room = asyncio.Semaphore(0)
    sent = []

    async def receive():
        if len(sent) == 2:
            return DISCONNECT
        room.release()
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message):
        await room.acquire()
        sent.append(message)

    async with asyncio.timeout(60):
        await guard(Echo(), api_keys=["key"])(scope_of(method="POST"), receive, send)
    assert sent[0]["status"] == 401


async def test_over_http_2_no_connection_header_is_sent():
    exchange = await put(guard(Echo(), api_keys=["key"]), scope_of(http_version="2"))
    assert b"connection" not in exchange.headers


# What is not HTTP


async def test_websockets_are_closed_and_the_lifespan_passes():
    types = []

    async def app(scope, receive, send):
        types.append(scope["type"])

    guarded = guard(app, api_keys=["key"])
    exchange = await put(guarded, {"type": "websocket", "path": "/", "headers": []})
    assert [message["type"] for message in exchange.sent] == ["websocket.close"]
    await put(guarded, {"type": "lifespan"})
    assert types == ["lifespan"]


class Holding(Echo):
    """Has its body and asks for nothing more until it is let on; then asks for what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.asked_on = asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.received.append(await receive())
        await self.goes_on.wait()
        asking = asyncio.create_task(receive())
        self.asked_on.set()
        await asking
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def test_large_bodies_together_have_a_limit_and_small_ones_are_always_taken():
    app = Holding()
    guarded = guard(app, max_total_body_bytes=200_000)
    large, post = b"x" * 150_000, scope_of(method="POST")
    held, departed = Exchange(pieces(large)), asyncio.Event()

    async def receive():
        if held.messages:
            return await held.receive()
        await departed.wait()
        return DISCONNECT

    holder = asyncio.create_task(guarded(post, receive, held.send))
    async with asyncio.timeout(60):
        await until(lambda: bool(app.received))
        exchange = await put(guarded, post, pieces(large[:50_000], large[50_000:]))
        assert (exchange.status, exchange.error["code"]) == (503, "server_overloaded")
        assert exchange.headers[b"retry-after"] == b"1"
        small = asyncio.create_task(put(guarded, post, [*pieces(b"x" * 60_000), DISCONNECT]))
        await until(lambda: len(app.received) == 2)
        app.goes_on.set()
        await small
        await app.asked_on.wait()  # the body has become something else: it counts no longer
        assert (await put(guarded, post, [*pieces(large), DISCONNECT])).status == 200
        departed.set()
        await holder


async def test_refused_and_abandoned_bodies_count_no_longer():
    app = Echo()
    guarded = guard(app, max_body_bytes=100_000, max_total_body_bytes=100_000)
    post = scope_of(method="POST")
    for _ in range(3):
        assert (await put(guarded, post, pieces(b"x" * 90_000, b"x" * 20_000))).status == 503
        assert (await put(guarded, post, [*pieces(b"x" * 90_000, b"")[:1], DISCONNECT])).sent == []
        assert (await put(guarded, post, pieces(b"x" * 99_000))).status == 200


async def test_a_refused_body_counts_no_longer_while_its_answer_is_being_read():
    """Caught: `body.release()` removed before `refuse`: clients who read slowly would keep others out."""
    guarded = guard(Echo(), max_body_bytes=100_000, max_total_body_bytes=100_000)
    post = scope_of(method="POST")
    told, read = asyncio.Event(), asyncio.Event()

    async def send(_message):
        told.set()
        await read.wait()

    exchange = Exchange([*pieces(b"x" * 90_000, b"x" * 20_000), DISCONNECT])
    refused = asyncio.create_task(guarded(post, exchange.receive, send))
    await told.wait()
    assert (await put(guarded, post, pieces(b"x" * 99_000))).status == 200
    read.set()
    await refused


def test_bodies_fit_up_to_the_last_byte_and_small_ones_always():
    """Caught: `<` for `<=`, of all bodies together and of a small one."""
    held = middleware_module.HeldBytes(max_bytes=200_000)
    held.num_bytes = 200_000
    assert held.fits(150_000)
    held.num_bytes = 200_001
    assert not held.fits(150_000)
    assert held.fits(SMALL_BODY_BYTES)
    assert not held.fits(SMALL_BODY_BYTES + 1)
