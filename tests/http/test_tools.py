"""Tools and thoughts over HTTP: what is asked, what the template is told, what is answered, whole and streamed."""

import json

import openai
import pytest

from aserve.http import create_app
from tests.engines import EOS, SPECIAL_TOKENS, says, scripted_engine
from tests.fakes import FakeKV, ScriptedRunner
from tests.http.conftest import client_of
from tests.http.events import events_of

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ reasoning_effort }}{% if enable_thinking is false %}!{% endif %}"
    "{{ verbosity }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
THOUGHT = "<think>\nWell <tool_call>\n</think>\n\n"


def speaking(text=None, **options):
    """A scripted engine whose model writes thoughts and calls; without a text, one that heeds masks."""
    given = {"template": TEMPLATE, "call_format": "hermes", "thought_format": "think", "max_model_len": 2048}
    given |= {"num_blocks": 600} | options
    if text is None:
        return scripted_engine(**{"runner": masked(given.get("special_tokens", SPECIAL_TOKENS))} | given)
    return scripted_engine(text if isinstance(text, tuple) else says(text), **given)


def masked(special_tokens=SPECIAL_TOKENS):
    """A runner whose model heeds masks."""
    return ScriptedRunner(model=FakeKV(8, range(256 + len(special_tokens))))


async def ask(engine, **fields):
    """The choice of a whole answer, after the same was streamed and found to say the same."""
    body = {"messages": HI, "tools": TOOLS, "seed": 1, **fields}
    async with client_of(create_app(engine)) as client:
        response = await client.post(URL, json=body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        chunks = events_of((await client.post(URL, json={**body, "stream": True})).text)
    streamed = put_together(chunks)
    message = {key: value for key, value in choice["message"].items() if value is not None}
    for call in [*message.get("tool_calls", ()), *streamed[0].get("tool_calls", ())]:
        assert len(call.pop("id")) > 8
    if not streamed[0]["content"] and "content" not in message:
        del streamed[0]["content"]
    assert streamed == (message, choice["finish_reason"])
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


def put_together(chunks):
    """A message and its finish reason from chunks, as a client does it."""
    message, reason = {}, None
    for chunk in chunks:
        [choice] = chunk["choices"]
        reason = choice["finish_reason"] or reason
        for key, value in choice["delta"].items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value if key != "role" else value
                continue
            for call in value:
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert (call["type"], call["function"]["name"] != "") == ("function", True)
                    calls.append({key: call[key] for key in ("id", "type")} | {"function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


async def test_calls_are_told_from_thoughts_and_content():
    async with speaking(f"{THOUGHT}Let me see.\n{CALL}\n{CALL}") as engine:
        answer = await ask(engine)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    assert answer == {
        "role": "assistant",
        "content": "Let me see.\n",
        "reasoning": "Well <tool_call>",
        "reasoning_content": "Well <tool_call>",
        "tool_calls": [call, call],
        "finish_reason": "tool_calls",
    }


async def test_content_is_null_beside_calls_alone_and_reasoning_where_there_is_none():
    async with speaking(CALL) as engine:
        answer = await ask(engine)
    assert (answer["content"], answer["reasoning"], answer["reasoning_content"]) == (None, None, None)


async def test_every_chunk_has_one_token_at_most_and_none_is_empty():
    async with speaking(CALL) as engine, client_of(create_app(engine)) as client:
        response = await client.post(URL, json={"messages": HI, "tools": TOOLS, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in events_of(response.text)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1]["tool_calls"][0]["function"]["name"] == "weather"
    arguments = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[1:-1]]
    assert "".join(arguments) == '{"city": "Rom"}'
    assert max(map(len, arguments)) == 1
    assert deltas[-1] == {}


async def test_without_tools_a_call_is_content_and_thoughts_are_thoughts():
    async with speaking(f"{THOUGHT}{CALL}") as engine:
        for fields in ({"tools": None}, {"tool_choice": "none"}):
            answer = await ask(engine, **fields)
            assert (answer["content"], answer["reasoning"]) == (CALL, "Well <tool_call>")
            assert answer["finish_reason"] == "stop"


async def test_reasoning_may_be_left_out():
    async with speaking(f"{THOUGHT}So.") as engine:
        answer = await ask(engine, include_reasoning=False)
    assert answer == {"role": "assistant", "content": "So.", "finish_reason": "stop"}


async def test_the_tokens_of_thoughts_are_counted_shown_or_not():
    """Each byte is a token: those of the thought without its markers, in streams too, and of all choices together."""
    for fields, told in (
        ({}, {"reasoning_tokens": 16}),
        ({"include_reasoning": False, "n": 2}, {"reasoning_tokens": 32}),
    ):
        body = {"messages": HI, **fields}
        async with speaking(f"{THOUGHT}So.") as engine, client_of(create_app(engine)) as client:
            whole = (await client.post(URL, json=body)).json()["usage"]
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            last = events_of((await client.post(URL, json=streamed)).text)[-1]["usage"]
        assert whole["completion_tokens_details"] == last["completion_tokens_details"] == told


async def test_a_cut_call_says_so():
    async with speaking(CALL) as engine:
        answer = await ask(engine, max_tokens=len(CALL) - 20)
    assert answer["finish_reason"] == "length"
    assert '{"city": "Rom"}'.startswith(answer["tool_calls"][0]["function"]["arguments"])


async def test_one_call_where_they_must_not_be_parallel():
    async with speaking(f"{CALL}{CALL}") as engine:
        assert len((await ask(engine, parallel_tool_calls=False))["tool_calls"]) == 1
        assert len((await ask(engine))["tool_calls"]) == 2


async def test_markers_that_are_special_tokens_reach_the_parser_and_nobody_else():
    markers = ("[TOOL_CALLS]", "[ARGS]", "<unused>")
    text = (*b"So<", 262, 260, *b"weather", 261, *b'{"city": "R"}', EOS)
    options = {"special_tokens": (*SPECIAL_TOKENS, *markers), "call_format": "mistral", "thought_format": None}
    async with speaking(text, **options) as engine:
        answer = await ask(engine)
        assert answer["content"] == "So<"
        assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "R"}'}
        assert (await ask(engine, tools=None))["content"] == 'So<weather{"city": "R"}'


async def test_the_models_own_ids_and_those_that_its_template_takes():
    async with (
        speaking("[TOOL_CALLS]now[ARGS]{}", call_format="mistral") as engine,
        client_of(create_app(engine)) as client,
    ):
        choice = (await client.post(URL, json={"messages": HI, "tools": TOOLS})).json()["choices"][0]
        assert len(choice["message"]["tool_calls"][0]["id"]) == 9
        assert choice["message"]["tool_calls"][0]["id"].isalnum()
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}"
    async with speaking(text, call_format="kimi_k2") as engine, client_of(create_app(engine)) as client:
        choice = (await client.post(URL, json={"messages": HI, "tools": TOOLS})).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["id"] == "functions.now:3"


async def prompt_of(engine, **fields):
    async with client_of(create_app(engine)) as client:
        body = {"messages": HI, "max_tokens": 1, "return_token_ids": True, **fields}
        response = await client.post(URL, json=body)
        assert response.status_code == 200, response.text
        ids = response.json()["prompt_token_ids"]
        return bytes(token_id for token_id in ids if token_id < 256).decode()


async def test_the_template_is_told_of_tools_calls_and_thoughts():
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    turns = [*HI, {"role": "assistant", "content": None, "reasoning": "Hm", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "a", "content": "rain"}]
    async with speaking("x") as engine:
        assert await prompt_of(engine, messages=turns) == 'hiHmNoneweather{"city": "Rom"}<|tool|>rain'
        broken = {**call, "function": {"name": "weather", "arguments": '{"city'}}
        turns[1] = {"role": "assistant", "reasoning_content": "Hm", "tool_calls": [broken]}
        assert await prompt_of(engine, messages=turns) == 'hiHmNoneweather"{\\"city"<|tool|>rain'
        told = json.loads((await prompt_of(engine, tools=TOOLS)).removeprefix("hi"))
        assert told[0] == TOOLS[0]
        assert told[1]["function"]["parameters"] == {"type": "object", "properties": {}}
        assert await prompt_of(engine, tools=TOOLS, tool_choice="none") == "hi"
        only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("now")]}}
        told = json.loads((await prompt_of(engine, tools=TOOLS, tool_choice=only)).removeprefix("hi"))
        assert [tool["function"]["name"] for tool in told] == ["now"]


