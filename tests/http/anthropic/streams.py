"""Reading a stream of the Messages API back, as its clients do."""

import json
from typing import Any

from aserve.http.anthropic.partial_json import partial_object


def named_events(text: str) -> list[dict[str, Any]]:
    """Every event's JSON; each must be an `event:` line with its type, a `data:` line, and an empty one."""
    *events, end = text.split("\n\n")
    assert end == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream comes to. Blocks must come one after the other, and nothing after the end."""
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    message = events[0]["message"]
    inputs: dict[int, str] = {}
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "ping":
            continue
        block_index = event["index"]
        if event["type"] == "content_block_start":
            assert (is_open, block_index) == (False, len(message["content"]))
            message["content"].append(event["content_block"])
            is_open = True
        elif event["type"] == "content_block_stop":
            assert (is_open, block_index) == (True, len(message["content"]) - 1)
            is_open = False
        else:
            assert (is_open, block_index) == (True, len(message["content"]) - 1)
            for name, value in event["delta"].items():
                if name == "partial_json":
                    inputs[block_index] = inputs.get(block_index, "") + value
                elif name != "type":
                    message["content"][block_index][name] += value
    assert not is_open
    for block_index, text in inputs.items():
        message["content"][block_index]["input"] = partial_object(text)
    usage = {**message["usage"], **events[-2]["usage"]}
    return {**message, **events[-2]["delta"], "usage": usage}
