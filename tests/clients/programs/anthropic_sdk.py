"""Anthropic's SDK against a server: what it makes of each answer, as JSON."""

import json
import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
QUESTION = [{"role": "user", "content": "What is aserve?"}]
GREEDY = {"extra_body": {"temperature": 0}}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(**fields):
    return client.messages.create(**{"model": "demo", "max_tokens": 64, "messages": QUESTION, **GREEDY, **fields})


def streamed(**fields):
    body = {"model": "demo", "max_tokens": 64, "messages": QUESTION, **GREEDY, **fields}
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_message(), list(dict.fromkeys(kinds))


def told(message):
    """Without what differs from one request to the next."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in message.to_dict()["content"]]
    return {**{key: value for key, value in message.to_dict().items() if key != "id"}, "content": content}


def error_of(**fields):
    try:
        ask(**fields)
    except anthropic.APIStatusError as error:
        return {"kind": type(error).__name__, "body": error.body, "request_id": error.request_id}
    return None


tools = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
whole, (together, kinds) = ask(), streamed()
called, (called_together, _) = ask(**tools), streamed(**tools)
[call] = called.content
result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
history = [*QUESTION, called.to_param(), {"role": "user", "content": [result]}]
answered = ask(messages=history, tools=[WEATHER])
counted = client.messages.count_tokens(model="demo", messages=history, tools=[WEATHER])
print(
    json.dumps(
        {
            "whole": told(whole),
            "together": told(together),
            "kinds": kinds,
            "called": told(called),
            "called_together": told(called_together),
            "answered": told(answered),
            "counted": counted.input_tokens,
            "unknown_model": error_of(model="other"),
            "image": error_of(
                messages=[
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b"}}]}
                ]
            ),
        }
    )
)
