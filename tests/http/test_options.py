"""What an operator decides of the API: who may ask from where, what is forced on requests, what is forgiven."""

import pytest

from aserve.cli.settings import parse
from aserve.core.errors import ConfigError
from aserve.http import AppOptions, create_app
from aserve.http.endpoint import MAX_WARNINGS
from tests.engines import scripted_engine
from tests.fakes import FakeKV, ScriptedRunner
from tests.http.conftest import client_of
from tests.http.events import events_of

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
ORIGIN = {"origin": "https://a.example"}
PREFLIGHT = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_a_page_of_an_allowed_origin_may_ask_and_another_may_not():
    options = AppOptions(allowed_origins=["https://a.example"], allow_credentials=True)
    async with scripted_engine() as engine, client_of(create_app(engine, api_keys=("k",), options=options)) as client:
        asked = await client.options(CHAT, headers=PREFLIGHT)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert asked.headers["access-control-allow-credentials"] == "true"
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        refused = await client.options(CHAT, headers={**PREFLIGHT, "origin": "https://b.example"})
        assert refused.status_code == 400
        body = {"messages": HI, "stream": True}
        answer = await client.post(CHAT, json=body, headers={**ORIGIN, "authorization": "Bearer k"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://a.example")
        without_key = await client.post(CHAT, json=body, headers=ORIGIN)
        assert (without_key.status_code, "access-control-allow-origin" in without_key.headers) == (401, True)


async def test_without_origins_browsers_are_told_nothing(client):
    assert (await client.options(CHAT, headers=PREFLIGHT)).status_code == 405
    assert "access-control-allow-origin" not in (await client.get("/v1/models", headers=ORIGIN)).headers


async def test_below_a_root_path_with_the_proxys_prefix_and_without():
    options = AppOptions(root_path="/api")
    async with scripted_engine() as engine, client_of(create_app(engine, options=options)) as client:
        assert (await client.get("/api/v1/models")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/api/openapi.json")).json()["servers"] == [{"url": "/api"}]
        broken = await client.post("/api/v1/messages", json={})
        assert broken.json()["type"] == "error"


async def test_usage_and_token_ids_may_be_forced():
    options = AppOptions(enable_force_include_usage=True, return_tokens_as_token_ids=True)
    runner = ScriptedRunner(model=FakeKV(8, range(97, 123)))
    async with (
        scripted_engine(runner=runner, max_logprobs=2) as engine,
        client_of(create_app(engine, options=options)) as client,
    ):
        for url, body in ((CHAT, {"messages": HI, "top_logprobs": 1}), (TEXT, {"prompt": "hi"})):
            asked = {**body, "max_tokens": 2, "logprobs": True if url == CHAT else 1}
            chunks = events_of((await client.post(url, json={**asked, "stream": True})).text)
            so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert so_far == sorted(so_far)
            assert so_far[-1] == 2
            logprobs = (await client.post(url, json=asked)).json()["choices"][0]["logprobs"]
            assert "token_id:" in str(logprobs)
            many = {**asked, "logprobs": True, "top_logprobs": 3} if url == CHAT else {**asked, "logprobs": 3}
            told = (await client.post(url, json=many)).json()["error"]
            assert told["message"].endswith("logprobs must be at most 2, got 3")


async def test_a_lenient_server_leaves_out_what_nobody_knows_and_says_so():
    options = AppOptions(lenient=True)
    async with scripted_engine() as engine, client_of(create_app(engine, options=options)) as client:
        message = {"role": "user", "content": "hi", "mood": "good"}
        answer = await client.post(CHAT, json={"messages": [message], "max_token": 3})
        expected = ["unknown field max_token; did you mean max_tokens?", "unknown field messages[0].mood"]
        assert (answer.status_code, answer.json()["warnings"]) == (200, expected)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"
        streamed = await client.post(CHAT, json={"messages": [message], "stream": True})
        assert streamed.headers["x-aserve-warnings"] == expected[1]
        thinking = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
        told = ["the chat template takes no variable 'enable_thinking' (it takes: none)"]
        for url in (CHAT, "/tokenize", "/v1/responses", "/v1/responses/input_tokens"):
            asked = {**thinking, "input": "hi"} if "responses" in url else thinking
            if "input" in asked:
                del asked["messages"]
            answer = await client.post(url, json=asked)
            assert (answer.status_code, answer.headers["x-aserve-warnings"]) == (200, told[0])
        answer = await client.post(MESSAGES, json={"messages": [message], "max_tokens": 9})
        assert answer.json()["warnings"] == expected[1:]
        assert "warnings" not in (await client.post(CHAT, json={"messages": HI})).json()
        refused = await client.post(CHAT, json={"messages": HI, "suffix": "a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
        many = {f"field_{number}": 1 for number in range(MAX_WARNINGS + 1)}
        assert (await client.post(CHAT, json={"messages": HI, **many})).status_code == 400


async def test_the_tokenizer_is_told_of_only_where_that_is_wished():
    async with scripted_engine() as engine:
        async with client_of(create_app(engine)) as client:
            assert (await client.get("/tokenizer_info")).status_code == 404
        options = AppOptions(enable_tokenizer_info_endpoint=True)
        async with client_of(create_app(engine, options=options)) as client:
            info = (await client.get("/tokenizer_info")).json()
            document = (await client.get("/openapi.json")).json()
    assert (info["eos_token"], info["model_max_length"]) == ("<|end|>", 128)
    assert info["added_tokens_decoder"]["257"]["content"] == "<|system|>"
    assert "<|end|>" in info["chat_template"]
    assert "/tokenizer_info" in document["paths"]


async def test_the_load_is_what_is_open():
    runner = ScriptedRunner()
    runner.hold()
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
        with engine.tenants.entered(""), engine.tenants.entered("a"):
            assert (await client.get("/load")).json() == {"server_load": 2}
        runner.let_land()


def test_the_flags():
    words = [
        "--allowed-origins",
        '["https://a", "https://b"]',
        "--root-path",
        "/api",
        "--lenient",
        "--max-logprobs",
        "5",
    ]
    _, of_engine, options = parse(words, {"ASERVE_ALLOWED_METHODS": "GET,POST"})
    assert options.allowed_origins == ("https://a", "https://b")
    assert options.allowed_methods == ("GET", "POST")
    assert (options.root_path, options.lenient, of_engine.max_logprobs) == ("/api", True, 5)
    assert parse(["--max-logprobs", "-1"], {})[1].max_logprobs == -1
    assert parse(["--allowed-origins", "https://a", "https://b"], {})[2].allowed_origins == ("https://a", "https://b")
    for wrong in (["--root-path", "api"], ["--max-logprobs", "-2"], ["--allowed-origins", '["a"']):
        with pytest.raises(ConfigError, match=wrong[0].strip("-").replace("-", ".")):
            parse(wrong, {})
