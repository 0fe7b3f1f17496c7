"""Lines of batches and their tenants' limits: lines take nobody's place, are refused by nobody, and can be stopped."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from aserve.core.errors import OverloadedError
from aserve.http import create_app
from aserve.http.batch.lines import LineFields, LineRunner
from aserve.tenants import Limits, Tenant
from tests.engines import says, scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.batch.test_batches import CHAT, HI, jsonl, line, output, start, upload
from tests.http.conftest import client_of
from tests.http.peer import until


@asynccontextmanager
async def limited(runner=None, max_num_seqs=8, **limits):
    """An engine whose nameless tenant has these limits, the application, and a client of it."""
    runner = runner or ScriptedRunner(model=FakeScript(says("Hello, world!")))
    async with scripted_engine(runner=runner, max_num_seqs=max_num_seqs) as engine:
        engine.tenants.declare([Tenant(limits=Limits(**limits))])
        app = create_app(engine)
        async with client_of(app) as client:
            yield engine, app, client
        app.state.batches.store.close()


async def begin(client, *names):
    file = await upload(client, jsonl(*map(line, names)))
    return (await start(client, file["id"])).json()


async def ask(client):
    return await client.post(CHAT, json={"messages": HI})


async def told(client, batch):
    return (await client.get(f"/v1/batches/{batch['id']}")).json()


@pytest.mark.parametrize("limits", [{"requests_at_once": 1}, {"requests_per_minute": 2}], ids=str)
async def test_a_tenants_requests_are_answered_while_its_batch_runs(limits):
    """Caught: a 429 for each request as long as a batch ran, which took every place as it became free."""
    runner = ScriptedRunner(model=FakeScript(says("Hello, world!")))
    runner.hold()
    async with limited(runner, **limits) as (engine, app, client):
        batch = await begin(client, *"abcdef")
        async with asyncio.timeout(10):
            await until(lambda: runner.plans)
        assert engine.tenants.account("").usage().num_open > 1
        asked = asyncio.create_task(ask(client))
        await asyncio.sleep(0.05)
        runner.let_land()
        assert (await asked).status_code == 200
        await app.state.batches.wait()
        assert (await told(client, batch))["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        used = (await client.get("/v1/usage")).json()
        assert (used["num_requests"], used["num_refused"], used["num_open"]) == (1 + 6 + 1, 0, 0)


async def test_lines_leave_half_of_a_minutes_tokens_to_requests():
    """Catches a batch that uses up what its tenant's requests need, and lines that count as refused while they wait."""
    async with limited(tokens_per_minute=600) as (engine, app, client):
        batch = await begin(client, *map(str, range(60)))
        account = engine.tenants.account("")
        async with asyncio.timeout(10):
            await until(lambda: account.allowances(engine._clock())["tokens"].remaining < 320)
        await asyncio.sleep(0.3)
        counts = (await told(client, batch))["request_counts"]
        assert 0 < counts["completed"] < 60
        assert account.allowances(engine._clock())["tokens"].remaining > 200
        assert (await ask(client)).status_code == 200
        used = (await client.get("/v1/usage")).json()
        assert used["num_refused"] == 0
        assert (
            0 <= used["num_requests"] - (1 + counts["completed"] + 1) < 5
        )  # some may have begun since, as tokens come
        await client.post(f"/v1/batches/{batch['id']}/cancel")
        await app.state.batches.wait()


@pytest.mark.parametrize("why", ["cancelled", "expired"])
async def test_lines_that_wait_for_their_tenants_tokens_can_be_stopped(why):
    """Caught: a batch that was cancelling for as long as its tenant had no tokens, and whose lines were run after."""
    async with limited(tokens_per_minute=1) as (engine, app, client):
        batches = app.state.batches
        file = await upload(client, jsonl(*map(line, "abc")))
        engine.tenants.account("").opened(1000, engine._clock())
        batch = await batches.create("", CHAT, file["id"], None)
        async with asyncio.timeout(10):
            await until(lambda: batches._running[batch["id"]].state["status"] == "in_progress")
            if why == "cancelled":
                await batches.cancel("", batch["id"])
            else:
                batches._clock = lambda: 2.0**40
            await batches.wait()
        batch = await told(client, batch)
        assert (batch["status"], batch["request_counts"]["failed"]) == (why, 3)
        codes = [each["error"]["code"] for each in await output(client, batch["error_file_id"])]
        assert codes == [f"batch_{why}"] * 3


async def test_a_line_that_waits_for_room_can_be_stopped_and_counts_once():
    """Caught: lines of a cancelled batch that went on asking for room, each time as one more request."""
    asked = []

    async def answer(_exchange):
        asked.append(1)
        raise OverloadedError("full", 1)

    async with limited() as (engine, _app, _client):
        runner = LineRunner(engine, {"/v1/completions": answer})
        one = LineFields(custom_id="a", method="POST", url="/v1/completions", body={})
        async with asyncio.timeout(10):
            assert await runner.run(one, "", lambda: len(asked) == 3) is None
        assert engine.tenants.account("").usage().num_requests == 1


async def test_so_many_lines_run_at_once_of_all_batches_together():
    """Caught: half of the rows for each batch, so that two of them had all."""
    runner = ScriptedRunner(model=FakeScript(says("Hello, world!")))
    runner.hold()
    async with limited(runner, max_num_seqs=4) as (engine, app, client):
        begun = [await begin(client, *"abcd") for _ in range(3)]
        async with asyncio.timeout(10):
            await until(lambda: runner.plans)
        await asyncio.sleep(0.2)
        assert engine.tenants.account("").usage().num_open == 2
        waiting = begun[-1]
        await client.post(f"/v1/batches/{waiting['id']}/cancel")
        async with asyncio.timeout(10):
            await until(lambda: waiting["id"] not in app.state.batches._running)
        runner.let_land()
        await app.state.batches.wait()
        assert [(await told(client, batch))["status"] for batch in begun] == ["completed", "completed", "cancelled"]
