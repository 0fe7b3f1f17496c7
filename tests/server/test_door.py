"""Refusals before a request is parsed, over raw sockets: the long way's answers, and the connection as it was."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from aserve.engine import Engine
from aserve.http import Doorman, Keyring, create_app
from aserve.http.doorman import GENERATING_PATHS
from aserve.scheduler.scheduler import Scheduler
from aserve.server.door import HOLD_S, MAX_HELD_BYTES, Doors
from aserve.server.http1 import hypercorn_config
from tests.engines import says, scripted_loader
from tests.fakes import FakeClock, FakeScript, ScriptedRunner
from tests.server.wire import Client, Site, request, serving, until

TEXT = b"/v1/completions"
BODY = json.dumps({"prompt": "hi", "max_tokens": 4}).encode()
KEYS = "- {name: shop, key: key, requests_per_minute: 1000}\n- {name: spent, key: spent, requests_per_minute: 1}\n"
KEY = b"Authorization: Bearer key"
NAME = b"X-Request-Id: mine"
POST = request(TEXT, b"POST", KEY, NAME, body=BODY)
BODY_TIMEOUT_S = 0.05


class Counting:
    """An application that counts how often it is called, and for what."""

    def __init__(self, app) -> None:
        self._app = app
        self.asked: list[str] = []

    async def __call__(self, scope, receive, send) -> None:
        self.asked.append(scope["path"])
        await self._app(scope, receive, send)


@dataclass
class Full:
    """A server whose engine runs one request, has another waiting, and takes no third."""

    engine: Engine
    runner: ScriptedRunner
    app: Counting
    site: Site
    taken: list[Client]

    async def let_go(self) -> None:
        """Answer those who were taken, whole."""
        self.runner.let_land()
        for client in self.taken:
            answer = await client.answer()
            assert (answer.status, json.loads(answer.body)["usage"]["completion_tokens"]) == (200, 4)

    def usage(self, tenant: str) -> tuple[int, int, int]:
        usage = self.engine.tenants.account(tenant).usage()
        return usage.num_open, usage.num_requests, usage.num_refused


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return path


@asynccontextmanager
async def full(keys=None, *, at_the_door: bool = True, **app_options) -> AsyncGenerator[Full]:
    runner = ScriptedRunner(model=FakeScript(says("a long answer")))
    runner.hold()
    load = scripted_loader(runner=runner)
    sizes = {"block_size": 8, "num_blocks": 64, "max_num_batched_tokens": 64, "max_model_len": 128}
    scheduler = Scheduler(**sizes, max_num_seqs=1, max_num_queued_reqs=1)
    engine = Engine(lambda report: replace(load(report), scheduler=scheduler), clock=FakeClock())
    keyring = Keyring(path=keys, tenants=engine.tenants)
    doorman = Doorman(engine, keyring, app_options.get("max_body_bytes")) if at_the_door else None
    app = Counting(create_app(engine, keyring=keyring, body_timeout_s=BODY_TIMEOUT_S, **app_options))
    async with engine, serving(app, doorman=doorman) as site:
        taken = []
        for num in range(2):
            taken.append(await site.connect())
            await taken[-1].send(POST)
            await until(lambda: engine.statistics().num_running + engine.statistics().num_waiting > num)  # noqa: B023
        await until(lambda: engine.statistics().num_waiting == 1)
        app.asked.clear()
        yield Full(engine, runner, app, site, taken)
        statistics = engine.statistics()
        assert (statistics.num_used_blocks, statistics.num_running, statistics.num_waiting) == (0, 0, 0)


def access_lines(caplog) -> list[dict[str, object]]:
    lines = [dict(record.fields) for record in caplog.records if record.name == "aserve.access"]
    for line in lines:
        for name in ("first_byte_s", "total_s"):
            assert 0 <= line.pop(name, 0.0) < 60
    return lines


ROWS = {
    "a completion": (POST, True),
    "a body as long as may be": (request(TEXT, b"POST", KEY, NAME, body=BODY.ljust(1000)), True),
    "a body that is too long": (request(TEXT, b"POST", KEY, NAME, body=BODY.ljust(1001)), False),
    "a chat": (request(b"/v1/chat/completions", b"POST", KEY, NAME, body=b'{"messages": []}'), True),
    "a message": (request(b"/v1/messages", b"POST", b"X-Api-Key: key", NAME, body=b"{}"), True),
    "a message of a tenant who has used up its minute": (
        request(b"/v1/messages", b"POST", b"X-Api-Key: spent", NAME, body=b"{}"),
        True,
    ),
    "two keys of two kinds": (request(TEXT, b"POST", KEY, b"X-Api-Key: key", NAME, body=BODY), True),
    "a message with a wrong key": (request(b"/v1/messages", b"POST", b"X-Api-Key: other", NAME, body=BODY), False),
    "two keys of the other kind": (request(TEXT, b"POST", *[b"X-Api-Key: key"] * 2, NAME, body=BODY), False),
    "no JSON at all, which is not looked at": (request(TEXT, b"POST", KEY, NAME, body=b"]" * 100), True),
    "another media type": (request(TEXT, b"POST", KEY, NAME, b"Content-Type: text/plain", body=BODY), True),
    "no body": (request(TEXT, b"POST", KEY, NAME, b"Content-Length: 0"), True),
    "keep-alive": (request(TEXT, b"POST", KEY, NAME, b"Connection: Keep-Alive", body=BODY), True),
    "spaces around values": (
        request(TEXT, b"POST", b"authorization: \t Bearer key \t", b"x-request-id:mine", body=BODY),
        True,
    ),
    "a tenant who has used up its minute": (
        request(TEXT, b"POST", b"Authorization: Bearer spent", NAME, body=BODY),
        True,
    ),
    "no key": (request(TEXT, b"POST", NAME, body=BODY), False),
    "a wrong key": (request(TEXT, b"POST", b"Authorization: Bearer other", NAME, body=BODY), False),
    "two keys": (request(TEXT, b"POST", KEY, KEY, NAME, body=BODY), False),
    "a body that is too large": (request(TEXT, b"POST", KEY, NAME, body=b" " * 2000), False),
    "another path": (request(b"/v1/nothing", b"POST", KEY, NAME, body=BODY), False),
    "a query": (request(TEXT + b"?key=secret", b"POST", KEY, NAME, body=BODY), False),
    "another method": (request(TEXT, b"GET", KEY, NAME), False),
    "a method in lower case": (request(TEXT, b"post", KEY, NAME, body=BODY), False),
    "two hosts": (request(TEXT, b"POST", KEY, NAME, b"Host: y", body=BODY), False),
    "two lengths": (request(TEXT, b"POST", KEY, NAME, b"Content-Length: 3", body=BODY), False),
    "a length with a sign": (request(TEXT, b"POST", KEY, NAME, b"Content-Length: +3") + b"abc", False),
    "no length": (request(TEXT, b"POST", KEY, NAME), False),
    "chunks": (
        request(TEXT, b"POST", KEY, NAME, b"Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n",
        False,
    ),
    "length and chunks": (
        request(TEXT, b"POST", KEY, NAME, b"Content-Length: 12", b"Transfer-Encoding: chunked")
        + b"2\r\n{}\r\n0\r\n\r\n",
        False,
    ),
    "a folded header": (request(TEXT, b"POST", KEY, NAME, b"X-A: b\r\n c", body=BODY), False),
    "a space before the colon": (request(TEXT, b"POST", KEY, NAME, b"X-A : b", body=BODY), False),
    "NUL in a header": (request(TEXT, b"POST", KEY, NAME, b"X-A: b\x00c", body=BODY), False),
    "the last request": (request(TEXT, b"POST", KEY, NAME, b"Connection: close", body=BODY), False),
    "101 headers": (request(TEXT, b"POST", KEY, NAME, *[b"X-A: b"] * 99, body=BODY), False),
    "HTTP/1.0": (request(TEXT, b"POST", KEY, NAME, body=BODY).replace(b"HTTP/1.1", b"HTTP/1.0", 1), False),
}


@pytest.mark.parametrize(("data", "is_early"), ROWS.values(), ids=ROWS)
async def test_the_door_and_the_long_way_say_count_and_log_the_same(keys, caplog, data, is_early):
    """Catches a refusal that differs in status, header, body, account or access line, and one that comes too early."""
    caplog.set_level(logging.INFO, "aserve.access")
    seen = []
    for at_the_door in (False, True):
        async with full(keys, at_the_door=at_the_door, max_body_bytes=1000) as place:
            await place.site.ask(request(TEXT, b"POST", b"Authorization: Bearer spent", body=BODY))
            place.app.asked.clear()
            caplog.clear()
            client = await place.site.connect()
            answer = await client.ask(data)
            answer.headers.pop("date")
            usages = place.usage("shop"), place.usage("spent")
            seen.append((answer, usages, access_lines(caplog)))
            assert not place.app.asked or not (at_the_door and is_early)
            if answer.headers.get("connection") == "close":
                assert await client.rest() == b""
            else:
                assert (await client.ask(request(b"/health"))).status == 200, "the connection is as it was"
            await place.let_go()
    long_way, door = seen
    assert door == long_way
    if is_early:
        assert door[0].status == (529 if b"/v1/messages" in data and b"spent" not in data else 429)
        assert door[0].headers["x-request-id"] == "mine"
        assert len(door[2]) == 1


async def test_who_has_no_valid_key_never_learns_whether_there_is_room(keys):
    """Catches an early 429 for strangers."""
    async with full(keys) as place:
        for headers in ([], [b"Authorization: Bearer no"], [b"Authorization: Basic key"], [b"Authorization: key"]):
            answer = await place.site.ask(request(TEXT, b"POST", *headers, body=BODY))
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert place.usage("shop")[1] == 2
        await place.let_go()


async def test_a_refused_request_leaves_the_connection_to_the_next_one():
    """Catches bytes of a refused request that are taken for the next one's, and the other way round."""
    async with full() as place:
        client = await place.site.connect()
        for _ in range(50):
            assert (await client.ask(POST)).status == 429
        assert not place.app.asked
        await place.let_go()
        answer = await client.ask(POST)
        assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
        assert len(place.app.asked) == 1


