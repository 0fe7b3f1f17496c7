"""Every error of these paths is in the API's own shape: the guard's too, and those in the midst of a stream."""

import pytest

from aserve.core.errors import OverloadedError, QueueTimeoutError, RateLimitError, StepFailedError, UnavailableError
from aserve.http import create_app
from aserve.http.anthropic.errors import ANTHROPIC, error_object
from tests.engines import scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.anthropic.streams import named_events
from tests.http.conftest import client_of
from tests.http.test_tools import speaking

URL = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
BODY = {"messages": HI, "max_tokens": 8}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a/b"}}


def told(response, status, kind):
    """The message of an error, whose shape is checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return body["error"]["message"]


def message(role, *blocks):
    return {"messages": [*HI, {"role": role, "content": list(blocks)}, *HI]}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens: expected int >= 0"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"temperatur": 1}, "unknown field temperatur; did you mean temperature?"),
        ({"messages": [{"role": "user", "content": "a", "nam": 1}]}, "unknown field messages[0].nam"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (message("user", IMAGE), "messages[1].content[0]: blocks of the type 'image' are not supported"),
        (message("user", {"type": "text", "text": "a", "txt": "b"}), "content[0].txt; did you mean text?"),
        (
            message("user", {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}),
            "content[0].content[0]: blocks",
        ),
        (
            message("user", {"type": "tool_use", "id": "a", "name": "f", "input": {}}),
            "a tool_use block is the assistant's",
        ),
        (message("assistant", {"type": "tool_result", "tool_use_id": "a"}), "a tool_result block is the user's"),
        (message("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": "x"}), "content[0].input"),
        ({"messages": [*HI, {"role": "assistant", "content": []}]}, "no text to go on from"),
        ({"system": [IMAGE]}, "system[0]: blocks of the type 'image'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "'web_search_20250305' is a tool of Anthropic's",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: this field is required"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name: 'f' is there twice"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading is not supported yet"),
        ({"tools": [{**TOOL, "x": 1}]}, "unknown field tools[0].x"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice of the type tool needs name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "'g' is none of the tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice of the type auto has no name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice of the type any needs tools"),
        ({"thinking": {"type": "enabled"}}, "thinking of the type enabled needs budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking of the type adaptive has no budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8}}, "less than max_tokens (8), got 8"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences must be"),
        ({"temperature": 3}, "temperature must be"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported yet"),
        ({"context_management": {"a": "b" * 20_000}}, "context_management is longer than 16384 bytes"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, "prompt is too long: "),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_what_cannot_be_is_a_400_that_names_the_field(fields, part):
    async with speaking("x") as engine, client_of(create_app(engine)) as client:
        body = {name: value for name, value in {**BODY, **fields}.items() if value is not None}
        assert part in told(await client.post(URL, json=body), 400, "invalid_request_error")


async def test_who_asks_for_a_thread_is_told_in_the_sdks_words_to_do_without():
    """Anthropic's tool runners ask for one, and go on with the whole conversation where there is none."""
    async with speaking("x") as engine, client_of(create_app(engine)) as client:
        response = await client.post(URL, json={**BODY, "thread": {"type": "create"}})
        assert "whole conversation" in told(response, 400, "invalid_request_error")
        details = response.json()["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert (await client.post(URL, json={**BODY, "thread": None})).status_code == 200


async def test_null_asks_for_nothing_under_any_name():
    """As an SDK's `model_dump` has it, of fields that are newer than this server."""
    block = {"type": "tool_use", "id": "a", "name": "f", "input": {}, "newer": None}
    body = {**BODY, "newest": None, "tools": [{**TOOL, "new": None}], **message("assistant", block)}
    async with speaking("x") as engine, client_of(create_app(engine)) as client:
        assert (await client.post(URL, json=body)).status_code == 200


async def test_a_field_that_the_message_begins_with_is_not_put_before_it():
    async with speaking("x") as engine, client_of(create_app(engine)) as client:
        response = await client.post(URL, json={**BODY, "thinking": {"type": "enabled"}})
    assert told(response, 400, "invalid_request_error") == "thinking of the type enabled needs budget_tokens"


async def test_errors_of_http_and_of_the_guard():
    keys = {"api_keys": ("secret",), "max_body_bytes": 2000}
    async with scripted_engine() as engine, client_of(create_app(engine, **keys)) as client:
        assert "x-api-key" in told(await client.post(URL, json=BODY), 401, "authentication_error")
        client.headers["x-api-key"] = "secret"
        large = {**BODY, "system": "a" * 2000}
        assert "2000 bytes" in told(await client.post(URL, json=large), 413, "request_too_large")
        told(await client.post(f"{URL}/batches", json=BODY), 404, "not_found_error")
        told(await client.post(URL, json={**BODY, "model": "other"}), 404, "not_found_error")
        told(await client.get(URL), 405, "invalid_request_error")
        told(await client.post(URL, content=b"{", headers={"content-type": "text/plain"}), 415, "invalid_request_error")
        assert "truncated" in told(await client.post(URL, content=b"{"), 400, "invalid_request_error")
        named = await client.post(URL, json=BODY, headers={"x-request-id": "mine"})
        assert (named.status_code, named.headers["request-id"], named.json()["id"]) == (200, "mine", "msg_mine")
        elsewhere = await client.post("/v1/messagesx", json=BODY)
        assert set(elsewhere.json()) == {"error"}
        assert "request-id" not in elsewhere.headers


async def test_a_key_in_either_header_opens_and_two_of_one_kind_do_not():
    async with scripted_engine() as engine, client_of(create_app(engine, api_keys=("secret",))) as client:

        async def status(*headers):
            return (await client.get("/v1/models", headers=list(headers))).status_code

        assert await status(("x-api-key", "secret")) == 200
        assert await status(("authorization", "Bearer secret")) == 200
        assert await status(("authorization", "Bearer other"), ("x-api-key", "secret")) == 200
        assert await status(("x-api-key", "other")) == 401
        assert await status(("x-api-key", "Bearer secret")) == 401
        assert await status(("x-api-key", "secret"), ("x-api-key", "secret")) == 401


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (OverloadedError("full"), 529, "overloaded_error"),
        (RateLimitError("spent"), 429, "rate_limit_error"),
        (UnavailableError("loading"), 503, "overloaded_error"),
        (QueueTimeoutError("late"), 503, "overloaded_error"),
        (StepFailedError("broken", "f1"), 500, "api_error"),
    ],
    ids=lambda value: str(value),
)
def test_the_engines_errors(error, status, kind):
    assert ANTHROPIC.status(error) == status
    expected = {"type": kind, "message": error.message}
    assert error_object(error, "id") == {"type": "error", "error": expected, "request_id": "id"}


async def test_before_the_model_is_there():
    async with client_of(create_app(scripted_engine())) as client:
        response = await client.post(URL, json=BODY)
    told(response, 503, "overloaded_error")
    assert response.headers["retry-after"]


async def test_a_fault_after_the_stream_has_begun_is_its_last_event():
    def poison(plan):
        is_hit = any(piece.seq_id == 0 and piece.start > 10 for piece in plan.slices)
        return RuntimeError("the device is on fire") if is_hit else None

    runner = ScriptedRunner(model=FakeScript(b"endless"), poison=poison)
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        response = await client.post(URL, json={**BODY, "max_tokens": 32, "stream": True})
    assert response.status_code == 200
    *_, last = named_events(response.text)
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert last["request_id"] == response.headers["request-id"]