async def test_what_libraries_add_to_an_answer_comes_back_and_is_not_seen_by_the_template():
    """Catches the whole message of the SDK's `parse` or of litellm refused, and a prompt with arguments told twice."""
    function = {"name": "weather", "arguments": '{"city": "Rom"}'}
    calls = [{"id": "a", "type": "function", "function": function}]
    added = {"provider_specific_fields": {"a": 1}}
    parsed = [{**calls[0], **added, "function": {**function, **added, "parsed_arguments": {"city": "Rom"}}}]
    text = {"role": "assistant", "content": "{}"}
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    async with speaking("x", template=template) as engine:
        told = await prompt_of(engine, messages=[text, {"role": "assistant", "content": None, "tool_calls": calls}])
        again = [{**text, "parsed": {"a": 1}}, {"role": "assistant", "parsed": None, **added, "tool_calls": parsed}]
        assert await prompt_of(engine, messages=again) == told


async def test_a_conversation_is_tokenized_with_its_tools():
    """As many tokens as the same conversation is billed for."""
    async with speaking("x") as engine, client_of(create_app(engine)) as client:
        tokenized = (await client.post("/tokenize", json={"messages": HI, "tools": TOOLS})).json()
        usage = (await client.post(URL, json={"messages": HI, "tools": TOOLS})).json()["usage"]
        alone = (await client.post("/tokenize", json={"messages": HI})).json()
    assert tokenized["count"] == usage["prompt_tokens"] > alone["count"]