@pytest.mark.parametrize("piece", [1, 7])
async def test_a_body_that_comes_late_is_awaited_and_then_refused(piece):
    """Catches an answer before the request's end, and a rest of the body that is taken for a request."""
    async with full() as place:
        client = await place.site.connect()
        head, rest = POST[: -len(BODY)], BODY
        await client.send(head)
        await until(lambda: place.site.connections.num_busy == 3)
        while rest:
            assert place.usage("")[1] == 2, "counted at its end"
            await client.send(rest[:piece])
            rest = rest[piece:]
            await asyncio.sleep(0.001)
        assert (await client.answer()).status == 429
        assert place.usage("")[1] == 3, "and once"
        assert not place.app.asked
        assert (await client.ask(POST)).status == 429
        assert place.site.connections.num_busy == 2
        await place.let_go()


async def test_room_that_comes_while_a_body_is_awaited_is_used():
    """Catches a refusal by what was so when the head came."""
    async with full() as place:
        client = await place.site.connect()
        await client.send(POST[:-3])
        await until(lambda: place.site.connections.num_busy == 3)
        await place.let_go()
        assert (await client.ask(POST[-3:])).status == 200


async def test_a_body_that_does_not_come_is_the_guards_business():
    """Catches a held request that is never let go: it gets the 408 of any other."""
    async with full() as place:
        client = await place.site.connect()
        async with asyncio.timeout(20 * HOLD_S):
            answer = await client.ask(POST[:-1])
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert len(place.app.asked) == 1
        await place.let_go()


