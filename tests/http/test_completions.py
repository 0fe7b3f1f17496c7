"""The shapes of text completions, whole and streamed, and their four kinds of prompt."""

import re

import pytest

from tests.engines import says
from tests.http.events import events_of

URL = "/v1/completions"


async def test_a_whole_answer(client):
    body = (await client.post(URL, json={"prompt": "hi"})).json()
    assert re.fullmatch("cmpl-[0-9a-f]{32}", body.pop("id"))
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "text": "Hello, world!",
                "finish_reason": "stop",
                **dict.fromkeys(("logprobs", "stop_reason", "prompt_logprobs", "prompt_token_ids", "token_ids")),
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 14,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_streamed_answer(client):
    chunks = events_of((await client.post(URL, json={"prompt": "hi", "stream": True, "max_tokens": 2})).text)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": "H", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "e", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    ]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_the_cap_is_sixteen_unless_given(client):
    body = {"prompt": "hi", "ignore_eos": True}
    assert (await client.post(URL, json=body)).json()["usage"]["completion_tokens"] == 16
    assert (await client.post(URL, json={**body, "max_tokens": 20})).json()["usage"]["completion_tokens"] == 20
    assert (await client.post(URL, json={**body, "max_tokens": None})).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [[104, 105]]),
        (["hi"], [[104, 105]]),
        (["hi", "you"], [[104, 105], [121, 111, 117]]),
        ([104, 105], [[104, 105]]),
        ([[104, 105], [121]], [[104, 105], [121]]),
    ],
)
async def test_prompts_of_every_kind(client, prompt, ids):
    body = {"prompt": prompt, "return_token_ids": True}
    whole = (await client.post(URL, json=body)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == ids
    assert [choice["index"] for choice in whole] == list(range(len(ids)))
    assert all(choice["token_ids"] == list(says("Hello, world!")) for choice in whole)
    chunks = events_of((await client.post(URL, json={**body, "stream": True})).text)
    for index, prompt_ids in enumerate(ids):
        first, *others = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert first["prompt_token_ids"] == prompt_ids
        assert [id for choice in others for id in choice["token_ids"]] == list(says("Hello, world!"))
        assert "".join(choice["text"] for choice in others) == "Hello, world!"


async def test_many_prompts_share_the_steps_and_end_with_one_usage(client):
    body = {"prompt": [f"p{i}" for i in range(20)], "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of((await client.post(URL, json=body)).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == i) for i in range(20)]
    assert texts == ["Hello, world!"] * 20
    assert sum(choice["finish_reason"] == "stop" for choice in choices) == 20
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 10 * 2 + 10 * 3
    assert last["usage"]["completion_tokens"] == 20 * 14
    first_end = next(place for place, choice in enumerate(choices) if choice["finish_reason"])
    assert {choice["index"] for choice in choices[:first_end]} >= set(range(8)), "those that run, run side by side"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_bad_prompt_refuses_all(client, engine, stream):
    response = await client.post(URL, json={"prompt": ["fine", "x" * 200, "fine"], "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["param"] == "prompt"
    assert engine.statistics().num_used_blocks == 0
