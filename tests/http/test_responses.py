"""/v1/responses: what is asked, what the template is told, what is answered, whole and streamed."""

import json

import openai
import pydantic
import pytest

from aserve.http import AppOptions, create_app
from tests.engines import SPECIAL_TOKENS, says, scripted_engine
from tests.fakes import FakeKV, FakeScript, ScriptedRunner
from tests.http.conftest import client_of
from tests.http.responses import TOOLS, URL, ask, events_of, put_together, sdk
from tests.http.test_tools import CALL, TEMPLATE, THOUGHT, speaking

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


async def test_a_plain_answer_through_the_official_client(engine):
    """Catches a response that the SDK's types do not take, and a default that is not OpenAI's."""
    answer = await sdk(engine).responses.create(
        model="scripted", input="hi", metadata={"a": "b"}, user="somebody", service_tier="auto", prompt_cache_key="k"
    )
    assert (answer.output_text, answer.status, answer.error) == ("Hello, world!", "completed", None)
    assert answer.output[0].content[0].annotations == []
    assert (answer.metadata, answer.user, answer.tool_choice, answer.store) == ({"a": "b"}, "somebody", "auto", True)
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (14, answer.usage.input_tokens + 14)
    assert (answer.parallel_tool_calls, answer.truncation, answer.text.format.type) == (True, "disabled", "text")


async def test_the_items_of_an_answer_with_thoughts_text_and_calls():
    async with speaking(f"{THOUGHT}Let me see.\n{CALL}\n{CALL}") as engine:
        answer = await ask(engine, include=[ENCRYPTED])
    thought, message, *calls = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Well <tool_call>"}]
    assert (thought["summary"], thought["encrypted_content"][:7]) == ([], "aserve.")
    assert message["content"] == [{"type": "output_text", "text": "Let me see.\n", "annotations": [], "logprobs": []}]
    assert [(call["name"], call["arguments"], call["status"]) for call in calls] == [
        ("weather", '{"city": "Rom"}', "completed")
    ] * 2
    assert calls[0]["call_id"] != calls[1]["call_id"]
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Well <tool_call>")}


async def test_the_order_of_events():
    """As OpenAI has it: an item's events stand between its added and its done, and so do those of its part."""
    async with speaking(f"<think>a</think>b{CALL}") as engine, client_of(create_app(engine)) as client:
        response = await client.post(URL, json={"input": "hi", "tools": TOOLS, "stream": True})
    kinds = [event["type"].removeprefix("response.") for event in events_of(response.text)]
    told = [kind for index, kind in enumerate(kinds) if kinds[index - 1] != kind]
    part = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    assert told == [
        *("created", "in_progress"),
        *(kind.format("reasoning_text") for kind in part),
        *(kind.format("output_text") for kind in part),
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


async def test_an_answer_that_is_cut_is_incomplete_and_so_is_its_last_item():
    async with speaking(f"{THOUGHT}Let me see") as engine:
        answer = await ask(engine, max_output_tokens=len(THOUGHT) + 3)
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
        assert (answer["completed_at"], answer["output"][1]["content"][0]["text"]) == (None, "Let")
        answer = await ask(engine, max_output_tokens=len(THOUGHT) - 20)
        assert [(item["type"], item["status"]) for item in answer["output"]] == [("reasoning", "incomplete")]
    async with speaking(CALL) as engine:
        (call,) = (await ask(engine, max_output_tokens=len(CALL) - 20))["output"]
    assert call["status"] == "incomplete"
    assert '{"city": "Rom"}'.startswith(call["arguments"])


async def test_an_answer_of_nothing_is_a_message_without_text():
    async with scripted_engine((256,)) as engine:
        (message,) = (await ask(engine, tools=[]))["output"]
    assert message["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


async def test_logprobs_are_those_of_the_text_alone():
    """Catches scores of thoughts and markers told as the text's, in models with and without thoughts."""
    async with speaking(f"{THOUGHT}So it is.") as engine:
        answer = await ask(engine, include=[LOGPROBS], top_logprobs=2, tools=[])
        logprobs = answer["output"][1]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in logprobs) == "So it is."
        assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
    async with scripted_engine() as engine, client_of(create_app(engine)) as client:
        body = {"input": "hi", "include": [LOGPROBS], "max_output_tokens": 5, "stream": True}
        events = events_of((await client.post(URL, json=body)).text)
        deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
        whole = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
        assert [entry for delta in deltas for entry in delta] == whole
        assert "".join(entry["token"] for entry in whole) == "Hello"


@pytest.mark.parametrize(
    "format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object", "properties": {"a": {}}}},
    ],
)
async def test_text_format_is_enforced(format):
    runner = ScriptedRunner(model=FakeKV(8, range(260)))
    async with scripted_engine(runner=runner, max_model_len=400, num_blocks=100) as engine:
        answer = await ask(engine, tools=[], text={"format": format})
    text = answer["output"][0]["content"][0]["text"]
    assert answer["status"] == "incomplete" or isinstance(json.loads(text), dict)
    assert text.lstrip().startswith("{")
    assert answer["text"]["format"] == format


