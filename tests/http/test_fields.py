"""Fields that change the prompt, the text or the envelope of an answer, each by what it does."""

import pytest

from aserve.core.columns import PenaltyColumns
from aserve.http import create_app
from tests.engines import EOS, says, scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.conftest import client_of
from tests.http.events import events_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TURNS = [*HI, {"role": "assistant", "content": "Well"}]


async def prompt_ids(client, url, **fields):
    response = await client.post(url, json={"max_tokens": 1, "return_token_ids": True, **fields})
    assert response.status_code == 200, response.text
    body = response.json()
    return body["prompt_token_ids"] if url == CHAT else body["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "efg"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 99}, "abcdefg"),
        ({"truncate_prompt_tokens": -1}, "abcdefg"),
        ({"truncate_prompt_tokens": None}, "abcdefg"),
    ],
)
async def test_a_prompt_is_cut_only_when_asked_for(client, fields, kept):
    assert await prompt_ids(client, TEXT, prompt="abcdefg", **fields) == [*kept.encode()]
    body = {"prompt": "abcdefg", "max_tokens": 2, "echo": True, **fields}
    assert (await client.post(TEXT, json=body)).json()["choices"][0]["text"] == f"{kept}He"


async def test_cutting_makes_room_and_cutting_all_is_refused(client):
    ids = await prompt_ids(client, TEXT, prompt="x" * 200, truncate_prompt_tokens=-1)
    assert len(ids) == 127
    body = {"messages": [{"role": "user", "content": "x" * 200}], "truncate_prompt_tokens": 4}
    assert await prompt_ids(client, CHAT, **body) == [*b"xx", EOS, 259]
    response = await client.post(TEXT, json={"prompt": "hi", "truncate_prompt_tokens": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_how_a_conversation_ends(client):
    whole = [258, *b"hi", EOS]
    assert await prompt_ids(client, CHAT, messages=HI) == [*whole, 259]
    assert await prompt_ids(client, CHAT, messages=HI, add_generation_prompt=False) == whole
    assert await prompt_ids(client, CHAT, messages=TURNS, continue_final_message=True) == [*whole, 259, *b"Well"]
    both = {"messages": TURNS, "continue_final_message": True, "add_generation_prompt": True}
    assert (await client.post(CHAT, json=both)).json()["error"]["param"] == "continue_final_message"
    tokenized = await client.post("/tokenize", json={"messages": TURNS, "continue_final_message": True})
    assert tokenized.json()["tokens"] == [*whole, 259, *b"Well"]


@pytest.mark.parametrize("url", [CHAT, TEXT])
async def test_null_asks_for_nothing_under_any_name(client, url):
    """As libraries send it for what their users left out, in fields that are newer than this server."""
    tool = {"type": "function", "new": None, "function": {"name": "f", "new": None}}
    chat = {"messages": [{**HI[0], "new": None}], "tools": [tool], "tool_choice": "none"}
    structure = {"choice": ["a"], "disable_any_whitespace": None}
    body = {**(chat if url == CHAT else {"prompt": "hi"}), "new": None, "structured_outputs": structure}
    response = await client.post(url, json={**body, "max_tokens": 1})
    assert response.status_code == 200, response.text


async def test_a_message_that_is_continued_may_be_echoed(client):
    body = {"messages": TURNS, "continue_final_message": True, "max_tokens": 2}
    for echo, text in ((False, "He"), (True, "WellHe")):
        whole = (await client.post(CHAT, json={**body, "echo": echo})).json()
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
        chunks = events_of((await client.post(CHAT, json={**body, "echo": echo, "stream": True})).text)
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text


async def test_template_variables_are_those_that_the_template_reads(client):
    response = await client.post(CHAT, json={"messages": HI, "chat_template_kwargs": {"enable_thinking": False}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")
    assert (await client.post(CHAT, json={"messages": HI, "chat_template_kwargs": {}})).status_code == 200


async def test_text_with_special_tokens_and_the_end_that_was_found():
    script = (*b"a", 258, *b"b", EOS)
    async with scripted_engine(script) as engine, client_of(create_app(engine)) as client:

        async def text(**fields):
            return (await client.post(TEXT, json={"prompt": "hi", **fields})).json()["choices"][0]["text"]

        assert await text() == "ab"
        assert await text(skip_special_tokens=False) == "a<|user|>b"
        assert await text(skip_special_tokens=False, include_stop_str_in_output=True) == "a<|user|>b<|end|>"
        assert await text(stop="b", include_stop_str_in_output=True) == "ab"
        assert await text(stop="b") == "a"


async def test_usage_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for url, prompt, num_prompt in ((CHAT, {"messages": HI}, 5), (TEXT, {"prompt": "hi"}, 2)):
        body = {**prompt, "max_tokens": 3, "stream": True, "stream_options": options}
        chunks = events_of((await client.post(url, json=body)).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == ([0, 1, 2, 3, 3] if url == CHAT else [1, 2, 3, 3])
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {num_prompt}
        assert chunks[-1]["choices"] == []
        body["stream_options"] = {"include_usage": False, "continuous_usage_stats": True}
        assert not [chunk for chunk in events_of((await client.post(url, json=body)).text) if "usage" in chunk]


async def test_hints_are_of_the_level_where_the_mistake_is(client):
    """Catches a hint to a request's field for a mistake in a message, and a field that works nowhere called missing."""

    async def told(url, body):
        return (await client.post(url, json=body)).json()["error"]["message"]

    message = {**HI[0], "id": "a"}
    assert await told(CHAT, {"messages": [message]}) == "unknown field messages[0].id"
    assert (
        await told(CHAT, {"messages": [{**HI[0], "nam": "a"}]}) == "unknown field messages[0].nam; did you mean name?"
    )
    assert await told(CHAT, {"messages": HI, "ri": "a"}) == "unknown field ri; did you mean rid?"
    assert await told(TEXT, {"prompt_embeds": "AAAA"}) == "prompt_embeds is not supported yet"


async def test_blocks_are_shared_under_one_salt_only(client):
    async def num_cached(**fields):
        body = {"prompt": "x" * 60, "max_tokens": 1, **fields}
        return (await client.post(TEXT, json=body)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [await num_cached(), await num_cached()] == [0, 56]
    assert [await num_cached(cache_salt="a"), await num_cached(cache_salt="a")] == [0, 56]
    assert await num_cached(cache_salt="b") == 0


async def test_a_request_is_called_what_its_client_calls_it(client):
    async def names(headers, **fields):
        response = await client.post(TEXT, json={"prompt": "hi", "max_tokens": 1, **fields}, headers=headers)
        name = response.headers["x-request-id"]
        assert response.json()["id"] == f"cmpl-{name}"
        return name

    assert await names({"X-Request-Id": "from-the-header"}) == "from-the-header"
    assert await names({}, request_id="from-the-body") == "from-the-body"
    assert await names({"X-Request-Id": "header"}, request_id="body") == "header"
    random = await names({"X-Request-Id": "not a name"})
    assert len(random) == 32


async def test_two_requests_may_have_one_name(client):
    body = {"prompt": ["a", "b"], "max_tokens": 1, "request_id": "same"}
    for _ in range(2):
        assert (await client.post(TEXT, json=body)).json()["id"] == "cmpl-same"


async def test_what_shapes_the_logits_reaches_the_runner():
    """The plan says it all; what it does to logits is the kernels' business."""
    runner = ScriptedRunner(model=FakeScript(says("ok")))
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        body = {
            "prompt": "hi",
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {"5": 150, "7": -1.5},
            "allowed_token_ids": [5, 6, 7],
            "bad_words": ["no"],
            "seed": 11,
        }
        assert (await client.post(TEXT, json=body)).status_code == 200
    sampling = runner.plans[0].inits[0].sampling
    controls = sampling.controls
    assert sampling.columns.seed == 11
    assert controls.penalties == PenaltyColumns(0.5, -0.5, 1.5)
    assert controls.logit_bias == ((5, 100.0), (7, -1.5))
    assert controls.allowed_ids == (5, 6, 7)
    assert controls.bad_words == ((*b"no",), (*b" no",))
    assert (controls.prompt_ids, controls.output_ids) == ((*b"hi",), ())


async def test_tokens_that_are_all_banned_are_refused(client):
    for fields in ({"bad_words": ["a"], "allowed_token_ids": [97]}, {"min_tokens": 1, "allowed_token_ids": [EOS]}):
        response = await client.post(TEXT, json={"prompt": "hi", **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "allowed_token_ids")
    fine = {"prompt": "hi", "bad_words": ["ab"], "allowed_token_ids": [97]}
    assert (await client.post(TEXT, json=fine)).status_code == 200


async def test_max_tokens_zero_is_for_echo(client):
    response = await client.post(TEXT, json={"prompt": "hi", "max_tokens": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    answer = (await client.post(TEXT, json={"prompt": "hi", "max_tokens": 0, "echo": True})).json()
    assert answer["choices"][0]["text"] == "hi"
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(("url", "asked"), [(CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})], ids=["chat", "text"])
@pytest.mark.parametrize(
    ("fields", "opened"), [({}, ("", 0)), ({"cache_salt": "mine", "priority": -3}, ("mine", -3))], ids=["none", "both"]
)
async def test_the_engine_is_told_the_salt_and_the_priority(engine, client, monkeypatch, url, asked, fields, opened):
    """Caught: `and` for `or` in `fields.cache_salt or ""` and `fields.priority or 0`, and another default than 0."""
    open_, told = engine.open, []

    def spy(prompt, params, **terms):
        told.append((terms["cache_salt"], terms["priority"]))
        return open_(prompt, params, **terms)

    monkeypatch.setattr(engine, "open", spy)
    assert (await client.post(url, json={**asked, "max_tokens": 1, **fields})).status_code == 200
    assert told == [opened]
