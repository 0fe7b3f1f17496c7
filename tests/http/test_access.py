"""The access log: a line for each request, of numbers and words from closed sets."""

import logging
import re

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from aserve.http import create_app
from aserve.http.access import TENANT_KEY, AccessLog
from aserve.http.request_id import RequestIds
from tests.engines import scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.conftest import client_of
from tests.http.peer import Peer

TEXT = "/v1/completions"


@pytest.fixture
def lines(caplog):
    """The fields of each line that is INFO or worse, so far."""
    caplog.set_level(logging.INFO, "aserve.access")
    return lambda: [dict(record.fields) for record in caplog.records if record.name == "aserve.access"]


async def test_a_line_has_what_was_asked_how_it_ended_and_what_it_took(client, lines, caplog):
    await client.post(TEXT, json={"prompt": "hi", "max_tokens": 5}, headers={"x-request-id": "mine"})
    (fields,) = lines()
    assert 0 <= fields.pop("first_byte_s") <= fields.pop("total_s") < 5
    assert fields == {
        "method": "POST",
        "path": TEXT,
        "status": 200,
        "prompt_tokens": 2,
        "generated_tokens": 5,
        "request_id": "mine",
    }
    (record,) = caplog.records
    assert re.fullmatch(
        r"POST /v1/completions 200 first_byte_s=\S+ total_s=\S+ prompt_tokens=2 generated_tokens=5 request_id=mine",
        record.getMessage(),
    )


async def test_a_stream_is_counted_too(client, lines):
    body = {"prompt": "hi", "max_tokens": 5, "n": 2, "stream": True, "request_id": "by-the-body"}
    await client.post(TEXT, json=body)
    (fields,) = lines()
    assert (fields["prompt_tokens"], fields["generated_tokens"], fields["request_id"]) == (2, 10, "by-the-body")
    assert "cut" not in fields


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v1/models/also/scripted", ("GET", "/v1/models/{model:path}", 200, None)),
        ("GET", "/v1/models/sk-secret", ("GET", "/v1/models/{model:path}", 404, "model_not_found")),
        ("GET", "/v1/sk-secret", ("GET", "-", 404, "unknown_route")),
        ("GET", "/v1/%0aforged", ("GET", "-", 404, "unknown_route")),
        ("GET", TEXT, ("GET", TEXT, 405, "method_not_allowed")),
        ("SECRET", TEXT, ("-", TEXT, 501, "method_not_implemented")),
        ("POST", TEXT, ("POST", TEXT, 400, "invalid_request_error")),
    ],
)
async def test_words_are_from_closed_sets(client, lines, method, path, expected):
    await client.request(method, path, params={"key": "sk-secret"})
    (fields,) = lines()
    assert (fields["method"], fields["path"], fields["status"], fields.get("error")) == expected
    assert "secret" not in str(fields)


async def test_who_is_refused_at_the_door_has_a_line(engine, lines):
    async with client_of(create_app(engine, api_keys=["key"], max_body_bytes=10)) as client:
        await client.post(TEXT, json={"prompt": "hi"})
        await client.post(TEXT, json={"prompt": "hi"}, headers={"authorization": "Bearer key"})
    assert [(line["path"], line["status"], line["error"]) for line in lines()] == [
        (TEXT, 401, "invalid_api_key"),
        (TEXT, 413, "request_too_large"),
    ]


async def test_probes_and_scrapes_are_for_debugging(client, lines, caplog):
    for path in ("/health", "/ready", "/metrics", "/version", "/ping"):
        await client.get(path)
    assert lines() == []
    caplog.set_level(logging.DEBUG, "aserve.access")
    await client.get("/health")
    assert [(line["path"], line["status"]) for line in lines()] == [("/health", 200)]


async def test_paths_are_those_below_where_it_is_mounted(engine, lines):
    async with client_of(Starlette(routes=[Mount("/llm", create_app(engine))])) as client:
        await client.get("/llm/v1/models")
    assert [line["path"] for line in lines()] == ["/v1/models"]


async def test_a_client_that_leaves(engine, lines, caplog):
    app = create_app(engine)
    early = Peer(app, TEXT, {"prompt": "hi", "ignore_eos": True, "max_tokens": 100})
    early.leave()
    await early.start()
    late = Peer(app, TEXT, {"prompt": "hi", "ignore_eos": True, "max_tokens": 100, "stream": True})
    task = late.start()
    await late.receive_messages(3)
    late.leave()
    await task
    first, second = lines()
    assert (first["status"], "cut" in first) == (499, False)
    assert (second["status"], second["cut"]) == (200, True)
    assert 0 < second["generated_tokens"] < 100
    assert {record.levelname for record in caplog.records} == {"INFO"}


async def test_the_reason_of_a_500_is_in_its_line(lines, caplog):
    runner = ScriptedRunner(
        model=FakeScript(b"abc"), land_errors=dict.fromkeys(range(3, 20), RuntimeError("sk-secret"))
    )
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        await client.post(TEXT, json={"prompt": "hi", "max_tokens": 9, "stream": True})
        await engine.aclose()
        await client.post(TEXT, json={"prompt": "hi"})
    streamed, refused = lines()
    assert (streamed["status"], streamed["error"]) == (200, "engine_error")
    assert f"fault {streamed['fault']} in a step" in caplog.text
    assert (refused["status"], refused["error"]) == (503, "engine_unavailable")
    assert {record.levelname for record in caplog.records if record.name == "aserve.access"} == {"WARNING"}
    assert "secret" not in caplog.text


async def test_what_nobody_foresaw_has_the_same_id_in_its_line_its_answer_and_the_log(lines, caplog):
    async def broken(scope, receive, send):
        if scope["path"] == "/broken":
            raise RuntimeError("sk-secret")

    app = RequestIds(AccessLog(broken, ["/broken"], []))
    peer = Peer(app, "/broken", {})
    with pytest.raises(Exception, match="internal error") as raised:
        await peer.start()
    (fields,) = lines()
    assert (fields["status"], fields["error"]) == (500, "server_error")
    assert fields["fault"] == raised.value.fault_id
    (fault,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("fault"))
    assert fields["fault"] in fault
    assert fields["request_id"] in fault
    assert "secret" not in fault


async def test_an_unforeseen_error_of_a_route_is_a_whole_answer(engine, lines):
    app = create_app(engine)

    async def broken(_request):
        raise RuntimeError("sk-secret")

    app.router.routes.append(Route("/broken", broken))
    peer = Peer(app, "/broken", {})
    peer._scope["method"] = "GET"
    await peer.start()
    (fields,) = lines()
    assert (peer.status, fields["status"], fields["path"]) == (500, 500, "-")
    assert fields["fault"] in peer.text
    assert "secret" not in peer.text


async def test_the_tenant_is_named(engine, lines):
    async def known(scope, receive, send):
        scope[TENANT_KEY] = "acme"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    await Peer(AccessLog(known, ["/"], []), "/", {}).start()
    (fields,) = lines()
    assert fields["tenant"] == "acme"
