"""The shapes of chat completions, whole and streamed."""

import asyncio
import re
import time

import pytest

from aserve.http import create_app
from tests.engines import EOS, SPECIAL_TOKENS, says, scripted_engine
from tests.http.conftest import client_of
from tests.http.events import events_of

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PROMPT_IDS = [258, *b"hi", EOS, 259]


async def test_a_whole_answer(client):
    response = await client.post(URL, json={"model": "scripted", "messages": HI})
    body = response.json()
    assert response.status_code == 200
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", body.pop("id"))
    assert abs(body.pop("created") - time.time()) < 60
    assert body == {
        "object": "chat.completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world!"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 14,
            "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


async def test_a_streamed_answer(client):
    body = {"messages": HI, "stream": True, "max_tokens": 3}
    response = await client.post(URL, json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events_of(response.text)
    [common] = {(chunk.pop("id"), chunk.pop("created"), chunk.pop("model"), chunk.pop("object")) for chunk in chunks}
    assert common[0] == f"chatcmpl-{response.headers['x-request-id']}"
    assert common[2:] == ("scripted", "chat.completion.chunk")
    quiet = {"index": 0, "logprobs": None, "finish_reason": None}
    assert chunks == [
        {"choices": [{**quiet, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{**quiet, "delta": {"content": "H"}}]},
        {"choices": [{**quiet, "delta": {"content": "e"}}]},
        {"choices": [{**quiet, "delta": {"content": "l"}, "finish_reason": "length", "stop_reason": None}]},
    ]


async def test_usage_comes_last_when_asked_for(client):
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    *others, last = events_of((await client.post(URL, json=body)).text)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 14
    assert not any("usage" in chunk for chunk in others)


async def test_token_ids_when_asked_for(client):
    whole = (await client.post(URL, json={"messages": HI, "return_token_ids": True})).json()
    assert whole["prompt_token_ids"] == PROMPT_IDS
    assert whole["choices"][0]["token_ids"] == list(says("Hello, world!"))
    streamed = events_of((await client.post(URL, json={"messages": HI, "return_token_ids": True, "stream": True})).text)
    assert streamed[0]["prompt_token_ids"] == PROMPT_IDS
    assert [id for chunk in streamed[1:] for id in chunk["choices"][0]["token_ids"]] == list(says("Hello, world!"))


@pytest.mark.parametrize("text", ['"quoted"\\\n\r\n\t\0', "é 世界 👩‍👩‍👧", "data: [DONE]\n\n", "\u2028<|end|"])
async def test_streamed_and_whole_text_are_equal(text):
    async with scripted_engine(says(text)) as engine, client_of(create_app(engine)) as client:
        whole = (await client.post(URL, json={"messages": HI})).json()
        chunks = events_of((await client.post(URL, json={"messages": HI, "stream": True})).text)
    assert whole["choices"][0]["message"]["content"] == text
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text


@pytest.mark.parametrize("stream", [False, True])
async def test_what_stopped_it_is_said(client, stream):
    async def last_choice(**fields):
        response = await client.post(URL, json={"messages": HI, "stream": stream, **fields})
        body = events_of(response.text)[-1] if stream else response.json()
        return body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]

    assert await last_choice() == ("stop", None)
    assert await last_choice(stop="wor") == ("stop", "wor")
    assert await last_choice(stop=["x", ", "]) == ("stop", ", ")
    assert await last_choice(stop_token_ids=[ord("w")]) == ("stop", ord("w"))
    assert await last_choice(ignore_eos=True, max_tokens=20) == ("length", None)
    assert await last_choice(min_tokens=20, max_completion_tokens=30, ignore_eos=True) == ("length", None)


async def test_without_a_cap_it_takes_all_the_room(client):
    body = {"messages": HI, "ignore_eos": True}
    assert (await client.post(URL, json=body)).json()["usage"]["total_tokens"] == 128
    assert (await client.post(URL, json={**body, "max_tokens": 10**6})).json()["usage"]["total_tokens"] == 128


async def test_max_completion_tokens_wins(client):
    body = {"messages": HI, "max_tokens": 5, "max_completion_tokens": 2}
    assert (await client.post(URL, json=body)).json()["usage"]["completion_tokens"] == 2


async def test_content_in_parts_is_joined(client):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    body = {"messages": [{"role": "user", "content": parts}], "return_token_ids": True}
    ids = (await client.post(URL, json=body)).json()["prompt_token_ids"]
    assert ids == [258, *b"h\ni", EOS, 259]


async def test_a_prompt_that_is_too_long_names_the_messages(client):
    body = {"messages": [{"role": "user", "content": "x" * 200}]}
    for stream in (False, True):
        response = await client.post(URL, json={**body, "stream": stream})
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "203" in error["message"]
        assert "128" in error["message"]


async def test_a_prompt_that_just_fits_is_answered(client):
    content = "x" * (128 - 1 - len(PROMPT_IDS) + len("hi"))
    body = {"messages": [{"role": "user", "content": content}]}
    usage = (await client.post(URL, json=body)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (127, 1)


async def test_a_second_turn_finds_the_first_in_the_cache(client):
    long = [{"role": "user", "content": "x" * 60}]
    await client.post(URL, json={"messages": long})
    usage = (await client.post(URL, json={"messages": long})).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 56


async def test_many_at_once(client):
    responses = await asyncio.gather(
        *(client.post(URL, json={"messages": HI, "stream": i % 2 == 0}) for i in range(20))
    )
    assert all(response.status_code == 200 for response in responses)
    assert len({response.headers["x-request-id"] for response in responses}) == 20
    assert SPECIAL_TOKENS[0] not in responses[0].text
