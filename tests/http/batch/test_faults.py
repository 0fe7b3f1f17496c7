"""Batches at which something fails: what fails is told, and nothing that was answered or taken is lost."""

import asyncio
import json

import pytest

from aserve.core.errors import StoreError, UnavailableError
from aserve.http import create_app
from aserve.http.batch import batches
from aserve.http.batch.batches import ENDED
from aserve.http.batch.lines import LineFields, LineRunner
from tests.engines import scripted_engine
from tests.http.batch.test_batches import jsonl, line, output, start, upload
from tests.http.conftest import client_of
from tests.http.peer import Peer, until


@pytest.fixture
async def app():
    async with scripted_engine() as engine:
        app = create_app(engine)
        yield app
        app.state.batches.store.close()


@pytest.fixture
async def client(app):
    async with client_of(app) as client:
        yield client


def failing(monkeypatch, owner, name, *errors):
    """Make a coroutine function raise these, one at each call, and then do what it does; None lets a call be."""
    call, left = getattr(owner, name), list(errors)

    async def fail(*arguments, **options):
        if left and (error := left.pop(0)) is not None:
            raise error
        return await call(*arguments, **options)

    monkeypatch.setattr(owner, name, fail)


async def run(client, app, *lines):
    batch = (await start(client, (await upload(client, jsonl(*lines)))["id"])).json()
    await app.state.batches.wait()
    return (await client.get(f"/v1/batches/{batch['id']}")).json()


@pytest.mark.parametrize("error", [MemoryError(), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("where", ["run", "keep"])
async def test_a_line_that_fails_is_told_and_the_others_are_as_always(app, client, monkeypatch, where, error):
    """Catches a line that takes its batch along, and one that is neither in the output nor among the errors."""
    batches = app.state.batches
    owner, name = (batches._runner, "run") if where == "run" else (batches.store, "add_result")
    failing(monkeypatch, owner, name, None, error)
    batch = await run(client, app, line("a"), line("b"), line("c"))
    assert (batch["status"], batch["errors"]) == ("completed", None)
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    answered = await output(client, batch["output_file_id"])
    [failed] = await output(client, batch["error_file_id"])
    assert {each["custom_id"] for each in (*answered, failed)} == {"a", "b", "c"}
    assert failed["error"]["message"].startswith("internal error (fault ")


async def test_a_batch_whose_input_is_deleted_before_it_is_read_says_so(app, client):
    """Caught: a fault of the server's in place of what its client has done."""
    batches = app.state.batches
    begun = await batches.create("", "/v1/chat/completions", "file-that-was-deleted-meanwhile", None)
    await batches.wait()
    batch = (await client.get(f"/v1/batches/{begun['id']}")).json()
    [error] = batch["errors"]["data"]
    assert (batch["status"], error["code"], error["line"]) == ("failed", "file_not_found", None)
    assert error["message"] == "the input file is gone"


async def test_a_batch_that_fails_at_its_end_keeps_what_was_answered(app, client, monkeypatch):
    """Catches answers that nobody can get any more because the files could not be made at once."""
    failing(monkeypatch, app.state.batches.store, "results", MemoryError())
    batch = await run(client, app, line("a"), line("b"))
    [error] = batch["errors"]["data"]
    assert (batch["status"], error["line"]) == ("failed", None)
    assert [each["custom_id"] for each in await output(client, batch["output_file_id"])] == ["a", "b"]


async def test_where_not_even_the_end_can_be_kept_the_next_process_takes_it_up_again(app, client, monkeypatch):
    """Catches a batch that is lost with a full disk, and a task whose exception nobody looks at."""
    store = app.state.batches.store
    failing(monkeypatch, store, "results", MemoryError(), MemoryError())
    batch = await run(client, app, line("a"))
    assert batch["status"] == "finalizing"
    await app.state.batches.resume()
    await app.state.batches.wait()
    batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    assert batch["status"] == "completed"
    assert [each["custom_id"] for each in await output(client, batch["output_file_id"])] == ["a"]


@pytest.mark.parametrize("where", ["content", "put_batch", "add_result", "results"])
async def test_a_batch_is_gone_on_with_when_the_disk_is_no_longer_full(app, client, monkeypatch, where):
    """Catches a batch that stands still until the server is started anew, and a line that the full disk is told of."""
    monkeypatch.setattr(batches, "RETRY_S", 0.0)
    full = StoreError("the server's batch-store cannot be used: database or disk is full")
    failing(monkeypatch, app.state.batches.store, where, *([None] if where == "put_batch" else []), full, full)
    batch = await run(client, app, line("a"), line("b"), line("c"))
    assert (batch["status"], batch["errors"]) == ("completed", None)
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert [each["custom_id"] for each in await output(client, batch["output_file_id"])] == ["a", "b", "c"]


async def test_a_batch_whose_client_leaves_while_it_is_kept_is_run(app, client, monkeypatch):
    """Catches a batch that the store has, and that stands still until the server is started anew."""
    file = await upload(client, jsonl(line("a")))
    put, may = app.state.batches.store.put_batch, asyncio.Event()

    async def later(batch, **options):
        await may.wait()
        await put(batch, **options)

    monkeypatch.setattr(app.state.batches.store, "put_batch", later)
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    peer = Peer(app, "/v1/batches", body)
    task = peer.start()
    for _ in range(20):
        await asyncio.sleep(0.002)
    peer.leave()
    await task
    may.set()
    await until(lambda: app.state.batches._tasks)
    await app.state.batches.wait()
    [batch] = (await client.get("/v1/batches")).json()["data"]
    assert batch["status"] == "completed"


async def test_what_has_ended_cannot_be_cancelled_any_more(app, client, monkeypatch):
    """Catches a cancellation that comes while the end is being written, and is what stays."""
    batches = app.state.batches
    put = batches.store.put_batch

    async def cancel_and_put(batch, **options):
        if batch.state["status"] == "completed":
            await batches.cancel("", batch.id)
        await put(batch, **options)

    monkeypatch.setattr(batches.store, "put_batch", cancel_and_put)
    batch = await run(client, app, line("a"))
    assert (batch["status"], batch["cancelling_at"]) == ("completed", None)
    assert not batches._cancelled


async def test_a_line_that_no_engine_takes_is_still_to_do(app):
    """Catches one that is tried again at once, and for ever."""
    asked = []

    async def answer(exchange):
        asked.append(exchange)
        if len(asked) < 3:
            raise UnavailableError("the engine is closed")

    runner = LineRunner(app.state.batches._engine, {"/v1/completions": answer})
    with pytest.raises(UnavailableError):
        await runner.run(LineFields(custom_id="a", method="POST", url="/v1/completions", body={}), "")
    assert len(asked) == 1


async def test_a_batch_that_the_engine_ends_goes_on_later(app, client, monkeypatch):
    """Catches an end of the engine that is told as the batch's own."""
    failing(monkeypatch, app.state.batches._runner, "run", None, UnavailableError("closing"))
    batch = await run(client, app, line("a"), line("b"))
    assert batch["status"] not in ENDED
    await app.state.batches.resume()
    await app.state.batches.wait()
    batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    lines = await output(client, batch["output_file_id"])
    assert [json.dumps(each["custom_id"]) for each in lines] == ['"a"', '"b"']
