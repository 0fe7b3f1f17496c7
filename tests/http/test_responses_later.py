"""Responses after their answer: asked for, gone on from, deleted, made in the background, cut, and after a restart."""

import asyncio
import json
from contextlib import closing

import openai
import pytest

from aserve.core.errors import UnavailableError
from aserve.engine import EngineState
from aserve.http import Keyring, create_app
from aserve.http.openai.responses import background
from aserve.http.openai.responses.background import ENDED
from aserve.stores.responses import MemoryStore, SqliteStore
from tests.engines import says, scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.conftest import client_of
from tests.http.peer import Peer, until
from tests.http.responses import TOOLS, URL, events_of, put_together, sdk
from tests.http.test_disconnects import held
from tests.http.test_tools import CALL, THOUGHT, speaking

KEYS = "- {name: one, key: a}\n- {name: two, key: b, requests_at_once: 1}\n"


@pytest.fixture
def runner():
    return ScriptedRunner(model=FakeScript(says("Hello, world!")))


@pytest.fixture
async def engine(runner):
    """Afterwards it holds nothing, and no response is being made."""
    async with scripted_engine(runner=runner, max_model_len=512, num_blocks=200) as engine:
        before = asyncio.all_tasks()
        yield engine
        runner.let_land()
        await until(lambda: held(engine) == (0, 0, 0))
        await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})


async def test_a_response_is_there_until_it_is_deleted(engine):
    client = sdk(engine)
    made = await client.responses.create(model="scripted", input="hi")
    assert (await client.responses.retrieve(made.id)).model_dump() == made.model_dump()
    await client.responses.delete(made.id)
    for attempt in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            await attempt(made.id)
        assert caught.value.code == "response_not_found"


