"""Reading server-sent events back."""

import json


def events_of(text: str) -> list:
    """Every event's JSON; the last must be [DONE], and each must be one `data:` line and an empty one."""
    *events, end = text.split("\n\n")
    assert end == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
