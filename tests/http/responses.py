"""A client's side of /v1/responses: events read back and put together, and answers compared without their ids."""

import json
import re

import openai

from aserve.http import create_app
from tests.http.conftest import client_of
from tests.http.test_tools import TOOLS as CHAT_TOOLS

URL = "/v1/responses"
TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
_ID = re.compile(r"\b(resp|msg|rs|fc|fco|call)_[0-9a-f]{20,}")


def sdk(engine, **app_options):
    """OpenAI's client of the application of an engine."""
    http_client = client_of(create_app(engine, **app_options))
    return openai.AsyncOpenAI(api_key="x", base_url="http://aserve/v1", http_client=http_client, max_retries=0)


def events_of(text):
    """Every event's JSON: each has its type as its name, they are numbered, and the last says how it ended."""
    events = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    first = events[0]["sequence_number"]
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    return events


def put_together(events):
    """The items that the events of a stream come to, by what was added and by deltas alone; each done event agrees."""
    items = []
    for event in events:
        name, _, what = event["type"].rpartition(".")
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
        if name == "response.output_item":
            _item(items, what, event)
        elif name == "response.content_part":
            _part(items[-1], what, event["part"])
        elif what == "delta":
            holder, field = _held(items[-1], name)
            holder[field] += event["delta"]
        elif what == "done":
            holder, field = _held(items[-1], name)
            assert event[field] == holder[field]
            if "logprobs" in event:
                holder["logprobs"] = event["logprobs"]
    return items


def _item(items, what, event):
    if what == "added":
        assert (event["output_index"], event["item"]["status"]) == (len(items), "in_progress")
        items.append(json.loads(json.dumps(event["item"])))
    else:
        items[-1] |= {key: event["item"][key] for key in ("status", "encrypted_content") if key in event["item"]}
        assert (event["output_index"], event["item"]) == (len(items) - 1, items[-1])


def _part(item, what, part):
    if what == "added":
        assert part["text"] == ""
        item["content"].append(dict(part))
    else:
        assert item["content"] == [part]


def _held(item, name):
    """Where an item holds what events of that name tell."""
    return (item, "arguments") if name == "response.function_call_arguments" else (item["content"][0], "text")


def without_ids(value):
    """The same with ids and times that are always equal."""
    text = _ID.sub(r"\1_", json.dumps(value))
    return json.loads(re.sub(r'"(created_at|completed_at)": \d+', r'"\1": 0', text))


async def ask(engine, **fields):
    """A whole response, after the same was streamed and found to say the same."""
    body = {"input": "hi", "tools": TOOLS, "seed": 1, **fields}
    async with client_of(create_app(engine)) as client:
        response = await client.post(URL, json=body)
        assert response.status_code == 200, response.text
        whole = response.json()
        events = events_of((await client.post(URL, json={**body, "stream": True})).text)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert put_together(events) == last["output"]
    last["usage"]["input_tokens_details"] = whole["usage"]["input_tokens_details"]  # of the second, all is cached
    assert without_ids(last) == without_ids(whole)
    return whole
