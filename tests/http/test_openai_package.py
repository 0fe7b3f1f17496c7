"""The official client drives the API through its own types."""

from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from aserve.http import create_app
from tests.engines import scripted_engine
from tests.fakes import FakeKV, FakeScript, ScriptedRunner

HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def clients(**engine_options):
    """A maker of openai clients of an application that asks for the key "right"."""
    async with scripted_engine(**engine_options) as engine:
        transport = httpx.ASGITransport(create_app(engine, api_keys=["right", "another"]))
        async with httpx.AsyncClient(transport=transport) as http_client:

            def make(api_key="right"):
                return openai.AsyncOpenAI(
                    api_key=api_key, base_url="http://aserve/v1", http_client=http_client, max_retries=0
                )

            yield make


@pytest.fixture
async def make_client():
    async with clients() as make:
        yield make


async def test_chat(make_client):
    answer = await make_client().chat.completions.create(
        model="scripted", messages=HI, temperature=0, seed=1, max_completion_tokens=5, user="somebody"
    )
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 10
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_chat_stream(make_client):
    stream = await make_client().chat.completions.create(
        model="also/scripted", messages=HI, stream=True, stream_options={"include_usage": True}, stop=["!"]
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == "Hello, world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 13
    assert {chunk.model for chunk in chunks} == {"also/scripted"}


async def test_completions(make_client):
    answer = await make_client().completions.create(model="scripted", prompt=["a", "b"], max_tokens=5)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "Hello"), (1, "Hello")]


async def test_a_completion_stream(make_client):
    stream = await make_client().completions.create(model="scripted", prompt=[104, 105], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, world!"


async def test_models(make_client):
    models = [model async for model in make_client().models.list()]
    assert [model.id for model in models] == ["scripted", "also/scripted"]
    assert (await make_client().models.retrieve("also/scripted")).owned_by == "aserve"


async def test_errors(make_client):
    with pytest.raises(openai.AuthenticationError) as caught:
        await make_client("wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as caught:
        await make_client().chat.completions.create(model="other", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as caught:
        await make_client().completions.create(model="scripted", prompt="x" * 200)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        await make_client().chat.completions.create(model="scripted", messages=HI, top_logprobs=2)
    assert caught.value.param == "top_logprobs"
    with pytest.raises(openai.NotFoundError):
        await make_client().moderations.create(model="scripted", input="a")


async def test_a_failure_in_the_midst_of_a_stream():
    def poison(plan):
        is_hit = any(piece.seq_id == 0 and piece.start > 10 for piece in plan.slices)
        return RuntimeError("the device is on fire") if is_hit else None

    runner = ScriptedRunner(model=FakeScript(b"endless"), poison=poison)
    async with clients(runner=runner) as make:
        stream = await make().chat.completions.create(model="scripted", messages=HI, stream=True)
        with pytest.raises(openai.APIError) as caught:
            _ = [chunk async for chunk in stream]
        assert caught.value.code == "engine_error"
        assert "fire" not in caught.value.message
        answer = await make().completions.create(model="scripted", prompt="a", max_tokens=7)
        assert answer.choices[0].text == "endless"


async def test_logprobs_seeds_and_stops_through_its_types():
    runner = ScriptedRunner(model=FakeKV(8, range(97, 123), seeded=True))
    async with clients(runner=runner) as make:
        chats, completions = make().chat.completions, make().completions
        ask = {"model": "scripted", "messages": HI, "max_tokens": 6, "temperature": 1.0}
        first = await chats.create(**ask, seed=5, logprobs=True, top_logprobs=2)
        again = await chats.create(**ask, seed=5)
        other = await chats.create(**ask, seed=6)
        texts = [answer.choices[0].message.content for answer in (first, again, other)]
        assert texts[0] == texts[1] != texts[2]
        content = first.choices[0].logprobs.content
        assert "".join(token.token for token in content) == texts[0]
        assert [len(token.top_logprobs) for token in content] == [2] * 6
        assert bytes(content[0].bytes).decode() == content[0].token
        assert content[0].logprob <= content[0].top_logprobs[0].logprob <= 0
        stopped = await chats.create(**ask, seed=5, stop=[texts[0][2:4]])
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (texts[0][:2], "stop")
        assert stopped.usage.completion_tokens == 4
        scored = await completions.create(model="scripted", prompt="hello", max_tokens=2, logprobs=1, echo=True)
        logprobs = scored.choices[0].logprobs
        assert logprobs.tokens[:5] == list("hello")
        assert logprobs.token_logprobs[0] is None
        assert logprobs.text_offset == list(range(7))
        stream = await chats.create(**ask, seed=5, logprobs=True, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        streamed = [token for chunk in chunks[1:-1] for token in chunk.choices[0].logprobs.content]
        assert [token.logprob for token in streamed] == [token.logprob for token in content]
        assert chunks[-1].usage.completion_tokens == 6


async def test_several_choices_through_its_types():
    runner = ScriptedRunner(model=FakeKV(8, range(97, 123), seeded=True))
    async with clients(runner=runner) as make:
        chats, completions = make().chat.completions, make().completions
        ask = {"model": "scripted", "messages": HI, "max_tokens": 6, "temperature": 1.0}
        alone = [await chats.create(**ask, seed=5 + k) for k in range(3)]
        texts = [answer.choices[0].message.content for answer in alone]
        whole = await chats.create(**ask, seed=5, n=3, logprobs=True, top_logprobs=1)
        assert [(choice.index, choice.message.content) for choice in whole.choices] == list(enumerate(texts))
        for choice in whole.choices:
            assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
        assert whole.usage.completion_tokens == 18
        assert whole.usage.prompt_tokens == alone[0].usage.prompt_tokens
        streamed, reasons = ["", "", ""], []
        async for chunk in await chats.create(**ask, seed=5, n=3, stream=True):
            (choice,) = chunk.choices
            streamed[choice.index] += choice.delta.content
            reasons += [choice.finish_reason] * bool(choice.finish_reason)
        assert (streamed, reasons) == (texts, ["length"] * 3)
        best = await completions.create(model="scripted", prompt=["a", "b"], n=2, best_of=4, seed=5, logprobs=0)
        assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
        sums = [sum(choice.logprobs.token_logprobs) for choice in best.choices]
        assert sums[0] >= sums[1]
        assert sums[2] >= sums[3]
        beams = {"use_beam_search": True, "length_penalty": 0.5}
        searched = await completions.create(model="scripted", prompt="a", n=2, max_tokens=6, extra_body=beams)
        assert len({choice.text for choice in searched.choices}) == 2