async def test_who_leaves_before_the_end_of_a_body_has_a_line(caplog):
    caplog.set_level(logging.INFO, "aserve.access")
    async with full() as place:
        client = await place.site.connect()
        await client.send(POST[:-1])
        await until(lambda: place.site.connections.num_busy == 3)
        await client.close()
        await place.site.quiet(num_open=2)
        assert access_lines(caplog) == [
            {"method": "POST", "path": TEXT.decode(), "status": 499, "request_id": "mine"},
        ]
        assert not place.app.asked
        await place.let_go()


@pytest.mark.parametrize("second", [POST, request(b"/health"), POST[:-1], POST[:40]], ids=range(4))
async def test_pipelined_requests_are_answered_in_order(second):
    """Catches a request behind a refused one in the same read that is lost, or answered first."""
    async with full() as place:
        client = await place.site.connect()
        await client.send(POST + second)
        assert (await client.answer()).status == 429
        if not second.startswith(b"GET"):
            whole = POST
            await client.send(whole[len(second) :])
        assert (await client.answer()).status == (200 if second.startswith(b"GET") else 429)
        await place.let_go()


async def test_a_request_behind_one_that_is_being_answered_is_not_refused_out_of_turn():
    """Catches a refusal that is written into the middle of another answer."""
    async with full() as place:
        running = place.taken[0]
        await running.send(POST)
        await asyncio.sleep(0.05)
        assert not place.app.asked
        place.runner.let_land()
        answers = [await running.answer() for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]
        assert (await place.taken[1].answer()).status == 200