async def test_structured_outputs_as_vllm_spells_them_are_enforced():
    runner = ScriptedRunner(model=FakeKV(8, range(260)))
    async with scripted_engine(runner=runner) as engine:
        answer = await ask(engine, tools=[], structured_outputs={"choice": ["red", "blue"]})
    assert answer["output"][0]["content"][0]["text"] in ("red", "blue")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "weather"}, {"mode": "required", "name": None}]
)
async def test_a_call_that_is_asked_for_is_made(choice):
    if isinstance(choice, dict) and "mode" in choice:
        choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    async with speaking(thought_format=None) as engine:
        fields = {"tools": TOOLS[:1], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 400}
        fields["text"] = {"format": {"type": "json_object"}}  # of text, of which there is none
        (call,) = (await ask(engine, **fields))["output"]
    assert call["name"] == "weather"
    assert len(json.loads(call["arguments"])["city"]) <= 3


async def prompt_of(engine, runner, **fields):
    """What the model is given: all that is planned for one request, which finds nothing cached; its length is told."""
    num_before = len(runner.plans)
    body = {"max_output_tokens": 1, "cache_salt": f"s{num_before}", **fields}
    async with client_of(create_app(engine)) as client:
        response = await client.post(URL, json=body)
        counted = await client.post(f"{URL}/input_tokens", json=body)
    assert response.status_code == 200, response.text
    tokens = response.json()["usage"]["input_tokens"]
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": tokens}
    return planned(runner, num_before)


def planned(runner, num_before):
    """All that was computed in the steps behind that many."""
    ids = [token_id for plan in runner.plans[num_before:] for piece in plan.slices for token_id in piece.token_ids]
    return b"".join(bytes([i]) if i < 256 else SPECIAL_TOKENS[i - 256].encode() for i in ids).decode()


async def test_items_become_the_messages_of_the_template():
    """Catches an item that is dropped, out of order, or told as a turn of its own."""
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rom"}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "rain"}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
    ]
    runner = ScriptedRunner(model=FakeScript(says("x")))
    async with speaking("x", runner=runner) as engine:
        told = await prompt_of(engine, runner, input=items, instructions="Be brief", reasoning={"effort": "low"})
        assert told == (
            '<|system|>Be brief<|end|><|user|>hi<|end|><|assistant|>HmSoweather{"city": "Rom"}<|end|>'
            "<|tool|>rain<|end|><|user|>a\nb<|end|>low<|assistant|>"
        )
        sealed = [*items[:1], {"type": "reasoning", "summary": [], "encrypted_content": "aserve.SG0="}, *items[2:3]]
        assert await prompt_of(engine, runner, input=sealed) == "<|user|>hi<|end|><|assistant|>HmSo<|end|><|assistant|>"


async def test_a_developers_messages_are_told_to_a_template_that_has_none():
    """As the system's, those at the beginning as one: a template may drop a role that it does not know."""
    runner = ScriptedRunner(model=FakeScript(says("x")))
    items = [{"role": role, "content": role[0]} for role in ("developer", "system", "user", "developer")]
    async with speaking("x", runner=runner) as engine:
        told = await prompt_of(engine, runner, input=items, instructions="i")
    assert told == "<|system|>i\n\nd\n\ns<|end|><|user|>u<|end|><|system|>d<|end|><|assistant|>"
    runner = ScriptedRunner(model=FakeScript(says("x")))
    async with speaking("x", runner=runner, template="{# developer #}" + TEMPLATE) as engine:
        told = await prompt_of(engine, runner, input=items)
    assert told.count("<|developer|>d<|end|>") == 2


async def test_functions_in_a_namespace_are_called_by_both_names():
    """As Codex has them: the model is told one name, the client gets two, and sends them back."""
    spaces = [{"type": "namespace", "name": "agents", "description": "d", "tools": [TOOLS[1]]}, TOOLS[1]]
    text = CALL.replace("weather", "agents__now") + CALL.replace("weather", "now")
    runner = ScriptedRunner(model=FakeScript(says(text)))
    async with speaking("", runner=runner) as engine:
        answer = await ask(engine, tools=spaces, client_metadata={"a": "b"})
        assert [(call.get("namespace"), call["name"]) for call in answer["output"]] == [
            ("agents", "now"),
            (None, "now"),
        ]
        assert [tool["type"] for tool in answer["tools"]] == ["namespace", "function"]
        assert answer["tools"][0]["tools"] == answer["tools"][1:]
        told = await prompt_of(engine, runner, input=answer["output"], tools=spaces)
        assert 'agents__now{"city": "Rom"}now{"city": "Rom"}' in told
        assert '"name": "agents__now"' in told
    async with speaking("x") as engine, client_of(create_app(engine)) as client:
        for changed, message in {
            "name": "tools[0].tools[0].name: this field is required",
            "x": "unknown field tools[0].tools[0].x",
        }.items():
            function = {"type": "function", "x": 1, "name": "f"}
            del function["name" if changed == "name" else "type"]
            refused = await client.post(URL, json={"input": "hi", "tools": [{**spaces[0], "tools": [function]}]})
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"]


