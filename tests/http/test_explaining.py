"""x_aserve and GET /v1/requests/{id}: in every dialect, streamed and not; whose explanations are shown to whom."""

import asyncio
import json

import pytest

from aserve.http import AppOptions, Keyring, create_app
from aserve.http.access import Record
from aserve.observe.explainer import Explainer
from tests.engines import says, scripted_engine
from tests.fakes import FakeClock, FakeScript, ScriptedRunner
from tests.http.conftest import client_of
from tests.http.faces import CHAT, FACES, MESSAGES, RESPONSES, TEXT, Asked
from tests.http.peer import Peer, until
from tests.observe.explained import micro

EXPLAIN = {"x_aserve": {"explain": True}}
KEYS = "- {name: lab, key: of-lab}\n- {name: shop, key: of-shop}\n"
PROMPT = {"prompt": "a prompt of three blocks and more", "max_tokens": 4}


def adds_up(found):
    """Whether it is an explanation whose phases are the whole."""
    phases = [micro(one) for one in found["phases_ms"].values()]
    assert sum(phases) == micro(found["total_ms"]) > 0
    assert found["state"] == "ended"
    assert found["explained"] is True
    return True


def last_object(face, text):
    """What has the token counts, of a stream's text."""
    events = [
        json.loads(line.removeprefix("data: "))
        for line in text.split("\n")
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    if face is MESSAGES:
        [event] = [event for event in events if event["type"] == "message_delta"]
        return event
    return events[-1]["response"] if face is RESPONSES else events[-1]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
async def test_every_dialect_tells_it_where_the_token_counts_are(client, face, streams):
    asked = face.stream_body(Asked()) if streams else face.body(Asked())
    answer = await client.post(face.url, json=asked | EXPLAIN, headers={"x-request-id": "mine"})
    told = last_object(face, answer.text) if streams else answer.json()
    assert "usage" in told
    found = told["x_aserve"]["explanation"]
    assert adds_up(found)
    assert (found["name"], found["model"]) == ("mine", "scripted")
    assert found["steps"]["num"] >= 14
    again = await client.get("/v1/requests/mine")
    assert again.json() == found
    assert (await client.get(f"/v1/requests/{found['id']}")).json() == found
    plain = await client.post(face.url, json=asked)
    assert "x_aserve" not in plain.text
    if streams:
        [said] = face.streamed(answer.text)["choices"]
        said.pop("x_aserve", None)
        assert [said] == face.streamed(plain.text)["choices"]


@pytest.mark.parametrize("face", [CHAT, TEXT], ids=lambda face: face.name)
async def test_a_stream_without_token_counts_has_a_chunk_for_it(client, face):
    answer = await client.post(face.url, json=face.body(Asked()) | EXPLAIN | {"stream": True})
    last = last_object(face, answer.text)
    assert last["choices"] == []
    assert "usage" not in last
    assert adds_up(last["x_aserve"]["explanation"])
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("face", "prefix"), [(CHAT, "chatcmpl-"), (TEXT, "cmpl-"), (MESSAGES, "msg_")])
async def test_the_id_of_an_answer_finds_it(client, face, prefix):
    answer = await client.post(face.url, json=face.body(Asked()) | EXPLAIN)
    assert answer.json()["id"].startswith(prefix)
    assert (await client.get(f"/v1/requests/{answer.json()['id']}")).status_code == 200


async def test_several_prompts_are_told_each(client):
    body = {"prompt": ["one", "three"], "n": 2, "max_tokens": 3, "temperature": 0.5} | EXPLAIN
    first, second = (await client.post(TEXT.url, json=body)).json()["x_aserve"]["explanations"]
    assert adds_up(first)
    assert adds_up(second)
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (3, 5)
    assert [course["index"] for course in second["choices"]] == [0, 1]
    streamed = await client.post(TEXT.url, json=body | {"stream": True})
    assert len(last_object(TEXT, streamed.text)["x_aserve"]["explanations"]) == 2


