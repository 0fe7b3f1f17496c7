"""Every family's own way to write answers is read as what it says, and what is nearly so is content."""

import json

import pytest

from aserve.core.answer_events import Arguments, CallBegins, CallEnds, Content
from aserve.text.formats.families import CALLS, CHANNELS, THOUGHTS
from tests.text.formats.examples import EXAMPLES, JSON, SCHEMAS
from tests.text.formats.reading import FORMATS, events_of, format_named, joined, parsed, told

HERMES = FORMATS["hermes"]


def test_every_format_has_an_example():
    examples = EXAMPLES.values()
    assert {example.calls for example in examples} == {*CALLS, *CHANNELS}
    assert {example.thoughts for example in examples} - {None} == {*THOUGHTS} - {"minimax_m3"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_answer_says_what_its_family_means(name):
    example = EXAMPLES[name]
    reasoning, content, calls = parsed(FORMATS[name], example.text)
    assert (reasoning, content) == (example.reasoning, example.content)
    assert [(tool, json.loads(arguments)) for tool, arguments, _ in calls] == example.says
    assert tuple(call_id for *_, call_id in calls) == example.ids


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.calls not in CHANNELS])
def test_what_follows_the_calls_is_content(name):
    """Not in channels: there what follows a call without a header is its arguments."""
    _, content, calls = parsed(FORMATS[name], EXAMPLES[name].text + "\nThat is all.")
    assert content == EXAMPLES[name].content + "\nThat is all."
    assert len(calls) == 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_cut_answer_says_the_beginning_of_what_the_whole_says(name):
    """A call that was cut has begun to say its arguments, and says nothing that the whole does not."""
    text = EXAMPLES[name].text
    whole = parsed(FORMATS[name], text)
    markers = [marker for marker in FORMATS[name].markers() if marker.startswith("<|")]  # each is one token
    for end in range(len(text)):
        if any(text[:end].endswith(marker[:n]) for marker in markers for n in range(1, len(marker))):
            continue
        events = events_of(FORMATS[name], [text[:end]])
        _, _, calls = told(events)
        assert len(calls) <= len(whole[2])
        for cut, full in zip(calls[:-1], whole[2], strict=False):
            assert cut == full, end
        if calls and JSON in text:
            assert whole[2][len(calls) - 1][1].startswith(calls[-1][1]), end


def test_events_come_in_their_order():
    text = 'Hi <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and <tool_call>{"name": "g"}</tool_call>'
    assert joined(events_of(HERMES, text)) == [
        Content("Hi "),
        CallBegins(0, "f"),
        Arguments(0, '{"a": 1}'),
        CallEnds(0),
        Content(" and "),
        CallBegins(1, "g"),
        Arguments(1, "{}"),
        CallEnds(1),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call> {",
        '<tool_call>{"name": "f"',
        '<tool_call>{"name": "f", "age": 3}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": }</tool_call>',
        '<tool_call>{"name": }</tool_call>',
        '<tool_call>{"name"}</tool_call>',
        '<tool_call>{"arguments": {"a": [1, 2]}}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "' + "f" * 300 + '", "arguments": {}}</tool_call>',
        "<tool_call>call f please</tool_call>",
        "</tool_call>",
        "<tool_cal",
        " \n ",
        "a < b",
    ],
)
def test_what_is_no_call_is_content(text):
    assert parsed(HERMES, text) == ("", text, [])


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "b": 2}</tool_call>', ', "b": 2}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}} so</tool_call>', " so</tool_call>", '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "", '{"a": }'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", '{"a": 1'),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", '{"a": 1}'),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"', "", '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", '{"a": 1}'),
        ('<tool_call><tool_call>{"name": "f", "arguments": {}}', "<tool_call>", "{}"),
    ],
)
def test_nothing_of_a_call_that_goes_wrong_is_lost(text, content, arguments):
    assert parsed(HERMES, text) == ("", content, [("f", arguments, None)])


@pytest.mark.parametrize("text", ['{"name": "Bob", "parameters": {}}', "[1, 2]", "[f(1)]", "{}", "[x]", "", "{"])
@pytest.mark.parametrize("calls", ["llama3_json", "pythonic"])
def test_json_and_lists_are_no_calls_unless_they_name_a_tool(calls, text):
    assert parsed(format_named(calls), text) == ("", text, [])