async def test_a_reference_stands_for_the_item_of_a_stored_response():
    """As the AI SDK sends the turns of a conversation whose responses are stored."""
    runner = ScriptedRunner(model=FakeScript(says("Hello")))
    async with speaking("x", runner=runner) as engine, client_of(create_app(engine)) as client:

        async def answered(*items, **fields):
            return (await client.post(URL, json={"input": [*items], **fields})).json()

        asked, more = {"role": "user", "content": "hi"}, {"role": "user", "content": "And?"}
        first = await answered(asked)
        [item] = first["output"]
        for number, reference in enumerate(({"type": "item_reference", "id": item["id"]}, {"id": item["id"]})):
            num_before = len(runner.plans)
            second = await answered(asked, reference, more, max_output_tokens=1, cache_salt=f"s{number}")
            told = "<|user|>hi<|end|><|assistant|>Hello<|end|><|user|>And?<|end|><|assistant|>"
            assert planned(runner, num_before) == told
            listed = (await client.get(f"{URL}/{second['id']}/input_items?order=asc")).json()["data"]
            assert listed[1] == item

        others = (await answered(asked, store=False))["output"]
        await client.delete(f"{URL}/{first['id']}")
        for id in (others[0]["id"], item["id"][:-1], item["id"] + "f", "msg_1", "", item["id"]):
            refused = await answered(asked, {"type": "item_reference", "id": id})
            assert refused["error"]["message"].startswith("input[1]: there is no item"), id


async def test_what_sdks_add_to_an_output_may_come_back():
    """As openai-node's `responses.parse` has it, and `model_dump` of openai-python."""
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    part = {"type": "output_text", "text": "{}", "annotations": []}
    added = [
        {**call, "parsed_arguments": {"a": 1}, "async": None, "new": None},
        {"role": "assistant", "content": [{**part, "parsed": {"a": 1}}], "provider_specific_fields": {}},
    ]
    runner = ScriptedRunner(model=FakeScript(says("x")))
    async with speaking("x", runner=runner) as engine:
        plain = await prompt_of(engine, runner, input=[call, {"role": "assistant", "content": [part]}])
        assert await prompt_of(engine, runner, input=added) == plain
        async with client_of(create_app(engine)) as client:
            response = (await client.post(URL, json={"input": added})).json()
            items = (await client.get(f"{URL}/{response['id']}/input_items")).text
    assert "parsed" not in items
    assert "provider" not in items


async def test_truncation_drops_the_oldest_turns_and_keeps_the_instructions():
    """Catches an orphaned output of a call at the beginning, and a request that is refused though its end would fit."""
    turns = [{"role": "user", "content": f"{number:03} {'x' * 20}"} for number in range(30)]
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    turns[20:20] = [call, {"type": "function_call_output", "call_id": "c", "output": "y" * 100}]
    runner = ScriptedRunner(model=FakeScript(says("x")))
    async with scripted_engine(runner=runner, max_model_len=500, num_blocks=100) as engine:
        told = await prompt_of(
            engine, runner, input=turns, instructions="Be brief", truncation="auto", max_output_tokens=40
        )
        assert told.startswith("<|system|>Be brief<|end|><|user|>")
        assert told.endswith(f"029 {'x' * 20}<|end|><|assistant|>")
        num_kept = told.count("<|user|>")
        assert 10 <= num_kept < 20
        async with client_of(create_app(engine)) as client:
            refused = await client.post(URL, json={"input": turns})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
            counted = await client.post(f"{URL}/input_tokens", json={"input": turns})
            assert counted.json()["input_tokens"] > 500
            refused = await client.post(URL, json={"input": "x" * 501, "truncation": "auto"})
            assert refused.json()["error"]["code"] == "context_length_exceeded"