async def test_a_stored_response_has_it_and_one_in_the_background(client, engine):
    body = {"input": "hi"} | EXPLAIN
    whole = (await client.post(RESPONSES.url, json=body)).json()
    assert (await client.get(f"{RESPONSES.url}/{whole['id']}")).json()["x_aserve"] == whole["x_aserve"]
    queued = (await client.post(RESPONSES.url, json=body | {"background": True})).json()
    assert "x_aserve" not in queued
    await until(lambda: engine.statistics().num_running == engine.statistics().num_waiting == 0)
    await asyncio.sleep(0.05)
    made = (await client.get(f"{RESPONSES.url}/{queued['id']}")).json()
    assert adds_up(made["x_aserve"]["explanation"])


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"explian": True}, "unknown field x_aserve.explian; did you mean explain?"),
        ({"metadata": {}}, "unknown field x_aserve.metadata"),
        ({"explain": 1}, "x_aserve.explain: expected bool"),
        (True, "x_aserve: expected object"),
    ],
)
async def test_what_nobody_knows_of_x_aserve_is_refused_by_name(client, face, given, problem):
    answer = await client.post(face.url, json=face.body(Asked()) | {"x_aserve": given})
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
@pytest.mark.parametrize("given", [None, {}, {"explain": None}, {"explain": False}])
async def test_who_does_not_ask_is_told_nothing(client, face, given):
    answer = await client.post(face.url, json=face.body(Asked()) | {"x_aserve": given})
    assert answer.status_code == 200
    assert "x_aserve" not in answer.json()


async def test_a_lenient_server_leaves_out_what_it_does_not_know(engine):
    async with client_of(create_app(engine, options=AppOptions(lenient=True))) as client:
        body = TEXT.body(Asked()) | {"x_aserve": {"explain": True, "explian": True}}
        answer = (await client.post(TEXT.url, json=body)).json()
    assert adds_up(answer["x_aserve"]["explanation"])
    assert "x_aserve.explian" in answer["warnings"][0]


async def test_what_is_unknown_is_a_404_that_says_how_to_ask(client):
    await client.post(TEXT.url, json=PROMPT, headers={"x-request-id": "plain"})
    for name in ("plain", "nobody", "cmpl-plain"):
        answer = await client.get(f"/v1/requests/{name}")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "request_not_found"
        assert '"x_aserve": {"explain": true}' in error["message"]


async def test_what_runs_and_what_waits_is_known_while_it_does():
    runner = ScriptedRunner(model=FakeScript(says("Hello")))
    async with scripted_engine(runner=runner) as engine:
        app = create_app(engine)
        runner.hold()
        bodies = PROMPT | {"request_id": "plain"}, PROMPT | EXPLAIN | {"request_id": "its"}
        peers = [Peer(app, TEXT.url, body) for body in bodies]
        tasks = [peer.start() for peer in peers]
        await until(lambda: engine.statistics().num_running == 2)
        async with client_of(app) as client:
            plain, asked = [(await client.get(f"/v1/requests/{name}")).json() for name in ("plain", "its")]
            assert (plain["state"], plain["explained"], plain["queue"]) == ("running", False, None)
            assert (asked["state"], asked["explained"]) == ("running", True)
            for found in (plain, asked):
                assert sum(map(micro, found["phases_ms"].values())) == micro(found["total_ms"])
            runner.let_land()
            await asyncio.gather(*tasks)
            assert (await client.get("/v1/requests/plain")).status_code == 404
            assert adds_up((await client.get("/v1/requests/its")).json())
        assert not engine.observer.is_watched


async def test_a_request_is_ended_by_its_id():
    """Who waits for it gets what there is; one that has ended, or that nobody knows, is told apart from it."""
    runner = ScriptedRunner(model=FakeScript(says("Hello")))
    async with scripted_engine(runner=runner) as engine:
        app = create_app(engine)
        runner.hold()
        peer = Peer(app, TEXT.url, PROMPT | EXPLAIN | {"request_id": "its"})
        task = peer.start()
        await until(lambda: engine.statistics().num_running == 1)
        async with client_of(app) as client:
            found = (await client.get("/v1/requests/its")).json()
            ended = await client.delete("/v1/requests/its")
            assert ended.status_code == 200
            assert ended.json() == {"id": found["id"], "object": "request", "aborted": True}
            runner.let_land()
            await task
            answer = json.loads(b"".join(message.get("body", b"") for message in peer.sent))
            assert answer["choices"][0]["finish_reason"] == "abort"
            again = await client.delete("/v1/requests/its")
            assert (again.status_code, again.json()["error"]["code"]) == (409, "request_not_open")
            nobody = await client.delete("/v1/requests/nobody")
            assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "request_not_found")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_ended_by_its_id_is_no_proper_end(stream):
    """Catches a message that reads as the end of a turn, and a retry that gets half an answer for a whole one."""
    runner = ScriptedRunner(model=FakeScript(says("Hello")))
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        runner.hold()
        body = MESSAGES.body(Asked()) | {"stream": stream}
        key = {"Idempotency-Key": "k"}
        asked = asyncio.create_task(client.post(MESSAGES.url, json=body, headers=key | {"x-request-id": "its"}))
        await until(lambda: engine.statistics().num_running == 1)
        assert (await client.delete("/v1/requests/its")).status_code == 200
        runner.let_land()
        cut = await asked
        assert '"stop_reason":"max_tokens"' in cut.text
        retried = await client.post(MESSAGES.url, json=body, headers=key)
        assert "idempotent-replayed" not in retried.headers
        assert '"stop_reason":"end_turn"' in retried.text