def test_calls_without_a_marker_come_first_or_not_at_all():
    call = '{"name": "now", "parameters": {}}'
    format = format_named("llama3_json", "think")
    assert parsed(format, f"\n {call}")[2] == [("now", "{}", None)]
    assert parsed(format, f"<think>a</think>\n{call}") == ("a", "", [("now", "{}", None)])
    assert parsed(format, f"So: {call}") == ("", f"So: {call}", [])


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3.5", {"type": "integer"}, "3.5"),
        ("null", {"type": ["string", "null"]}, None),
        ("3", {"type": ["string", "null"]}, "3"),
        ("true", {"type": "boolean"}, True),
        ("[1]", {"type": "array"}, [1]),
        ("[1", {"type": "array"}, "[1"),
        ("3", {}, 3),
        ("three", {}, "three"),
        ("", {"type": "string"}, ""),
        ("\n\n", {"type": "string"}, ""),
        ("\n\na\n\n", {"type": "string"}, "\na\n"),
    ],
)
def test_the_schema_tells_the_type_of_a_tagged_value(value, schema, said):
    schemas = {"f": {"type": "object", "properties": {"a": schema}}}
    text = f"<function=f><parameter=a>{value}</parameter></function>"
    [(_, arguments, _)] = parsed(format_named("qwen3_coder"), text, schemas=schemas)[2]
    assert json.loads(arguments) == {"a": said}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("a=1, b=-2.5e3", {"a": 1, "b": -2500.0}),
        ("a='it\\'s', b=\"\\x41\\u00e9\\n\"", {"a": "it's", "b": "Aé\n"}),
        ("a=[1, [2, (3, 4)], {'k': None}],", {"a": [1, [2, [3, 4]], {"k": None}]}),
        ("a=True, True=word", {"a": True, "True": "word"}),
        ("a=1_000", {"a": "1_000"}),
        ("a='\\d'", {"a": "\\d"}),
        ("", {}),
    ],
)
def test_python_becomes_json(written, said):
    text = f"[now({written})]"
    for chunks in ([text], text):  # at once, and by characters
        [(_, arguments, _)] = told(events_of(format_named("pythonic"), chunks))[2]
        assert json.loads(arguments) == said


def test_a_thought_that_the_prompt_has_begun_goes_on():
    assert parsed(HERMES, "why\n</think>\n\nso", in_thought=True) == ("why", "so", [])
    assert parsed(HERMES, "why", in_thought=True) == ("why", "", [])
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed(HERMES, f"{call}</think>", in_thought=True) == (call, "", [])


def test_channels_without_tools_are_content():
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert parsed(FORMATS["openai"], text, schemas={}) == ("", "{}", [])
    assert parsed(FORMATS["openai"], "Hello to all", schemas=SCHEMAS) == ("", "Hello to all", [])
    assert parsed(FORMATS["openai"], "<|channel|>x<|message|>y") == ("", "<|channel|>x<|message|>y", [])


def test_a_header_that_is_none_is_content_wherever_it_stands():
    text = "<|channel|>final<|message|>hi<|channel|>x<|message|>y"
    assert parsed(FORMATS["openai"], text) == ("", "hi<|channel|>x<|message|>y", [])


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_comes_at_once_is_told_in_no_more_events_than_it_has_parts(name):
    events = events_of(FORMATS[name], [EXAMPLES[name].text])
    assert events == joined(events)


def test_behind_the_end_of_a_list_of_calls_nothing_is_a_call():
    call = '{"name": "now", "arguments": {}}'
    text = f"[TOOL_CALLS][{call}], {call}"
    assert parsed(FORMATS["mistral"], text) == ("", f", {call}", [("now", "{}", None)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<function=now=>\n</function>"),
        ("qwen3_coder", "<function=now</function>"),
        ("qwen3_coder", "<function=now"),
        ("glm45", "<tool_call>now, he said</tool_call>"),
    ],
)
def test_a_name_that_does_not_end_as_it_should_is_content(name, text):
    assert parsed(FORMATS[name], text) == ("", text, [])


def test_white_space_around_calls_is_nobodys():
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert parsed(HERMES, f"\n{call}\n") == ("", "", [("now", "{}", None)])


def test_white_space_before_what_should_have_been_the_rest_of_a_call_is_content():
    text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}"
    assert parsed(FORMATS["deepseek_v3"], f"{text}\n so") == ("", "\n so", [("now", "{}", None)])