async def test_effort_and_verbosity_are_told_to_templates_that_read_them_and_yield_to_what_is_said_outright():
    async with speaking("x") as engine:
        assert await prompt_of(engine, reasoning_effort="low") == "hilow"
        assert await prompt_of(engine, reasoning_effort="none") == "hi!"
        outright = {"enable_thinking": False}
        assert await prompt_of(engine, reasoning_effort="low", chat_template_kwargs=outright) == "hilow!"
        assert await prompt_of(engine, reasoning_effort="low", verbosity="high") == "hilowhigh"
        assert await prompt_of(engine, verbosity="low", chat_template_kwargs={"verbosity": "high"}) == "hihigh"
    async with scripted_engine() as engine:
        assert await prompt_of(engine, reasoning_effort="high", verbosity="low") == "hi"


def named(name):
    return {"type": "function", "function": {"name": name}}


FORCED = {
    "required": ("required", "tool_calls"),
    "named": (named("weather"), "stop"),
    "allowed": (
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("weather")]}},
        "tool_calls",
    ),
}


SUM = {"type": "object", "properties": {"sum": {"enum": [5]}}, "required": ["sum"], "additionalProperties": False}
AS_SUM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}


async def test_where_a_call_may_be_made_a_response_format_is_that_of_the_other_answers():
    """By a model that knows no language, and heeds masks. Catches an agent that has a type and so never calls."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
    fields = {"tools": [tool], "response_format": AS_SUM, "parallel_tool_calls": False, "max_tokens": 400}
    reasons = set()
    async with speaking(thought_format=None) as engine:
        for text in ("hi", "0"):  # which of both it is made to say
            fields["messages"] = [{"role": "user", "content": text}]
            answer = await ask(engine, **fields)
            if answer["finish_reason"] == "tool_calls":
                [call] = answer["tool_calls"]
                assert len(json.loads(call["function"]["arguments"])["city"]) <= 3
                assert answer["content"] is None
            else:
                assert json.loads(answer["content"]) == {"sum": 5}
            reasons.add(answer["finish_reason"])
            outright = {**fields, "response_format": None, "structured_outputs": {"json": SUM}}
            assert json.loads((await ask(engine, **outright))["content"]) == {"sum": 5}
    assert reasons == {"tool_calls", "stop"}


@pytest.mark.parametrize("call_format", ["hermes", "mistral", "qwen3_coder", None])
@pytest.mark.parametrize("choice", FORCED)
async def test_a_forced_call_is_made_by_its_schema(call_format, choice):
    """By a model that knows no language, and heeds masks; in its own format, or as JSON where that is not enforced.

    A structure of text has no effect: there is no text.
    """
    tool_choice, reason = FORCED[choice]
    async with speaking(call_format=call_format, thought_format=None) as engine:
        fields = {"tools": TOOLS[:1], "tool_choice": tool_choice, "parallel_tool_calls": False, "max_tokens": 400}
        answer = await ask(engine, response_format=AS_SUM, **fields)
    assert (answer["content"], answer["finish_reason"]) == (None, reason)
    [call] = answer["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert len(json.loads(call["function"]["arguments"])["city"]) <= 3


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tools": []}, "tools", "length >= 1"),
        ({"tools": TOOLS * 2}, "tools", "tools[2].function.name: 'weather' is there twice"),
        ({"tools": [named(f"f{index}") for index in range(129)]}, "tools", "length <= 128"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools[0].function.name: this field is required"),
        ({"tools": [named("a b")]}, "tools", "tools[0].function.name"),
        ({"tools": [named("f" * 129)]}, "tools", "tools[0].function.name"),
        ({"tools": [{**named("f"), "x": 1}]}, "tools", "unknown field tools[0].x"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools", "tools[0].function.x"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools", "parameters"),
        ({"tool_choice": "auto", "tools": None}, "tool_choice", "needs tools"),
        ({"tool_choice": named("g")}, "tool_choice", "'g' is none of the tools"),
        ({"tool_choice": "any"}, "tool_choice", "any"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "needs function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "needs allowed_tools"),
        ({"tool_choice": {**named("now"), "x": 1}}, "tool_choice", "unknown field tool_choice.x"),
        ({"tool_choice": "required", "structured_outputs": {"json_object": True}}, "tool_choice", "structured_outputs"),
        ({"tool_choice": "required", "use_beam_search": True}, "tools", "beam search"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "much"),
        ({"verbosity": "much"}, "verbosity", "much"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**named("f")}]}]}, "messages", "arguments"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_cannot_be_is_a_400_that_says_so(fields, param, told):
    async with speaking("x") as engine, client_of(create_app(engine)) as client:
        response = await client.post(URL, json={"messages": HI, "tools": TOOLS, **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert told in error["message"], error


async def test_large_schemas_and_those_that_cannot_be_enforced_are_refused():
    async with speaking("x") as engine, client_of(create_app(engine)) as client:

        async def error(parameters, **fields):
            tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}
            body = {"messages": HI, "tools": [tool]}
            return (await client.post(URL, json=body)).json().get("error", {}).get("message", "")

        assert "at most 131072 bytes" in await error({"description": "x" * 132000})
        assert "tools: of the tool f" in await error({"properties": {"a": {"not": {}}}}, strict=True)
        assert await error({"properties": {"a": {"not": {}}}}) == ""


async def test_tools_that_are_too_large_together_are_refused():
    large = [named(f"f{index}") for index in range(9)]
    for tool in large:
        tool["function"]["parameters"] = {"description": "x" * 130000}
    async with speaking("x") as engine, client_of(create_app(engine)) as client:
        error = (await client.post(URL, json={"messages": HI, "tools": large})).json()["error"]
    assert error["param"] == "tools"
    assert error["message"].startswith("tools may have at most 1048576 bytes together, got 1170")


async def test_a_template_without_tools_refuses_them():
    async with scripted_engine(call_format="hermes") as engine, client_of(create_app(engine)) as client:
        error = (await client.post(URL, json={"messages": HI, "tools": TOOLS})).json()["error"]
    assert (error["param"], error["message"]) == ("tools", "the model's chat template takes no tools")


async def test_the_official_client_calls_tools_and_sends_their_answers_back():
    async with speaking(f"{THOUGHT}{CALL}") as engine, client_of(create_app(engine)) as http_client:
        sdk = openai.AsyncOpenAI(api_key="x", base_url="http://aserve/v1", http_client=http_client, max_retries=0)
        answer = await sdk.chat.completions.create(model="scripted", messages=HI, tools=TOOLS)
        message = answer.choices[0].message
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Rom"}
        assert message.reasoning_content == "Well <tool_call>"
        reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        again = await sdk.chat.completions.create(model="scripted", messages=[*HI, message, reply], tools=TOOLS)
        assert again.usage.prompt_tokens > answer.usage.prompt_tokens
        async with sdk.chat.completions.stream(model="scripted", messages=HI, tools=TOOLS) as stream:
            _ = [event async for event in stream]
            final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.tool_calls[0].function.name == "weather"