async def test_what_is_not_to_be_stored_is_not(engine):
    client = sdk(engine)
    made = await client.responses.create(model="scripted", input="hi", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


class SlowStore(MemoryStore):
    """Keeps nothing until it may."""

    def __init__(self):
        super().__init__()
        self.may = asyncio.Event()

    async def put(self, record):
        await self.may.wait()
        await super().put(record)


async def test_a_stream_is_there_when_its_end_is_told(engine):
    """Catches an end that is sent before it is kept: an agent goes on from a response as soon as it has its id."""
    store = SlowStore()
    peer = Peer(create_app(engine, response_store=store), URL, {"input": "hi", "stream": True})
    task = peer.start()
    await until(lambda: "world" in "".join(json.loads(f'"{text}"') for text in deltas(peer.text)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert "response.completed" not in peer.text
    store.may.set()
    await task
    assert "response.completed" in peer.text


def deltas(text):
    return [piece.split('"')[0] for piece in text.split('"delta":"')[1:]]


async def test_a_conversation_goes_on_from_a_response():
    """With its items, calls and thoughts among them, and without its instructions, as OpenAI has it."""
    runner = ScriptedRunner(model=FakeScript(says(f"{THOUGHT}Let me see.{CALL}")))
    async with speaking("", runner=runner) as engine:
        client = sdk(engine)
        first = await client.responses.create(model="scripted", input="hi", tools=TOOLS, instructions="Be brief")
        reply = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
        fields = {"model": "scripted", "tools": TOOLS, "input": [reply]}
        second = await client.responses.create(**fields, previous_response_id=first.id)
        assert second.previous_response_id == first.id
        flat = [{"role": "user", "content": "hi"}, *[item.to_dict() for item in first.output], reply]
        third = await client.responses.create(model="scripted", tools=TOOLS, input=flat)
        assert (
            second.usage.input_tokens
            == third.usage.input_tokens
            == third.usage.input_tokens_details.cached_tokens + 1 + ((third.usage.input_tokens - 1) % 8)
        )
        page = await client.responses.input_items.list(second.id, order="asc", limit=3)
        assert [item.type for item in page.data] == ["message", "reasoning", "message"]
        assert (page.data[0].content[0].text, page.has_more) == ("hi", True)
        assert (page.first_id, page.last_id) == (page.data[0].id, page.data[2].id)
        kinds = [item.type async for item in client.responses.input_items.list(second.id, limit=2)]
        assert kinds == ["function_call_output", "function_call", "message", "reasoning", "message"]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_items_of_one_id_are_all_listed_and_none_twice(engine, order):
    """Caught: pages without an end, where a client chose ids, or sent an answer back beside its response's id."""
    app = create_app(engine)
    async with client_of(app) as client:
        ids = ["a", "b", "a", "a", "a_2", "a_2"]
        items = [{"role": "user", "content": str(i), "id": id} for i, id in enumerate(ids)]
        first = (await client.post(URL, json={"input": items})).json()
        again = {"input": [*first["output"], {"role": "user", "content": "7"}], "previous_response_id": first["id"]}
        second = (await client.post(URL, json=again)).json()
        texts, found, page = [], [], {"has_more": True, "last_id": None}
        while page["has_more"]:
            after = f"&after={page['last_id']}" if found else ""
            page = (await client.get(f"{URL}/{second['id']}/input_items?order={order}&limit=2{after}")).json()
            found += [item["id"] for item in page["data"]]
            texts += [item["content"][0]["text"] for item in page["data"]]
            assert len(found) <= 9
        said = first["output"][0]["content"][0]["text"]
        assert texts == [*map(str, range(6)), said, said, "7"][:: 1 if order == "asc" else -1]
        assert len({*found}) == 9


async def test_pages_that_cannot_be_are_refused(engine):
    app = create_app(engine)
    async with client_of(app) as client:
        id = (await client.post(URL, json={"input": "hi"})).json()["id"]
        for query, param in {
            "limit=0": "limit",
            "limit=101": "limit",
            "limit=x": "limit",
            "order=up": "order",
            "after=msg_none": "after",
        }.items():
            refused = await client.get(f"{URL}/{id}/input_items?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        for query, param in {
            "stream=1": "stream",
            "starting_after=3": "starting_after",
            "stream=true": "stream",
        }.items():
            refused = await client.get(f"{URL}/{id}?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await client.post(f"{URL}/{id}/cancel")).status_code == 400, "it was not made in the background"


async def test_one_keys_responses_are_not_anothers(engine, tmp_path):
    """Catches a route that does not ask whose key it is."""
    (tmp_path / "keys.yaml").write_text(KEYS)
    app = create_app(engine, keyring=Keyring(path=tmp_path / "keys.yaml", tenants=engine.tenants))
    one, two = ({"Authorization": f"Bearer {key}"} for key in "ab")
    async with client_of(app) as client:
        body = {"input": "hi", "background": True}
        id = (await client.post(URL, json=body, headers=one)).json()["id"]
        await until(lambda: held(engine) == (0, 0, 0))
        for method, path in [
            ("GET", f"{URL}/{id}"),
            ("GET", f"{URL}/{id}?stream=true"),
            ("GET", f"{URL}/{id}/input_items"),
            ("POST", f"{URL}/{id}/cancel"),
            ("DELETE", f"{URL}/{id}"),
        ]:
            assert (await client.request(method, path, headers=two)).status_code == 404
        again = await client.post(URL, json={"input": "hi", "previous_response_id": id}, headers=two)
        assert again.json()["error"]["code"] == "previous_response_not_found"
        assert (await client.get(f"{URL}/{id}", headers=one)).json()["status"] == "completed"


async def test_in_the_background_through_the_official_client(engine, runner):
    runner.hold()
    client = sdk(engine)
    made = await client.responses.create(model="scripted", input="hi", background=True)
    assert (made.status, made.output, made.background) == ("queued", [], True)
    assert (await client.responses.retrieve(made.id)).status == "queued"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="scripted", input="hi", previous_response_id=made.id)
    assert "still in progress" in caught.value.message
    runner.let_land()
    stream = await client.responses.retrieve(made.id, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events[:3]] == [f"response.{name}" for name in ("created", "queued", "in_progress")]
    final = await client.responses.retrieve(made.id)
    assert (final.status, final.output_text) == ("completed", "Hello, world!")
    assert events[-1].response == final
    rest = [event async for event in await client.responses.retrieve(made.id, stream=True, starting_after=4)]
    assert rest == events[5:]
    assert (await client.responses.cancel(made.id)).status == "completed", "what is over stays as it is"


async def test_a_background_stream_goes_on_without_its_client(engine, runner):
    """Catches work that ends with its client, and one who comes back to other events than those he missed."""
    app = create_app(engine)
    peer = Peer(app, URL, {"input": "hi", "background": True, "stream": True})
    task = peer.start()
    await peer.receive_messages(4)
    peer.leave()
    await task
    text = peer.text.removeprefix(": keep-alive\n\n")
    seen = events_of(text[: text.rfind("\n\n") + 2])
    id = seen[0]["response"]["id"]
    async with client_of(app) as client:
        rest = await client.get(f"{URL}/{id}?stream=true&starting_after={seen[-1]['sequence_number']}")
        events = [*seen, *events_of(rest.text)]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert put_together(events) == events[-1]["response"]["output"]
        assert (await client.get(f"{URL}/{id}")).json() == events[-1]["response"]


async def test_of_events_that_are_over_no_more_bytes_are_kept_than_there_may_be(engine, monkeypatch):
    """Catches events that are kept for as long as the server lives."""
    monkeypatch.setattr(background, "MAX_KEPT_BYTES", 12_000)
    async with client_of(create_app(engine)) as client:
        ids = []
        for _ in range(5):
            response = await client.post(URL, json={"input": "hi", "background": True, "stream": True})
            assert 6000 < len(response.content) < 12_000
            ids.append(events_of(response.text)[0]["response"]["id"])
        followed = [await client.get(f"{URL}/{id}?stream=true") for id in ids]
    assert [answer.status_code for answer in followed] == [400, 400, 400, 400, 200]


async def test_a_cancelled_response_ends_with_what_it_has_and_gives_back_its_blocks():
    runner = ScriptedRunner(model=FakeScript(b"endless "))
    async with scripted_engine(runner=runner, max_model_len=20_000, num_blocks=3000) as engine:
        client = sdk(engine)
        made = await client.responses.create(model="scripted", input="hi", background=True)
        await until(lambda: len(runner.plans) > 12)
        assert (await client.responses.retrieve(made.id)).status == "in_progress"
        cancelled = await client.responses.cancel(made.id)
        assert held(engine) == (0, 0, 0)
        assert (cancelled.status, cancelled.output[0].status) == ("cancelled", "incomplete")
        assert cancelled.output_text.startswith("endless")
        assert cancelled == await client.responses.retrieve(made.id) == await client.responses.cancel(made.id)
        events = [event async for event in await client.responses.retrieve(made.id, stream=True)]
        assert events[-1].response == cancelled
        another = await client.responses.create(model="scripted", input="hi", background=True)
        await client.responses.delete(another.id)
        assert held(engine) == (0, 0, 0)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(another.id)


async def test_the_background_is_within_the_bounds_of_the_queue_and_of_the_tenant(engine, runner, tmp_path):
    """Catches a background that anything fits into, and refusals that leave a response behind."""
    (tmp_path / "keys.yaml").write_text(KEYS)
    store = MemoryStore()
    keyring = Keyring(path=tmp_path / "keys.yaml", tenants=engine.tenants)
    runner.hold()
    async with client_of(create_app(engine, keyring=keyring, response_store=store)) as client:
        headers, body = {"Authorization": "Bearer b"}, {"input": "hi", "background": True}
        assert (await client.post(URL, json=body, headers=headers)).status_code == 200
        refused = await client.post(URL, json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        num_bytes = store.num_bytes
        async with scripted_engine(max_num_seqs=1) as other:
            await other.drain(1.0)
            async with client_of(create_app(other, response_store=store)) as late:
                assert (await late.post(URL, json=body)).status_code == 503
        assert store.num_bytes == num_bytes
        runner.let_land()
        await until(lambda: engine.tenants.account("two").usage().num_open == 0)
        assert (await client.post(URL, json=body, headers=headers)).status_code == 200


async def test_a_response_in_the_background_that_the_engine_fails(runner):
    """Its error is told by its object, and by its events."""
    poisoned = ScriptedRunner(
        model=FakeScript(b"endless"),
        poison=lambda plan: RuntimeError("fire") if any(piece.start > 40 for piece in plan.slices) else None,
    )
    async with scripted_engine(runner=poisoned) as engine:
        client = sdk(engine)
        made = await client.responses.create(model="scripted", input="hi", background=True, stream=True)
        events = [event async for event in made]
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        failed = await client.responses.retrieve(events[0].response.id)
        assert (failed.status, failed.error.code) == ("failed", "engine_error")


async def test_what_is_made_when_the_engine_closes_is_failed(tmp_path):
    """An end of the server that it was not waited for: told at once, and after a restart."""
    runner = ScriptedRunner(model=FakeScript(b"endless "))
    with closing(SqliteStore(tmp_path / "a.db")) as store:
        async with scripted_engine(runner=runner, max_model_len=20_000, num_blocks=3000) as engine:
            app = create_app(engine, response_store=store)
            async with client_of(app) as client:
                id = (await client.post(URL, json={"input": "hi", "background": True})).json()["id"]
        async with client_of(app) as client:
            await until(lambda: not [task for task in asyncio.all_tasks() if "background" in task.get_name()])
            failed = (await client.get(f"{URL}/{id}")).json()
            assert (failed["status"], failed["error"]["code"]) == ("failed", UnavailableError.code)


async def test_who_follows_it_is_told_when_the_event_loop_ends():
    """Catches a stream without an end, where `asyncio.run` cancels the tasks that are left."""
    runner = ScriptedRunner(model=FakeScript(b"endless "))
    async with scripted_engine(runner=runner, max_model_len=20_000, num_blocks=3000) as engine:
        peer = Peer(create_app(engine), URL, {"input": "hi", "background": True, "stream": True})
        following = peer.start()
        await until(lambda: "output_text.delta" in peer.text)
        [making] = [task for task in asyncio.all_tasks() if "background" in task.get_name()]
        making.cancel()
        await following
    assert "response.failed" in peer.text
    assert ENDED in peer.text


async def test_a_drain_waits_for_what_is_made_in_the_background(engine, runner):
    """Catches a background that an orderly end of the server cuts."""
    runner.hold()
    app = create_app(engine)
    async with client_of(app) as client:
        id = (await client.post(URL, json={"input": "hi", "background": True})).json()["id"]
        draining = asyncio.create_task(engine.drain(30.0))
        await until(lambda: engine.state is EngineState.DRAINING)
        assert (await client.post(URL, json={"input": "hi"})).status_code == 503
        runner.let_land()
        assert await draining
        await until(lambda: not [task for task in asyncio.all_tasks() if "background" in task.get_name()])
        assert (await client.get(f"{URL}/{id}")).json()["status"] == "completed"


async def test_what_a_killed_process_was_making_reads_as_failed(tmp_path, runner):
    """Catches a response that stays in progress for ever: nobody makes it any more."""
    path = tmp_path / "a.db"
    runner.hold()
    async with scripted_engine(runner=runner) as engine:
        with closing(SqliteStore(path)) as store:
            async with client_of(create_app(engine, response_store=store)) as client:
                id = (await client.post(URL, json={"input": "hi", "background": True})).json()["id"]
        runner.let_land()  # what it comes to is nowhere to be kept any more
        await until(lambda: held(engine) == (0, 0, 0))
    async with scripted_engine() as engine:
        with closing(SqliteStore(path)) as store:
            async with client_of(create_app(engine, response_store=store)) as client:
                lost = (await client.get(f"{URL}/{id}")).json()
                assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
                again = await client.post(URL, json={"input": "hi", "previous_response_id": id})
                assert again.status_code == 400
                assert "is failed" in again.json()["error"]["message"]
                assert (await client.delete(f"{URL}/{id}")).json() == {"id": id, "object": "response", "deleted": True}


@pytest.mark.parametrize("background", [False, True])
async def test_a_stream_cut_at_any_event_holds_nothing(background):
    """Every event in turn is the last that a client sees. In the background it is cancelled instead."""
    text = f"{THOUGHT}So.{CALL}"
    async with speaking(text) as engine:
        app = create_app(engine)
        body = {"input": "hi", "tools": TOOLS, "stream": True, "background": background}
        async with client_of(app) as client:
            num_events = len(events_of((await client.post(URL, json=body)).text))
            assert num_events > 40
            for num_seen in range(1, num_events, 3):
                peer = Peer(app, URL, body)
                task = peer.start()
                await until(lambda peer=peer, task=task, num=num_seen: task.done() or peer.text.count("\n\n") >= num)
                if background:
                    await until(lambda peer=peer: '"id":"resp_' in peer.text)
                    id = json.loads(peer.text.split("data: ")[1].split("\n")[0])["response"]["id"]
                    assert (await client.post(f"{URL}/{id}/cancel")).json()["status"] in ("cancelled", "completed")
                    assert held(engine) == (0, 0, 0)
                peer.leave()
                await task
                assert held(engine) == (0, 0, 0)