async def test_a_tenant_sees_its_own_alone(engine, tmp_path):
    (tmp_path / "keys.yaml").write_text(KEYS)
    app = create_app(engine, keyring=Keyring(path=tmp_path / "keys.yaml", tenants=engine.tenants))
    lab, shop = ({"Authorization": f"Bearer {key}"} for key in ("of-lab", "of-shop"))
    async with client_of(app) as client:
        await client.post(TEXT.url, json=PROMPT | EXPLAIN, headers=lab | {"x-request-id": "secret"})
        found = await client.get("/v1/requests/secret", headers=lab)
        assert found.status_code == 200
        for name in ("secret", found.json()["id"]):
            assert (await client.get(f"/v1/requests/{name}", headers=shop)).status_code == 404
            assert (await client.delete(f"/v1/requests/{name}", headers=shop)).status_code == 404
        assert (await client.get("/v1/requests/secret")).status_code == 401
        other = PROMPT | {"prompt": PROMPT["prompt"].replace("more", "less")} | EXPLAIN
        theirs = (await client.post(TEXT.url, json=other, headers=shop)).json()
        own = (await client.post(TEXT.url, json=other | {"prompt": PROMPT["prompt"] + "!"}, headers=lab)).json()
    [theirs, own] = [one["x_aserve"]["explanation"]["choices"][0]["prefix"] for one in (theirs, own)]
    assert theirs["differs"] == {"position": 24, "reason": "not_seen", "relative": None, "model": None}
    assert own["differs"] is None


async def test_it_is_there_without_pages(engine):
    """It says of others what /load and /metrics do."""
    async with client_of(create_app(engine, options=AppOptions(ui=False))) as client:
        await client.post(TEXT.url, json=PROMPT | EXPLAIN, headers={"x-request-id": "mine"})
        assert (await client.get("/v1/requests/mine")).status_code == 200


async def test_a_fault_in_explaining_ends_no_request(client, engine, monkeypatch, caplog):
    expected = (await client.post(TEXT.url, json=PROMPT)).json()["choices"]

    def faulty(*_arguments, **_options):
        raise MemoryError

    for name in ("begin", "end", "explanation", "planned", "landed"):
        with monkeypatch.context() as patched:
            patched.setattr(Explainer, name, faulty)
            answer = (await client.post(TEXT.url, json=PROMPT | EXPLAIN)).json()
        assert answer["choices"] == expected, name
        assert "explanation" in answer["x_aserve"]
        if name != "end":
            assert answer["x_aserve"]["explanation"] is None or name in ("planned", "landed")
    assert "in explaining" in caplog.text
    assert "in observing" in caplog.text
    engine.observer._explainer._lives.clear()
    engine.observer._rest()
    assert not engine.observer.is_watched


async def test_nothing_is_made_for_those_who_do_not_ask(client, engine):
    for face in FACES:
        await client.post(face.url, json=face.body(Asked()))
    assert (await client.get("/v1/requests/nobody")).status_code == 404
    observer = engine.observer
    assert observer._explainer is None
    assert not observer.is_watched
    assert observer._readings.cache._evictions is None
    assert observer._readings.cache._pool.on_evict is None


def test_a_record_knows_its_age():
    clock = FakeClock(3.0)
    record = Record(clock)
    clock.advance(0.5)
    assert record.age_s() == 0.5


async def test_python_gets_it_with_the_answer(engine):
    answer = await engine.complete("a prompt", explain=True, request_id="mine")
    assert answer.explanation.id == "mine"
    assert engine.explanation("mine") == answer.explanation
    assert sum(map(micro, answer.explanation.phases_ms.values())) == micro(answer.explanation.total_ms)
    assert (await engine.complete("a prompt")).explanation is None
    assert engine.explanation("nobody") is None
    async for _ in engine.generate("a prompt", explain=True, request_id="streamed"):
        pass
    assert engine.explanation("streamed").state == "ended"
    async with engine.open("a prompt", explain=True) as mailbox:
        async for delta in mailbox:
            if delta.finish_reason is None:
                continue
        async with engine.fork(mailbox, 1, request_ids=["branch"], explain=True) as [branch]:
            async for _ in branch:
                pass
    assert engine.explanation("branch").choices[0].tokens > 0
