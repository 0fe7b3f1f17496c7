"""The official openai package against the real server and the demo model, through its own types."""

import httpx
import openai
import pytest
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.e2e.server_process import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HELLO = [{"role": "user", "content": "Hello!"}]
GREEDY = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def server():
    with serving("--api-key", "right", "another", "--dtype", "float32") as server:
        yield server.wait_until_ready()
        assert not [line for line in server.lines if "Traceback" in line]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0) as client:
        yield client


def test_a_chat(client):
    answer = client.chat.completions.create(messages=HELLO, user="me", **GREEDY)
    assert isinstance(answer, ChatCompletion)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    assert choice.message.content
    usage = answer.usage
    assert isinstance(usage, CompletionUsage)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > usage.prompt_tokens > 0


def test_a_chat_stream_is_the_chat_in_pieces(client):
    whole = client.chat.completions.create(messages=HELLO, **GREEDY)
    with client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        chunks = list(stream)
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    *answer, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in answer][-1] == "stop"
    assert len(answer) > 5
    assert (usage.choices, usage.usage.completion_tokens) == ([], whole.usage.completion_tokens)


def test_the_streaming_helper_puts_the_pieces_together(client):
    whole = client.chat.completions.create(messages=HELLO, **GREEDY)
    with client.chat.completions.stream(messages=HELLO, **GREEDY) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole.choices[0].message.content


def test_completions_of_text_of_ids_and_of_lists_of_either(client):
    def texts(prompt):
        answer = client.completions.create(prompt=prompt, max_tokens=8, extra_body={"ignore_eos": True}, **GREEDY)
        assert isinstance(answer, Completion)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        assert answer.usage.completion_tokens == 8 * len(answer.choices)
        return [choice.text for choice in answer.choices]

    def ids(text):
        reply = client.post("/../tokenize", body={"prompt": text}, cast_to=httpx.Response)
        return reply.json()["tokens"]

    once, day = texts("Once upon a time"), texts("One day")
    assert once != day
    assert texts(ids("One day")) == day
    assert texts(["Once upon a time", "One day"]) == once + day
    assert texts([ids("One day"), ids("Once upon a time")]) == day + once


def test_a_completion_stream(client):
    whole = client.completions.create(prompt="One day", stop=["."], **GREEDY)
    stream = client.completions.create(prompt="One day", stop=["."], stream=True, **GREEDY)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_models(client):
    models = list(client.models.list())
    assert [(type(model), model.id, model.object) for model in models] == [(Model, "demo", "model")]
    assert client.models.retrieve("demo") == models[0]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_wrong_key(server, client):
    wrong = client.with_options(api_key="wrong")
    for ask in (wrong.models.list, lambda: wrong.chat.completions.create(messages=HELLO, **GREEDY)):
        with pytest.raises(openai.AuthenticationError) as caught:
            ask()
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    assert client.with_options(api_key="another").models.retrieve("demo").id == "demo"
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/models").status_code == 401


def test_an_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(messages=HELLO, model="gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "gpt-4" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt=[5] * 2100, stream=stream, **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert "2100" in caught.value.message
    assert "2048" in caught.value.message


def test_a_field_that_is_wrong_unknown_or_not_supported(client):
    for fields, param in (
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"modalities": ["audio"]}, "modalities"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=HELLO, model="demo", **fields)
        assert caught.value.param == param