async def test_a_large_body_is_the_applications():
    """Catches a body that is held without being counted among all bodies."""
    async with full() as place:
        body = b" " * MAX_HELD_BYTES
        answer = await place.site.ask(request(TEXT, b"POST", body=body))
        assert answer.status == 429
        assert len(place.app.asked) == 1
        await place.let_go()


async def test_while_the_server_drains_each_answer_is_the_last():
    """Catches an early refusal that keeps a connection open which the server is about to close."""
    async with full() as place:
        client = await place.site.connect()
        draining = asyncio.create_task(place.site.connections.drain())
        await until(lambda: place.site.connections.context.terminated.is_set())
        answer = await client.ask(POST)
        assert (answer.status, answer.headers["connection"]) == (429, "close")
        await place.let_go()
        await draining


async def test_a_doorman_that_breaks_is_told_and_nobody_is_worse_off(caplog):
    """Catches a fault at the door that costs a client its connection."""

    class Broken(Doorman):
        def objection(self, scope, num_body_bytes):
            raise StopIteration("a prompt")

    async with full(at_the_door=False) as place:
        place.site.connections.doors.doorman = Broken(place.engine, Keyring())
        assert (await place.site.ask(POST)).status == 429
        assert len(place.app.asked) == 1
        await place.let_go()
    (fault,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "in refusing" in fault.getMessage()
    assert "a prompt" not in caplog.text


async def test_who_does_not_read_refusals_does_not_make_them_pile_up():
    """Catches answers that are written without regard to whether anybody takes them."""
    async with full() as place:
        client = await place.site.connect(receive_buffer_bytes=4096)

        for _ in range(2000):
            if client.writer.is_closing():  # too much was sent behind what is not answered
                break
            client.writer.write(POST)
            await asyncio.sleep(0)
        transports = [one._transport for one in place.site.connections._open]
        written = [transport.get_write_buffer_size() for transport in transports if not transport.is_closing()]
        assert max(written, default=0) < 2 * MAX_HELD_BYTES
        client.reset()
        await place.site.quiet(num_open=2)
        await place.let_go()


async def test_in_a_flood_everybody_is_answered_or_refused_and_nothing_taken_is_lost():
    """Catches an answer that goes missing, one too many, and a request that is counted twice."""
    async with full() as place:
        statuses: list[int] = []

        async def one_client(number: int) -> None:
            client = await place.site.connect()
            for turn in range(25):
                name = b"%d-%d" % (number, turn)
                data = request(TEXT, b"POST", b"X-Request-Id: %b" % name, body=BODY)
                cut = len(data) - (number * 7 + turn) % len(BODY) if turn % 2 else len(data)
                await client.send(data[:cut])
                if turn % 2:
                    await asyncio.sleep(0)
                    await client.send(data[cut:])
                answer = await client.answer()
                assert answer.headers["x-request-id"] == name.decode()
                if answer.status == 200:
                    assert json.loads(answer.body)["usage"]["completion_tokens"] == 4
                statuses.append(answer.status)

        async with asyncio.TaskGroup() as group:
            for number in range(16):
                group.create_task(one_client(number))
            await until(lambda: len(statuses) > 200)  # up to here nobody is served
            place.runner.let_land()
        assert len(statuses) == 400
        assert set(statuses) == {200, 429}
        assert len(place.app.asked) < 400, "some were refused at the door"
        assert place.usage("") == (0, 402, 0)
        await place.let_go()


async def test_what_needs_room_is_what_the_doorman_looks_at():
    """Catches a route that generates and is not refused at the door, and one that does not and is."""
    engine = Engine(scripted_loader())
    routes = [route for route in create_app(engine).routes if getattr(route.app, "_generates", False)]
    assert {route.path.encode() for route in routes} == GENERATING_PATHS


async def test_no_more_are_let_in_together_than_there_is_room_for():
    """Catches a crowd that is let in for one free place, to be refused the long way."""
    async with full() as place:
        clients = [await place.site.connect() for _ in range(8)]
        for client in clients:
            await client.send(POST[:-1])
        await until(lambda: place.site.connections.num_busy == 10)
        await place.let_go()
        place.runner.hold()
        for client in clients:
            await client.send(POST[-1:])
        await until(lambda: place.usage("")[1] >= 9)
        statuses = asyncio.gather(*(client.answer() for client in clients))
        await asyncio.sleep(0.05)
        place.runner.let_land()
        answers = [answer.status for answer in await statuses]
        assert sorted(set(answers)) == [200, 429]
        assert len(place.app.asked) < 8, "some were refused at the door"
        assert place.usage("")[1] == 10


class Failing:
    """A doorman of whom one call raises. `fails`: which."""

    def __init__(self, doorman: Doorman, fails: str, error: type[BaseException]) -> None:
        self._doorman = doorman
        self._fails = fails
        self._error = error

    def __getattr__(self, name: str) -> object:
        return self._fail if name == self._fails else getattr(self._doorman, name)

    def _fail(self, *_: object, **__: object) -> None:
        raise self._error("a secret")


@pytest.mark.parametrize("error", [RuntimeError, StopIteration, asyncio.CancelledError])
@pytest.mark.parametrize("fails", ["objection", "together", "refuse"])
async def test_where_the_doorman_fails_all_are_refused_the_long_way(fails, error, caplog):
    """Catches a fault at one look that leaves everybody who waits at the doors without an answer."""
    async with full() as place:
        doors = place.site.connections.doors
        doors.doorman = Failing(doors.doorman, fails, error)
        clients = [await place.site.connect() for _ in range(3)]
        for client in clients:
            await client.send(POST)
        assert [(await client.answer()).status for client in clients] == [429] * 3
        assert "a secret" not in caplog.text
        await place.let_go()


async def test_a_look_that_fails_is_nobody_elses(caplog):
    """Catches a loop over all who wait that ends with the first of them."""
    doors, called = Doors(None, hypercorn_config()), []

    def fail() -> None:
        raise RuntimeError("a secret")

    for look in (fail, lambda: called.append("second")):
        doors.wait(look)
    doors.look()
    assert called == ["second"]
    assert "fault" in caplog.text
    assert "a secret" not in caplog.text


async def test_a_client_who_leaves_is_gone_where_the_doorman_fails():
    """Catches a connection that is kept for ever, as what it was to be told of was not written to the log."""
    async with full() as place:
        doors = place.site.connections.doors
        client = await place.site.connect()
        await client.send(POST[:-1])
        await until(lambda: place.site.connections.num_busy == 3)
        doors.doorman = Failing(doors.doorman, "left", RuntimeError)
        await client.close()
        await place.site.quiet(num_open=2)
        doors.doorman = None
        await place.let_go()
