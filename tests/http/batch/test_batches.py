"""/v1/files and /v1/batches: what a batch's lines come to, how it ends, and that a killed process loses nothing."""

import asyncio
import json

import pytest

from aserve.core.errors import InvalidRequestError
from aserve.http import AppOptions, create_app
from aserve.http.batch import batches
from aserve.http.batch.lines import LOWEST_PRIORITY, line_of
from aserve.http.body import MAX_DEPTH, MAX_FIELDS, MAX_REALS
from aserve.stores.batches import BatchStore, StoredBatch, StoredFile
from tests.engines import says, scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.conftest import client_of
from tests.observe.explained import micro

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]


def line(name, url=CHAT, **body):
    body = {"input": "hi", **body} if url == RESPONSES else {"messages": HI, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def deep(num_levels):
    """An array in an array, and so on."""
    value = []
    for _ in range(num_levels - 1):
        value = [value]
    return value


def jsonl(*lines):
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


async def upload(client, content):
    response = await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    assert response.status_code == 200, response.text
    return response.json()


async def start(client, file_id, endpoint=CHAT):
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", "metadata": {"a": "b"}}
    return await client.post("/v1/batches", json=body)


async def run(client, app, *lines, endpoint=CHAT):
    """A batch of these lines, after its end."""
    batch = (await start(client, (await upload(client, jsonl(*lines)))["id"], endpoint)).json()
    assert (batch["status"], batch["object"], batch["metadata"]) == ("validating", "batch", {"a": "b"})
    await app.state.batches.wait()
    return (await client.get(f"/v1/batches/{batch['id']}")).json()


async def output(client, file_id):
    response = await client.get(f"/v1/files/{file_id}/content")
    return [json.loads(each) for each in response.text.splitlines()]


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES, MESSAGES])
async def test_a_line_that_asks_where_its_time_went_is_told(endpoint):
    """GET /v1/requests finds it by the explanation's id, too."""
    async with scripted_engine() as engine:
        app = create_app(engine)
        async with client_of(app) as client:
            fields = {"max_tokens": 9} if endpoint == MESSAGES else {}
            asking = line("a", endpoint, **fields, x_aserve={"explain": True})
            batch = await run(client, app, asking, line("b", endpoint, **fields), endpoint=endpoint)
            assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
            told = {one["custom_id"]: one["response"]["body"] for one in await output(client, batch["output_file_id"])}
            found = told["a"]["x_aserve"]["explanation"]
            assert (found["state"], found["explained"]) == ("ended", True)
            assert sum(map(micro, found["phases_ms"].values())) == micro(found["total_ms"]) > 0
            assert (await client.get(f"/v1/requests/{found['id']}")).json() == found
            assert "x_aserve" not in told["b"]


async def test_a_batch_is_answered_line_by_line():
    async with scripted_engine() as engine:
        app = create_app(engine)
        async with client_of(app) as client:
            batch = await run(client, app, line("a"), line("b", max_tokens=3), line("c", temperature=9))
            assert batch["status"] == "completed"
            assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
            assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
            first, second = await output(client, batch["output_file_id"])
            assert (first["custom_id"], first["response"]["status_code"], first["error"]) == ("a", 200, None)
            assert first["response"]["body"]["choices"][0]["message"]["content"] == "Hello, world!"
            assert second["response"]["body"]["usage"]["completion_tokens"] == 3
            [failed] = await output(client, batch["error_file_id"])
            assert (failed["custom_id"], failed["response"]["status_code"]) == ("c", 400)
            assert failed["response"]["body"]["error"]["param"] == "temperature"
            assert engine.statistics().num_used_blocks == 0


async def test_lines_are_responses_or_messages_too():
    """Catches errors of a line in another API's words, lines that come before other requests, and a store they fill."""
    runner = ScriptedRunner(model=FakeScript(says("Hello, world!")))
    async with scripted_engine(runner=runner) as engine:
        app = create_app(engine)
        async with client_of(app) as client:
            lines = line("a", RESPONSES), line("b", RESPONSES, top_p=9), line("c", RESPONSES, store=True)
            batch = await run(client, app, *lines, endpoint=RESPONSES)
            unstored, stored = [each["response"]["body"] for each in await output(client, batch["output_file_id"])]
            assert unstored["output"][0]["content"][0]["text"] == "Hello, world!"
            found = [(await client.get(f"{RESPONSES}/{each['id']}")).status_code for each in (unstored, stored)]
            assert found == [404, 200]
            [refused] = await output(client, batch["error_file_id"])
            assert refused["response"]["body"]["error"]["param"] == "top_p"
            batch = await run(client, app, line("a", MESSAGES, max_tokens=3), line("b", MESSAGES), endpoint=MESSAGES)
            [said] = await output(client, batch["output_file_id"])
            assert said["response"]["body"]["content"] == [{"type": "text", "text": "Hel"}]
            [refused] = await output(client, batch["error_file_id"])
            assert refused["response"]["status_code"] == 400
            assert refused["response"]["body"]["error"]["type"] == "invalid_request_error"
            assert refused["response"]["body"]["request_id"] == refused["response"]["request_id"]
            assert engine.statistics().num_used_blocks == 0


