"""Responses at which something fails: their clients are told, and their events are where they are looked for."""

import asyncio

import pytest

from aserve.http import create_app
from aserve.http.openai.responses import background
from aserve.http.openai.responses.background import Job, Jobs
from aserve.stores.responses import MemoryStore
from aserve.tenants import Tenants
from tests.engines import scripted_engine
from tests.http.conftest import client_of
from tests.http.responses import URL, events_of

BODY = {"input": "hi", "background": True}


class FailingStore(MemoryStore):
    """Fails to keep a response that is completed, and keeps all others."""

    async def put(self, record):
        if b'"status":"completed","completed_at"' in record.response:
            raise MemoryError
        await super().put(record)


def raising(error):
    def call(*_arguments, **_options):
        raise error

    return call


@pytest.mark.parametrize("error", [StopIteration(), asyncio.CancelledError(), MemoryError()], ids=repr)
@pytest.mark.parametrize(("owner", "name"), [(Tenants, "staying"), (background, "open_all"), (Job, "start")])
async def test_a_job_that_cannot_begin_is_told_and_leaves_nothing(owner, name, error, monkeypatch):
    """Catches a client who waits for ever, and a response that seems to be under way for ever."""
    jobs = []
    made = Jobs.__init__
    monkeypatch.setattr(Jobs, "__init__", lambda self: (jobs.append(self), made(self))[1])
    store = MemoryStore()
    async with scripted_engine() as engine, client_of(create_app(engine, response_store=store)) as client:
        with monkeypatch.context() as patches:
            patches.setattr(owner, name, raising(error))
            async with asyncio.timeout(10):
                answer = await client.post(URL, json=BODY)
        assert answer.status_code == 500, answer.text
        assert "internal error (fault" in answer.json()["error"]["message"]
        await asyncio.sleep(0)
        assert (jobs[0]._running, jobs[0]._tasks, store.num_bytes) == ({}, set(), 0)
        assert (await client.post(URL, json=BODY)).status_code == 200


async def test_events_are_found_by_their_numbers_after_a_fault():
    """Catches events that were made and never told, and are counted all the same."""
    async with scripted_engine() as engine, client_of(create_app(engine, response_store=FailingStore())) as client:
        id = (await client.post(URL, json=BODY)).json()["id"]
        events = events_of((await client.get(f"{URL}/{id}?stream=true")).text.removeprefix(": keep-alive\n\n"))
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        number = events[-2]["sequence_number"]
        rest = events_of((await client.get(f"{URL}/{id}?stream=true&starting_after={number}")).text)
        assert rest == events[-1:]
        assert (await client.get(f"{URL}/{id}")).json()["status"] == "failed"


async def test_what_the_store_keeps_at_the_second_attempt_is_in_the_log_all_the_same(caplog):
    """Catches a store that fails now and then, of which no operator hears."""

    class OnceFailingStore(MemoryStore):
        num_failures = 0

        async def put(self, record):
            if b'"status":"failed"' in record.response and not self.num_failures:
                self.num_failures += 1
                raise MemoryError("the first attempt")
            if b'"status":"completed","completed_at"' in record.response:
                raise MemoryError("the answer itself")
            await super().put(record)

    store = OnceFailingStore()
    async with scripted_engine() as engine, client_of(create_app(engine, response_store=store)) as client:
        id = (await client.post(URL, json=BODY)).json()["id"]
        await client.get(f"{URL}/{id}?stream=true")
        assert (await client.get(f"{URL}/{id}")).json()["status"] == "failed"
    assert store.num_failures == 1
    told = [record.getMessage() for record in caplog.records if id in record.getMessage()]
    assert ["_settle_for_sure" in message for message in told] == [False, True]


async def test_a_large_input_of_numbers_is_refused_by_what_it_must_be():
    """Told at a glance, before any of them is decoded: not by the first that is no object."""
    async with scripted_engine() as engine, client_of(create_app(engine)) as client:
        answer = await client.post(URL, json={"input": [1] * 50_000})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"
    assert answer.json()["error"]["message"].startswith("input must be a text, or a list of items")
