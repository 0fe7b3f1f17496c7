"""The bundled model over HTTP: asked with tools it calls one by itself, answers by the result, and writes JSON."""

import json

import openai
import pytest

from tests.e2e.server_process import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server.wait_until_ready()


@pytest.mark.parametrize("city", ["Oslo", "Paris", "Tokyo", "Cairo"])
async def test_a_tool_is_called_where_that_is_free_and_its_result_is_told(server, city):
    """What no mask makes it do: a call as its template writes calls, told apart from content, with what was asked."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        asked = {"model": "demo", "tools": [WEATHER], "temperature": 0}
        question = [{"role": "user", "content": f"What is the weather in {city}?"}]
        answer = await client.chat.completions.create(messages=question, **asked)
        [choice] = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": city})
        async with client.chat.completions.stream(messages=question, **asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny", "temperature": 21}'}
        told = await client.chat.completions.create(messages=[*question, choice.message, result], **asked)
    assert told.choices[0].finish_reason == "stop"
    assert told.choices[0].message.tool_calls is None
    assert told.choices[0].message.content.startswith("It is sunny in ")
    assert told.choices[0].message.content.endswith(", at 21 degrees.")


async def test_json_is_written_when_asked_for(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        asked = [{"role": "user", "content": "Write JSON: name Grace, age 42."}]
        for format in ({"type": "text"}, {"type": "json_object"}):
            answer = await client.chat.completions.create(
                model="demo", messages=asked, temperature=0, response_format=format
            )
            assert json.loads(answer.choices[0].message.content) == {"name": "Grace", "age": 42}
