"""The real server and the official client: a model that knows no tools calls one all the same where it has to."""

import json
import re

import openai
import pytest

from tests.e2e.server_process import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    '{# <tool_call>{"name": ..., "arguments": ...}</tool_call> #}'
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    with serving("--chat-template", str(template)) as server:
        yield server.wait_until_ready()


async def test_a_tool_is_called_answered_and_told_of(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        await round_trip(client)


async def round_trip(client):
    asked = {"model": "demo", "tools": [WEATHER], "max_tokens": 200, "seed": 1, "temperature": 0.8}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = await client.chat.completions.create(messages=ASK, tool_choice=choice, **asked)
        [call, *_] = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "days"}
        assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    async with client.chat.completions.stream(messages=ASK, tool_choice=choice, **asked) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    reply = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    turns = [*ASK, answer.choices[0].message, reply]
    last = await client.chat.completions.create(messages=turns, tool_choice="none", **asked)
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].message.content


def test_the_formats_that_were_chosen_are_told_at_the_start(server):
    assert re.search(r"tool calls: hermes; thoughts: none known of this model", "\n".join(server.lines))