@pytest.mark.parametrize("url", [CHAT, RESPONSES, MESSAGES])
async def test_requests_come_before_lines_of_any_kind(url):
    """Catches a line that has the priority of a request that somebody waits for."""
    priorities = []
    async with scripted_engine() as engine:
        opened = engine.open
        engine.open = lambda *given, **terms: (priorities.append(terms["priority"]), opened(*given, **terms))[1]
        app = create_app(engine)
        async with client_of(app) as client:
            await run(client, app, line("a", url, **({"max_tokens": 9} if url == MESSAGES else {})), endpoint=url)
    assert priorities == [LOWEST_PRIORITY]


@pytest.mark.parametrize(
    ("lines", "told", "number"),
    [
        ((line("a"), line("a")), "'a' is there twice", 2),
        (({**line("a"), "url": "/v1/completions"},), "url must be one of /v1/chat/completions", 1),
        ((line("a", stream=True),), "not streamed", 1),
        ((line("a", background=True),), "not made in the background", 1),
        (({**line("a"), "x": 1},), "unknown field x", 1),
        ((line("a"), {"custom_id": "b"}), "this field is required", 2),
        ((), "1 to 50000 lines", None),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_batch_with_a_wrong_line_fails_whole_and_says_which(lines, told, number):
    async with scripted_engine() as engine:
        app = create_app(engine)
        async with client_of(app) as client:
            batch = await run(client, app, *lines)
    [error] = batch["errors"]["data"]
    assert (batch["status"], error["line"]) == ("failed", number)
    assert told in error["message"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"metadata": [0.5] * (MAX_REALS + 1)}, f"the body has more than {MAX_REALS} fractions"),
        ({f"x{i}": 1 for i in range(MAX_FIELDS)}, f"the body has more than {MAX_FIELDS} fields"),
        ({"metadata": deep(MAX_DEPTH)}, f"the body is nested more than {MAX_DEPTH} levels deep"),
        ({"metadata": deep(900)}, f"the body is nested more than {MAX_DEPTH} levels deep"),
    ],
    ids=["fractions", "fields", "deep", "deeper"],
)
async def test_a_lines_body_has_the_bounds_of_any_other(client, body, told):
    """Caught: a 500 for a schema of 900 levels."""
    one = line("a", **body)
    alone = await client.post(CHAT, json=one["body"])
    assert alone.status_code == 400
    with pytest.raises(InvalidRequestError, match=told) as caught:
        line_of(json.dumps(one).encode(), (CHAT,))
    assert caught.value.message == alone.json()["error"]["message"]
    assert line_of(json.dumps(line("a", metadata=deep(MAX_DEPTH - 1))).encode(), (CHAT,)).custom_id == "a"


async def test_what_is_done_stays_done_when_a_process_is_killed(tmp_path):
    """Catches a line that is run twice or never, and a batch that is forgotten: the second has the store only."""
    options = AppOptions(batch_store=str(tmp_path / "batches.db"))
    async with scripted_engine() as engine:
        app = create_app(engine, options=options)
        async with client_of(app) as client:
            file = await upload(client, jsonl(*(line(name) for name in "abcd")))
        store = app.state.batches.store
        state = {"id": "batch_1", "status": "in_progress", "input_file_id": file["id"], "endpoint": CHAT}
        state |= {"expires_at": 2**40, "request_counts": {"total": 0, "completed": 0, "failed": 0}}
        await store.put_batch(StoredBatch("batch_1", "", 1, state))
        await store.add_result("batch_1", 1, b'{"custom_id":"b"}', is_error=False)
        store.close()
    runner = ScriptedRunner(model=FakeScript(says("again")))
    async with scripted_engine(runner=runner) as engine:
        app = create_app(engine, options=options)
        await app.state.batches.resume()
        await app.state.batches.wait()
        async with client_of(app) as client:
            batch = (await client.get("/v1/batches/batch_1")).json()
            lines = await output(client, batch["output_file_id"])
        app.state.batches.store.close()
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 4)
    assert [each["custom_id"] for each in lines] == ["a", "b", "c", "d"]
    assert [each.get("response") is None for each in lines] == [False, True, False, False]


