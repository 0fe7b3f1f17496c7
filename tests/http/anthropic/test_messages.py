"""/v1/messages: what is asked, what the template is told, what is answered, whole and streamed alike."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.core.answer_events import Arguments, CallBegins, CallEnds, Content, Reasoning
from aserve.core.outputs import FinishReason
from aserve.http import create_app
from aserve.http.anthropic.blocks import Blocks, content_of
from aserve.http.reading import CONTENT, Reading
from tests.engines import says
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.anthropic.streams import named_events, put_together
from tests.http.conftest import client_of
from tests.http.test_tools import CALL, PARAMETERS, TEMPLATE, THOUGHT, speaking

URL = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"name": "weather", "description": "Tells it", "input_schema": PARAMETERS}]
ANY = {"type": "any", "disable_parallel_tool_use": True}


async def ask(engine, **fields):
    """The message of a whole answer, after the same was streamed and found to say the same."""
    body = {"messages": HI, "max_tokens": 1000, "temperature": 0, **fields}
    async with client_of(create_app(engine)) as client:
        response = await client.post(URL, json=body)
        assert response.status_code == 200, response.text
        streamed = await client.post(URL, json={**body, "stream": True})
    whole, together = response.json(), put_together(named_events(streamed.text))
    for message in (whole, together):
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            assert block["type"] != "tool_use" or len(block.pop("id")) > 8
    assert together == whole
    return whole


async def prompt_of(**fields):
    """The text of the prompt that is computed, of which count_tokens says how long it is."""
    runner = ScriptedRunner(model=FakeScript(says("x")))
    async with speaking("x", runner=runner) as engine, client_of(create_app(engine)) as client:
        response = await client.post(URL, json={"messages": HI, "max_tokens": 1, **fields})
        counted = {name: value for name, value in fields.items() if name != "max_tokens"}
        count = await client.post(f"{URL}/count_tokens", json={"messages": HI, **counted})
    assert response.status_code == 200, response.text
    token_ids = [token_id for plan in runner.plans for piece in plan.slices for token_id in piece.token_ids]
    assert (
        count.json() == {"input_tokens": response.json()["usage"]["input_tokens"]} == {"input_tokens": len(token_ids)}
    )
    return bytes(token_id for token_id in token_ids if token_id < 256).decode()


async def test_a_text():
    async with speaking("Hello.") as engine:
        message = await ask(engine, system="Be short.", metadata={"user_id": "me"}, service_tier="auto")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": len("Be short.hi") + 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 7,
            "service_tier": "standard",
        },
    }


async def test_thoughts_text_and_calls_are_blocks():
    async with speaking(f"{THOUGHT}Let me see.\n{CALL}\n{CALL}") as engine:
        message = await ask(engine, tools=TOOLS)
        single = await ask(engine, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        omitted = await ask(engine, thinking={"type": "adaptive", "display": "omitted"})
    thinking, text, *calls = message["content"]
    assert (thinking["type"], thinking["thinking"], text) == (
        "thinking",
        "Well <tool_call>",
        {"type": "text", "text": "Let me see.\n"},
    )
    assert len(thinking["signature"]) == 64
    assert calls == [{"type": "tool_use", "name": "weather", "input": {"city": "Rom"}}] * 2
    assert message["stop_reason"] == "tool_use"
    assert [block["type"] for block in single["content"]] == ["thinking", "text", "tool_use"]
    assert omitted["content"][0] == {"type": "thinking", "thinking": "", "signature": thinking["signature"]}


async def test_the_order_of_events_and_their_names():
    async with speaking(f"{THOUGHT}{CALL}") as engine, client_of(create_app(engine)) as client:
        body = {"messages": HI, "max_tokens": 1000, "tools": TOOLS, "stream": True}
        response = await client.post(URL, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = named_events(response.text)
    kinds = [event["type"] if "delta" not in event else event["delta"].get("type", "message") for event in events]
    assert [kind for index, kind in enumerate(kinds) if kinds[index - 1] != kind or index == 0] == [
        *("message_start", "ping"),
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("message", "message_stop"),
    ]
    assert max(len(event["delta"].get("partial_json", "")) for event in events if "delta" in event) == 1


async def test_why_an_answer_ended():
    async with speaking("Hello, world!") as engine:
        cut = await ask(engine, max_tokens=3)
        assert (cut["content"][0]["text"], cut["stop_reason"]) == ("Hel", "max_tokens")
        stopped = await ask(engine, stop_sequences=["xx", ", w"])
        assert (stopped["content"][0]["text"], stopped["stop_reason"]) == ("Hello", "stop_sequence")
        assert stopped["stop_sequence"] == ", w"
        warmed = await ask(engine, max_tokens=0)
        assert (warmed["content"], warmed["usage"]["output_tokens"]) == ([{"type": "text", "text": ""}], 0)
        assert warmed["stop_reason"] == "max_tokens"
    async with speaking("Hello, world!", max_model_len=12) as engine:
        assert (await ask(engine))["stop_reason"] == "model_context_window_exceeded"


async def test_a_cut_call_has_what_there_is_of_its_input():
    async with speaking('<tool_call>{"name": "weather", "arguments": {"city": "Rom", "day": "Mo"}}') as engine:
        message = await ask(engine, tools=TOOLS, max_tokens=64)
    assert message["content"] == [{"type": "tool_use", "name": "weather", "input": {"city": "Rom"}}]
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("call_format", ["hermes", "mistral", None])
@pytest.mark.parametrize("choice", [ANY, {**ANY, "type": "tool", "name": "weather"}], ids=lambda value: value["type"])
async def test_a_forced_call_is_made_by_its_schema(call_format, choice):
    """By a model that knows no language, and heeds masks."""
    async with speaking(call_format=call_format, thought_format=None) as engine:
        typed = {"format": {"type": "json_schema", "schema": {"enum": [1]}}}  # of text, of which there is none
        message = await ask(engine, tools=TOOLS, tool_choice=choice, max_tokens=400, output_config=typed)
    [call] = message["content"]
    assert (call["name"], message["stop_reason"]) == ("weather", "tool_use")
    assert len(call["input"]["city"]) <= 3


async def test_an_answer_by_a_schema():
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    async with speaking(thought_format=None) as engine:
        message = await ask(engine, output_config={"format": {"type": "json_schema", "schema": schema}})
        assert json.loads(message["content"][0]["text"])["a"] in (True, False)
        async with client_of(create_app(engine)) as client:
            broken = {"format": {"type": "json_schema", "schema": {"type": "strange"}}}
            response = await client.post(URL, json={"messages": HI, "max_tokens": 9, "output_config": broken})
    assert response.status_code == 400
    assert "output_config" in response.json()["error"]["message"]


async def test_the_template_is_told_of_the_whole_history():
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}]}
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rom"}, "cache_control": {"a": 1}}
    thoughts = [{"type": "thinking", "thinking": "Hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "So"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
        {"role": "system", "content": "Now"},
    ]
    billing = {"type": "text", "text": "x-anthropic-billing-header: 1"}
    system = [billing, {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    told = await prompt_of(system=system, messages=turns)
    assert told == 'Sa\nb\ncHmSoweather{"city": "Rom"}<|tool|>rainWell?\n<system>\nNow\n</system>'
    result |= {"is_error": True, "content": "no"}
    assert "<|tool|>Error: noWell?" in await prompt_of(messages=turns)
    told = json.loads((await prompt_of(tools=TOOLS)).removeprefix("hi"))
    assert told == [
        {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": PARAMETERS}}
    ]
    assert await prompt_of(tools=TOOLS, tool_choice={"type": "none"}) == "hi"
    last = {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}
    assert await prompt_of(messages=[*HI, last]) == "hiIt is"


async def test_thinking_and_effort_are_told_to_templates_that_read_them():
    assert await prompt_of(thinking={"type": "disabled"}) == "hi!"
    assert await prompt_of(thinking={"type": "disabled"}, output_config={"effort": "low"}) == "hi!"
    assert await prompt_of(thinking={"type": "adaptive"}, output_config={"effort": "low"}) == "hilow"
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert await prompt_of(thinking=enabled, max_tokens=2000) == "hi"


async def test_a_budget_ends_thoughts_where_a_model_has_them():
    """Fault: a budget that is told to nobody, or refused where a model does not think."""
    begun = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
    fields = {"max_tokens": 1100, "output_config": {"format": {"type": "json_schema", "schema": {"enum": ["yes"]}}}}
    asked = {**fields, "thinking": {"type": "enabled", "budget_tokens": 8}}
    async with speaking(template=begun, call_format=None) as engine:
        message = await ask(engine, **asked)
    thought, text = message["content"]
    assert 0 < len(thought["thinking"].encode()) <= 8 * 3 + 8
    assert (text["text"], message["stop_reason"]) == ('"yes"', "end_turn")
    async with speaking(thought_format=None, call_format=None) as engine:
        assert [block["type"] for block in (await ask(engine, **asked))["content"]] == ["text"]


EVENTS = st.lists(
    st.one_of(
        st.builds(Content, st.text(min_size=1)),
        st.builds(Reasoning, st.text(min_size=1)),
        st.lists(st.text(min_size=1), max_size=3),
    ),
    max_size=6,
)


class ScriptedParser:
    """Finds what it is told to: each character of the text stands for one event."""

    def __init__(self, events):
        self._events = list(events)

    def feed(self, text):
        found, self._events = self._events[: len(text)], self._events[len(text) :]
        return found

    def finish(self):
        return []


@settings(max_examples=100)
@given(parts=EVENTS, cuts=st.lists(st.integers(1, 4), min_size=1, max_size=20))
def test_any_way_to_cut_an_answer_makes_the_same_blocks(parts, cuts):
    """Catches a block that is opened, closed or signed by where a chunk ends."""
    events = []
    for number, part in enumerate(part for part in parts if isinstance(part, list)):
        events += [CallBegins(number, "f"), *(Arguments(number, text) for text in part), CallEnds(number)]
    events += [part for part in parts if not isinstance(part, list)]
    reading = Reading(new_parser=lambda: ScriptedParser(events), new_id=lambda: "id")
    whole = Blocks(reading)
    expected = content_of([*whole.begin(), *whole.more("x" * len(events), FinishReason.STOP)])
    pieced, pieces, left = Blocks(reading), [], len(events)
    pieces += pieced.begin()
    for cut in cuts:
        pieces += pieced.more("x" * min(cut, left), None)
        left = max(left - cut, 0)
    pieces += pieced.more("x" * left, FinishReason.STOP)
    assert content_of(pieces) == expected
    told = "".join(event.text for event in events if isinstance(event, Content | Reasoning))
    found = "".join(block.get("text", "") + block.get("thinking", "") for block in expected)
    assert found == told
    assert len([block for block in expected if block["type"] == "tool_use"]) == whole.num_calls


def test_a_plain_answer_has_one_block():
    blocks = Blocks(CONTENT)
    pieces = [*blocks.begin(), *blocks.more("a", None), *blocks.more("", None), *blocks.more("b", FinishReason.STOP)]
    assert content_of(pieces) == [{"type": "text", "text": "ab"}]
    assert [piece["type"] for piece in pieces].count("content_block_delta") == 2
