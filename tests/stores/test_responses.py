"""Stores of responses: bounds, tenants, and what is there after a kill -9."""

import asyncio
import random
import sqlite3
import threading
from contextlib import closing

import pytest

from aserve.core.errors import ConfigError, UnavailableError
from aserve.stores.responses import RECORD_BYTES, MemoryStore, SqliteStore, StoredResponse
from tests.stores.killing import said_before_kill
from tests.stores.writer import record


class Clock:
    """Tells the time that it is set to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture(params=["memory", "sqlite"])
def make(request, tmp_path):
    """Makes stores of both kinds; one in a file goes on from what is there."""
    made = []

    def make(**options):
        store = MemoryStore(**options) if request.param == "memory" else SqliteStore(tmp_path / "a.db", **options)
        made.append(store)
        return store

    yield make
    for store in made:
        if isinstance(store, SqliteStore):
            store.close()


def of(id, tenant="", size=100):
    return StoredResponse(id=id, tenant=tenant, response=b"x" * size, input=b"[]")


async def ids_of(store, ids, tenant=""):
    return [id for id in ids if await store.get(tenant, id) is not None]


async def test_what_is_put_is_there_until_it_is_deleted(make):
    store = make()
    await store.put(of("a"))
    assert await store.get("", "a") == of("a")
    await store.put(of("a", size=5))
    assert await store.get("", "a") == of("a", size=5)
    assert (await store.delete("", "a"), await store.delete("", "a"), await store.get("", "a")) == (True, False, None)


async def test_one_tenants_are_not_anothers(make):
    """Catches a look-up, or a deletion, that does not ask whose a response is."""
    store = make()
    await store.put(of("a", "one"))
    assert await store.get("two", "a") is None
    assert not await store.delete("two", "a")
    assert await ids_of(store, "a", "one") == ["a"]


async def test_the_oldest_go_where_there_are_too_many_bytes(make):
    """Catches bytes that are counted twice when one takes another's place, or not given back by a deletion."""
    store = make(max_bytes=4 * (RECORD_BYTES + 102))
    for id in "abcd":
        await store.put(of(id))
        await store.put(of(id))
    assert await ids_of(store, "abcd") == list("abcd")
    await store.put(of("a"))  # now the newest
    await store.put(of("e"))
    assert await ids_of(store, "abcde") == list("acde")
    await store.delete("", "c")
    await store.put(of("f"))
    assert await ids_of(store, "adef") == list("adef")
    await store.put(of("large", size=10_000))
    assert await ids_of(store, ["a", "d", "e", "f", "large"]) == ["large"]
    await store.put(of("b"))
    assert await ids_of(store, ["large", "b"]) == ["b"]


async def test_what_is_too_old_is_gone(make):
    clock = Clock()
    store = make(max_age_s=60.0, clock=clock)
    await store.put(of("a"))
    clock.now += 30
    await store.put(of("b"))
    clock.now += 31
    assert await ids_of(store, "ab") == ["b"]
    assert not await store.delete("", "a")
    await store.put(of("c"))
    clock.now -= 31
    assert await ids_of(store, "abc") == ["b", "c"], "what is too old is dropped, and not only hidden"


async def test_what_is_just_as_old_as_may_be_is_there(make):
    clock = Clock()
    store = make(max_age_s=60.0, clock=clock)
    await store.put(of("a"))
    clock.now += 60
    await store.put(of("b"))
    assert await ids_of(store, "ab") == ["a", "b"]


async def test_a_file_is_gone_on_from(tmp_path):
    """Catches bytes of a former process that do not count."""
    with closing(SqliteStore(tmp_path / "a.db")) as store:
        for id in "abcd":
            await store.put(of(id))
    with closing(SqliteStore(tmp_path / "a.db", max_bytes=2 * (RECORD_BYTES + 102))) as store:
        assert await ids_of(store, "abcd") == list("abcd")
        await store.put(of("e"))
        assert await ids_of(store, "abcde") == list("de")
    assert (tmp_path / "a.db").stat().st_mode & 0o077 == 0, "what users say is for the server's own user"


async def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path):
    (tmp_path / "none.db").write_text("hello" * 1000)
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE other (a)")
    connection.close()
    with closing(SqliteStore(tmp_path / "used.db")):
        for name, told in {
            "none.db": "not a database",
            "other.db": "of another kind",
            "used.db": "locked",
            "no/a.db": "No such file",
        }.items():
            with pytest.raises(ConfigError, match=f"--response-store: cannot use .*{told}") as caught:
                SqliteStore(tmp_path / name)
            assert "\n" not in str(caught.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aserve-response-store")]


async def test_who_leaves_while_it_is_put_does_not_keep_it_from_being_there(tmp_path):
    with closing(SqliteStore(tmp_path / "a.db")) as store:
        putting = asyncio.create_task(store.put(of("a")))
        await asyncio.sleep(0)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert await ids_of(store, "a") == ["a"]
    with pytest.raises(UnavailableError):
        await store.get("", "a")


def killed(path, start, after_s):
    """What a process said to be there before it was killed: numbers, and whether they were over."""
    lines = map(str.split, said_before_kill("tests.stores.writer", path, start, after_s=after_s))
    return {int(number): is_over == "1" for number, is_over in lines}


@pytest.mark.parametrize("num_kills", [4, pytest.param(200, marks=[pytest.mark.thorough, pytest.mark.timeout(1800)])])
async def test_what_was_acknowledged_is_there_after_kill_9(tmp_path, num_kills):
    """A process says what is there, and is killed at a random moment; all of it is read back whole."""
    path = tmp_path / "a.db"
    chance = random.Random(1)
    acknowledged, start = {}, 0
    for _ in range(num_kills):
        acknowledged |= killed(path, start, chance.uniform(0.0, 0.15))
        start = max(acknowledged) + 2
    assert len(acknowledged) > num_kills
    with closing(SqliteStore(path)) as store:
        for number, is_over in acknowledged.items():
            found = await store.get("t", f"resp_{number}")
            assert found in (record(number, is_over=True), record(number, is_over=is_over)), number
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_a_stop_iteration_in_the_thread_reaches_who_waits(tmp_path, monkeypatch):
    """Catches a wait for ever: asyncio's futures refuse a StopIteration."""
    with closing(SqliteStore(tmp_path / "a.db")) as store:
        monkeypatch.setattr(store, "_get", lambda *_: next(iter(())))
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="StopIteration"):
                await store.get("", "a")