async def test_a_cancelled_batch_runs_no_more_and_tells_which_lines_were_left():
    runner = ScriptedRunner(model=FakeScript(says("slow")))
    runner.hold()
    async with scripted_engine(runner=runner, max_num_seqs=2) as engine:
        app = create_app(engine)
        async with client_of(app) as client:
            batch = (await start(client, (await upload(client, jsonl(line("a"), line("b"), line("c"))))["id"])).json()
            async with asyncio.timeout(10):
                while not runner.plans:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            cancelled = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
            assert cancelled["status"] == "cancelling"
            runner.let_land()
            await app.state.batches.wait()
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
            assert (batch["status"], batch["request_counts"]) == (
                "cancelled",
                {"total": 3, "completed": 1, "failed": 2},
            )
            left = await output(client, batch["error_file_id"])
            assert [(each["custom_id"], each["error"]["code"]) for each in left] == [
                ("b", "batch_cancelled"),
                ("c", "batch_cancelled"),
            ]


async def test_a_batch_whose_time_is_up_expires():
    async with scripted_engine() as engine:
        app = create_app(engine)
        times = iter([0.0] * 2)
        app.state.batches._clock = lambda: next(times, 10**6)
        async with client_of(app) as client:
            batch = await run(client, app, line("a"))
            assert (batch["status"], batch["output_file_id"]) == ("expired", None)
            [left] = await output(client, batch["error_file_id"])
            assert left["error"]["code"] == "batch_expired"


async def test_lines_wait_while_a_request_waits():
    """Catches a batch that takes a row for which somebody waits."""
    runner = ScriptedRunner(model=FakeScript(says("x")))
    runner.hold()
    async with scripted_engine(runner=runner, max_num_seqs=1) as engine:
        app = create_app(engine)
        async with client_of(app) as client, engine.open((1, 2)), engine.open((3, 4)):
            async with asyncio.timeout(10):
                while not engine.statistics().num_waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await start(client, (await upload(client, jsonl(line("a"))))["id"])
            await asyncio.sleep(0.2)
            assert engine.statistics().num_waiting == 1
        runner.let_land()
        await app.state.batches.wait()


async def test_files_and_batches_are_their_tenants_own(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: one, key: a}\n- {name: two, key: b}\n")
    async with scripted_engine() as engine:
        from aserve.http import Keyring

        app = create_app(engine, keyring=Keyring(path=keys, tenants=engine.tenants))
        async with client_of(app) as client:
            client.headers["authorization"] = "Bearer a"
            file = await upload(client, jsonl(line("a")))
            batch = (await start(client, file["id"])).json()
            await app.state.batches.wait()
            assert engine.tenants.account("one").usage().num_requests > 0
            client.headers["authorization"] = "Bearer b"
            for path in (f"files/{file['id']}", f"files/{file['id']}/content", f"batches/{batch['id']}"):
                assert (await client.get(f"/v1/{path}")).status_code == 404
            assert (await start(client, file["id"])).status_code == 404
            assert (await client.get("/v1/files")).json()["data"] == []
            assert (await client.get("/v1/batches")).json()["data"] == []