SCHEMA = {"type": "object", "properties": {}}
CALLED = {"type": "function_call", "call_id": "c", "name": "f"}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"input": []}, "input", "input is empty"),
        ({"input": [1]}, "input", "input[0]: expected object"),
        (
            {"input": [{"type": "item_reference", "id": "a"}]},
            "input",
            "input[0]: there is no item 'a' in the output of a response that is stored",
        ),
        ({"input": [{"role": "tool", "content": "a"}]}, "input", "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "'input_image' is not supported",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": "a", "contnt": 1}]}, "input", "unknown field input[0].contnt"),
        ({"input": [CALLED]}, "input", "input[0].arguments: this field is required"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "input", "was not made here"),
        ({"inputs": "hi"}, "inputs", "did you mean input?"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions and input"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0]: the type 'web_search' is not supported"),
        ({"tools": [{"type": "function", "name": "f", "function": {}}]}, "tools", "unknown field tools[0].function"),
        ({"tools": [{"type": "function", "name": "f", "strict": 1}]}, "tools", "tools[0].strict"),
        ({"tools": TOOLS * 2}, "tools", "tools[2].name: 'weather' is there twice"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g' is none of the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "needs a schema"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"choice": ["a"]}},
            "structured_outputs",
            "leave one out",
        ),
        ({"text": {"format": {"type": "text", "schema": SCHEMA}}}, "text", "has no schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text", "#/not"),
        ({"text": {"formt": {}}}, "text", "did you mean format?"),
        ({"reasoning": {"effort": "much"}}, "reasoning", "reasoning.effort"),
        ({"top_logprobs": 3}, "top_logprobs", LOGPROBS),
        ({"include": ["x"]}, "include", "include[0]"),
        ({"temperature": 3}, "temperature", "[0, 2]"),
        ({"background": True, "store": False}, "background", "store"),
        ({"metadata": {"a": 1}}, "metadata", "expected str"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "there is no response 'resp_none'"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_what_cannot_be_is_a_400_that_says_so(fields, param, told):
    async with speaking("x") as engine, client_of(create_app(engine)) as client:
        response = await client.post(URL, json={"input": "hi", **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param, error
    assert told in error["message"], error


async def test_what_an_operator_decides_holds_for_responses():
    """Unknown names at any depth are left out by a lenient server; logprobs have the operator's limit and spelling."""
    options = AppOptions(lenient=True, return_tokens_as_token_ids=True)
    async with scripted_engine(max_logprobs=2) as engine, client_of(create_app(engine, options=options)) as client:
        item = {"role": "user", "content": "hi", "colour": 1}
        tool = {**TOOLS[1], "shape": 2}
        body = {"input": [item], "hue": 3, "text": {"size": 4}, "include": [LOGPROBS]}
        answer = (await client.post(URL, json=body)).json()
        told = "; ".join(answer["warnings"])
        assert all(name in told for name in ("input[0].colour", "hue", "text.size"))
        assert answer["output"][0]["content"][0]["logprobs"][0]["token"] == f"token_id:{ord('H')}"
        refused = await client.post(URL, json={**body, "tools": [tool]})
        assert refused.json()["error"]["message"] == "the model's chat template takes no tools"
        refused = await client.post(URL, json={**body, "top_logprobs": 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")


async def test_a_failure_in_the_midst_of_a_stream_is_told_and_kept():
    """Catches items that are left open, an error without its code, and a response that is kept as if it were whole."""

    def poison(plan):
        is_hit = any(piece.start > 40 for piece in plan.slices)
        return RuntimeError("the device is on fire") if is_hit else None

    runner = ScriptedRunner(model=FakeScript(b"endless"), poison=poison)
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        events = events_of((await client.post(URL, json={"input": "hi", "stream": True})).text)
        assert [event["type"] for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
        failed = events[-1]["response"]
        assert failed["error"]["code"] == events[-2]["code"] == "engine_error"
        assert "fire" not in failed["error"]["message"]
        assert put_together(events) == failed["output"]
        assert failed["output"][0]["status"] == "incomplete"
        assert (await client.get(f"{URL}/{failed['id']}")).json() == failed


class Weather(pydantic.BaseModel):
    """What the scripted model says."""

    city: str


async def test_the_sdks_own_accumulator_and_parser():
    """Its stream helper puts the events together by rules of its own, and asserts what it relies on."""
    async with speaking(f"{THOUGHT}Now.{CALL}") as engine:
        client = sdk(engine)
        async with client.responses.stream(model="scripted", input="hi", tools=TOOLS) as stream:
            snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert snapshots[-1] == final.output_text == "Now."
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        reply = {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "rain"}
        again = await client.responses.create(
            model="scripted", tools=TOOLS, input=[{"role": "user", "content": "hi"}, *final.output, reply]
        )
        assert again.usage.input_tokens > final.usage.input_tokens
    async with scripted_engine(b'{"city": "Rom"}') as engine:
        parsed = await sdk(engine).responses.parse(
            model="scripted", input="hi", text_format=Weather, extra_body={"stop_token_ids": [125], "seed": 1}
        )
        assert parsed.output_parsed == Weather(city="Rom")


async def test_the_official_clients_errors(engine):
    client = sdk(engine)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="other", input="hi")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="scripted", input="x" * 200)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
