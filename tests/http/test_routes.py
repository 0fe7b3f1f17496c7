"""Models, tokens, health and metrics; an engine that is not ready; paths and methods that do not exist; mounting."""

import asyncio
import re
import threading

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from aserve import __version__
from aserve.engine import Engine, EngineState
from aserve.http import create_app
from aserve.http.app import BASE_BODY_BYTES, BODY_BYTES_PER_TOKEN, body_limit
from aserve.http.middleware import MAX_BODY_BYTES
from tests.engines import EOS, scripted_engine, scripted_loader
from tests.http.conftest import client_of

HI = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
POSTS = {
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}


async def test_models(client):
    cards = (await client.get("/v1/models")).json()
    assert cards["object"] == "list"
    assert cards["data"][1] == {
        "id": "also/scripted",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "aserve",
        "root": "/models/scripted",
        "parent": None,
        "max_model_len": 128,
        "task": "generate",
        "permission": [],
    }
    assert (await client.get("/v1/models/also/scripted")).json() == cards["data"][1]
    missing = await client.get("/v1/models/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokenize(client):
    body = {"prompt": "hi<|end|>"}
    expected = {"count": 3, "max_model_len": 128, "tokens": [104, 105, EOS], "token_strs": None}
    assert (await client.post("/tokenize", json=body)).json() == expected
    assert (await client.post("/tokenize", json=HI)).json()["tokens"] == [258, 104, 105, EOS, 259]
    ids = (await client.post("/tokenize", json={**HI, "add_generation_prompt": False})).json()["tokens"]
    assert ids == [258, 104, 105, EOS]


async def test_tokenize_spells_the_tokens_out(client):
    body = {"prompt": "hi there", "return_token_strs": True}
    assert (await client.post("/tokenize", json=body)).json()["token_strs"] == list("hi\u0120there")


async def test_detokenize(client):
    assert (await client.post("/detokenize", json={"tokens": [104, 105, EOS]})).json() == {"prompt": "hi<|end|>"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {**HI, "prompt": "hi"}, "prompt"),
        ("/tokenize", {"prompt": "hi", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "hi", "continue_final_message": False}, "continue_final_message"),
        ("/tokenize", {"prompt": "hi", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "hi", "tools": TOOLS}, "tools"),
        ("/tokenize", {**HI, "tools": [*TOOLS, *TOOLS]}, "tools"),
        ("/tokenize", {**HI, "tools": TOOLS}, "tools"),
        ("/tokenize", {**HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "hi", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
async def test_bad_token_requests(client, path, body, param):
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_operations(client):
    assert (await client.get("/health")).json() == {"status": "ready"}
    assert (await client.get("/ping")).status_code == 200
    assert (await client.post("/ping")).status_code == 200
    assert (await client.get("/ready")).json() == {"status": "ready"}
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_metrics(client):
    await client.post("/v1/completions", json={"prompt": "hi", "user": "somebody", "model": "also/scripted"})
    await client.post("/v1/completions", json={"prompt": "hi", "model": "nobody"})
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'aserve_generation_tokens_total{model_name="scripted"} 14.0' in response.text
    assert 'aserve_num_requests_running{model_name="scripted"} 0.0' in response.text
    assert set(re.findall('model_name="(.*?)"', response.text)) == {"scripted"}


async def test_every_answer_has_an_id(client):
    answers = [await client.get(path) for path in ("/health", "/nowhere", "/v1/models", "/v1/completions")]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 4
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)


@pytest.mark.parametrize(
    "path", ["/ui", "/nope", "/v1", "/v1/models/", "/v1/chat/completions/", "//v1/models", "/V1/models"]
)
async def test_unknown_paths(client, path):
    response = await client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] in ("unknown_route", "model_not_found")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_wrong_methods(client, path, method):
    response = await client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/files/x", "DELETE, GET, HEAD"),
        ("/ping", "GET, HEAD, POST"),
        ("/v1/responses/input_tokens", "POST"),
    ],
)
async def test_a_wrong_method_is_told_all_that_the_path_takes(client, path, allowed):
    response = await client.put(path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)


async def test_while_the_model_loads():
    goal = threading.Event()
    load = scripted_loader()

    def wait_and_load(report):
        parts = load(report)
        assert goal.wait(10)
        return parts

    reported = asyncio.Event()
    engine = Engine(wait_and_load, on_progress=lambda _: reported.set())
    async with client_of(create_app(engine)) as client:
        entering = asyncio.create_task(engine.__aenter__())
        await reported.wait()
        assert (await client.get("/health")).json() == {"status": "loading"}
        ready = await client.get("/ready")
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        assert ready.json()["error"]["message"] == "the engine is loading: weights 100%"
        assert (await client.get("/metrics")).status_code == 200
        for path, body in POSTS.items():
            response = await client.post(path, json=body)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["error"]["code"] == "engine_unavailable"
        assert (await client.get("/v1/models")).status_code == 503
        goal.set()
        await entering
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        await engine.aclose()
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 503


async def test_while_it_drains(engine, client):
    assert await engine.drain(1.0)
    assert engine.state is EngineState.DRAINING
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 503
    response = await client.post("/v1/completions", json={"prompt": "hi"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("outer", [Starlette, FastAPI])
async def test_mounted_in_another_application(engine, outer):
    app = outer(routes=[Mount("/llm", create_app(engine))])
    async with client_of(app) as client:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.post("/llm/v1/completions", json={"prompt": "hi"})).json()["choices"][0]["text"]
        assert (await client.get("/llm/nope")).json()["error"]["code"] == "unknown_route"


async def test_two_engines_in_one_application():
    async with scripted_engine(names=("one",)) as one, scripted_engine(names=("two",)) as two:
        app = Starlette(routes=[Mount("/one", create_app(one)), Mount("/two", create_app(two))])
        async with client_of(app) as client:
            for name in ("one", "two"):
                assert (await client.post(f"/{name}/v1/completions", json={"prompt": "hi"})).json()["model"] == name


async def test_how_long_a_body_may_be_is_told_by_the_context():
    """Catches a limit that is the same for every model, or that the operator's own does not replace."""
    async with scripted_engine(max_model_len=4096) as engine:
        limit = BASE_BODY_BYTES + BODY_BYTES_PER_TOKEN * 4096
        for given, num_bytes in ((None, limit), (1000, 1000)):
            async with client_of(create_app(engine, max_body_bytes=given)) as client:
                headers = {"content-type": "application/json", "content-length": str(num_bytes + 1)}
                answer = await client.post("/v1/completions", content=b"{}", headers=headers)
                assert answer.status_code == 413
                assert f"larger than {num_bytes} bytes" in answer.json()["error"]["message"]
                whole = b'{"prompt": "hi"}'.ljust(num_bytes)
                headers = {"content-type": "application/json"}
                assert (await client.post("/v1/completions", content=whole, headers=headers)).status_code == 200
        assert body_limit(engine)() == limit
    async with scripted_engine(max_model_len=10_000_000) as engine:
        assert body_limit(engine)() == MAX_BODY_BYTES