async def test_what_is_kept_is_bounded():
    """Catches uploads that fill the memory, and results that are kept beside the files that are made of them."""
    async with scripted_engine() as engine:
        app = create_app(engine, options=AppOptions(batch_store_bytes=4096))
        async with client_of(app) as client:
            batch = await run(client, app, line("a"))
            assert batch["status"] == "completed"
            files = (await client.get("/v1/files")).json()["data"]
            with pytest.raises(InvalidRequestError, match=f" {sum(file['bytes'] for file in files)} bytes are kept"):
                await app.state.batches.store.check_room(4096, "file")
            file = await upload(client, b"x" * 1024)
            refused = await client.post("/v1/files", files={"file": ("b", b"x" * 4096)}, data={"purpose": "batch"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file")
            await app.state.batches.store.add_result("batch_x", 0, b"x" * 4096, is_error=False)
            refused = await start(client, file["id"])
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_file_id")


async def test_so_many_batches_are_under_way_and_no_more(monkeypatch):
    monkeypatch.setattr(batches, "MAX_BATCHES", 1)
    async with scripted_engine() as engine:
        app = create_app(engine)
        async with client_of(app) as client:
            file = await upload(client, jsonl(line("a"), line("b")))
            assert (await start(client, file["id"])).status_code == 200
            refused = await start(client, file["id"])
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_batches")
            await app.state.batches.wait()
            assert (await start(client, file["id"])).status_code == 200
            await app.state.batches.wait()


BAD_PAGES = [
    *(("limit=" + limit, "limit") for limit in ("x", "0", "101", "-1", "1" + "0" * 5000, "0" * 8 + "1" + "0" * 5000)),
    ("limit=000000005999", "limit"),
    ("after=nobody", "after"),
    ("order=up", "order"),
]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": {"b": [1]}}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"a": "v" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_a_batch_cannot_have_is_refused_by_name(client, fields, param):
    file = await upload(client, jsonl(line("a")))
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", **fields}
    refused = await client.post("/v1/batches", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert refused.json()["error"]["message"].startswith(param)


async def test_a_file_that_shall_expire_is_refused(client):
    """Caught: a file that its client believes to be gone, and that is kept."""
    data = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    refused = await client.post("/v1/files", files={"file": ("in.jsonl", b"{}")}, data=data)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "expires_after")


async def test_files_are_listed_in_pages_and_by_purpose():
    async with scripted_engine() as engine:
        app = create_app(engine)
        async with client_of(app) as client:
            ids = [(await upload(client, jsonl(line("a"))))["id"] for _ in range(3)]
            made = (await start(client, ids[0])).json()
            await app.state.batches.wait()
            made = (await client.get(f"/v1/batches/{made['id']}")).json()["output_file_id"]

            async def listed(query):
                page = (await client.get(f"/v1/files?{query}")).json()
                return [file["id"] for file in page["data"]], page["has_more"]

            assert await listed("") == ([made, *ids[::-1]], False)
            assert await listed("purpose=batch&limit=2") == (ids[:0:-1], True)
            assert await listed(f"purpose=batch&limit=2&after={ids[1]}") == (ids[:1], False)
            assert await listed("purpose=batch_output") == ([made], False)
            assert await listed("purpose=assistants") == ([], False)
            assert await listed("order=asc&limit=1") == (ids[:1], True)
            for query, param in {"limit=0": "limit", "limit=10001": "limit", "after=x": "after"}.items():
                refused = await client.get(f"/v1/files?{query}")
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_files_are_listed_and_deleted_and_batches_are_in_pages():
    async with scripted_engine() as engine:
        app = create_app(engine)
        async with client_of(app) as client:
            file = await upload(client, jsonl(line("a")))
            assert (file["filename"], file["purpose"], file["bytes"]) == ("in.jsonl", "batch", len(jsonl(line("a"))))
            assert (await client.get("/v1/files")).json()["data"] == [file]
            ids = [(await start(client, file["id"])).json()["id"] for _ in range(3)]
            await app.state.batches.wait()
            page = (await client.get("/v1/batches?limit=2")).json()
            assert ([each["id"] for each in page["data"]], page["has_more"]) == (ids[:0:-1], True)
            rest = (await client.get(f"/v1/batches?limit=2&after={page['last_id']}")).json()
            assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (ids[:1], False)
            for query, param in BAD_PAGES:
                refused = await client.get(f"/v1/batches?{query}")
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), query[:40]
            whole = (await client.get("/v1/batches?order=asc")).json()
            assert [each["id"] for each in whole["data"]] == ids
            assert (await client.delete(f"/v1/files/{file['id']}")).json()["deleted"]
            assert (await client.get(f"/v1/files/{file['id']}")).status_code == 404
            assert (await start(client, file["id"])).status_code == 404
            assert (await start(client, "x", "/v1/embedding")).json()["error"]["param"] == "endpoint"


async def test_a_store_says_whose_it_is_and_outlives_its_process(tmp_path):
    path = str(tmp_path / "a.db")
    store = BatchStore(path)
    await store.add_file(StoredFile("f", "me", 1, "n", "batch", 0), b"abc")
    store.close()
    store = BatchStore(path)
    assert await store.file("me", "f") == StoredFile("f", "me", 1, "n", "batch", 3)
    assert await store.file("you", "f") is None
    assert await store.content("f") == b"abc"
    store.close()
