"""A tokenizer's response_template: what is read of it says what transformers' own parser says, and the rest is told."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.text.formats.choice import choose_calls, choose_thoughts
from aserve.text.formats.families import CALLS, THOUGHTS
from aserve.text.formats.named import calls_named, own_formats, thoughts_named
from aserve.text.formats.parts import Literal
from aserve.text.formats.syntax import AnswerFormat
from tests.text.formats.reading import events_of, joined, parsed

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THOUGHT = {"open": "<think>", "close": "</think>", "content": "text"}
CONTENT = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|eot\|>)", "content": "text"}
HERMES = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
TAGS = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": FUNCTION,
}
PAIRS = {
    **TAGS,
    "content_args": {"tag_pattern": r"<key>(?P<key>[^<\n]+)</key>\s*<value>\s*(?P<value>.*?)\s*</value>"},
}
GEMMA = {
    "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
    "close": "<tool_call|>",
    "repeats": True,
    "content": "json",
    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    "transform": FUNCTION,
}
LIST = {
    "open": "<calls>",
    "close": "</calls>",
    "repeats": False,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{parameters}"}},
    "transform_each": True,
}
NAMED = {
    "open_pattern": r"<call>\s*to=(?P<name>[\w.-]+)(?:<json>)?",
    "close_pattern": r"</call>|$",
    "repeats": True,
    "content": "json",
    "transform": FUNCTION,
}
TEXTS = {
    "hermes": (HERMES, 'Hi.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
    "tags": (TAGS, "<tool_call>\n<function=f>\n<parameter=a>\nx y\n</parameter>\n</function>\n</tool_call>"),
    "pairs": (PAIRS, "<tool_call>\n<function=f>\n<key>a</key>\n<value>x y</value>\n</function>\n</tool_call>"),
    "gemma": (GEMMA, '<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>'),
    "list": (LIST, '<calls>[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]</calls>'),
    "named": (NAMED, 'so <call> to=f.g<json>{"a": [1, {"b": "}"}]}</call><call>to=h{}</call>'),
}


def template(calls=HERMES, **fields):
    given = {"reasoning_content": THOUGHT, "tool_calls": calls, "content": CONTENT, **fields}
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|start|>", "fields": given}


def format_of(own):
    return AnswerFormat(calls=calls_named(own.calls), thoughts=thoughts_named(own.thoughts))


@pytest.mark.parametrize("name", TEXTS)
def test_it_says_what_transformers_says(name):
    """Fault: a translation that reads something else than the template does."""
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    calls, text = TEXTS[name]
    text = f"<think>\nWhy?\n</think>\n{text}"
    own = own_formats(template(calls))
    assert own.problems == ()
    said = chat_parsing.parse_response(text, template(calls), prefix="")
    reasoning, content, found = parsed(format_of(own), text)
    assert (reasoning, content.strip()) == (said["reasoning_content"], said.get("content", "").strip())
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in _flat(said["tool_calls"])]
    assert [(name, json.loads(arguments)) for name, arguments, _ in found] == made


def _flat(calls):
    return [each for call in calls for each in (call if isinstance(call, list) else [call])]


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=40)
@given(data=st.data())
def test_any_chunking_gives_the_same_events(name, data):
    calls, text = TEXTS[name]
    format = format_of(own_formats(template(calls)))
    pieces = st.lists(st.one_of(st.sampled_from(["<", "{", "</tool_call>", "<think>", " "]), st.text(max_size=3)))
    cut = data.draw(st.integers(0, len(text)))
    text = text[:cut] + "".join(data.draw(pieces)) + text[cut:]
    size = data.draw(st.integers(1, 5))
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert joined(events_of(format, chunks)) == joined(events_of(format, [text]))


def test_what_a_family_writes_has_the_familys_name_and_counts_first():
    own = own_formats(template(HERMES))
    assert (own.calls, own.thoughts) == ("hermes", "think")
    assert own_formats(template(TAGS)).calls == "qwen3_coder"
    other = own_formats(template(NAMED))
    assert other.calls not in CALLS
    assert other == own_formats(template(NAMED))
    assert other.calls != own_formats(template(LIST)).calls
    assert choose_calls("auto", "<tool_call>", None, other.calls) == other.calls
    assert choose_calls("none", "<tool_call>", None, other.calls) is None
    assert choose_thoughts("mistral", "", None, own.thoughts) == "mistral"
    assert own_formats(None) == (None, None, ())
    assert thoughts_named("think") is THOUGHTS["think"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_calls": {**HERMES, "open_pattern": "(a+)+b"}}, "tool_calls: the pattern '(a+)+b' is more than"),
        ({"tool_calls": {**HERMES, "open_pattern": "<a>|<b>"}}, "is more than"),
        ({"tool_calls": {**HERMES, "open_pattern": r"<a>\d"}}, "is more than"),
        ({"tool_calls": {**HERMES, "open_pattern": "<a>b+"}}, "repeats a character"),
        ({"tool_calls": {**HERMES, "open_pattern": "<" * 2000}}, "over 1024 characters"),
        ({"tool_calls": {**HERMES, "open_pattern": "(?P<name>.+?)<a>"}}, "begins with no text"),
        ({"tool_calls": {**NAMED, "open_pattern": "<call>(?P<id>.+?)<a>(?P<name>.+?)<b>"}}, "a group 'id'"),
        ({"tool_calls": {**TAGS, "content": "kv-lines"}}, "content 'kv-lines'"),
        ({"tool_calls": {**TAGS, "content_args": {"tag_pattern": "(?P<key>.+?)=(?P<value>.+?)"}}}, "tag_pattern"),
        ({"tool_calls": {**GEMMA, "content_args": {"string_delims": [["<", ">"]]}}}, "string_delims differ"),
        ({"tool_calls": {**GEMMA, "content_args": {"string_delims": 5}}}, "no pairs"),
        ({"tool_calls": {**GEMMA, "content_args": 5}}, "content_args is no object"),
        ({"tool_calls": {**HERMES, "transform": None}}, "makes no call"),
        ({"tool_calls": {**NAMED, "transform": HERMES["transform"]}}, "makes no call"),
        ({"tool_calls": {**HERMES, "transform": FUNCTION}}, "makes no call"),
        ({"tool_calls": 5}, "it is no object"),
        ({"reasoning_content": {"open": ["a", "b"], "close": "c"}}, "reasoning_content: open is no text"),
        ({"reasoning_content": {"open": "<tool_call", "close": "c"}}, "begins with another"),
        ({"content": {"open": "<answer>"}}, "content: it is neither"),
        ({"citations": {"open": "<c>", "close": "</c>"}}, "citations: it is neither"),
    ],
)
def test_what_is_not_read_is_told(fields, told):
    """No pattern of a checkpoint's is run on what a model writes: one that is not translated is refused."""
    [problem] = own_formats(template(**fields)).problems
    assert told in problem


@pytest.mark.parametrize("given", [5, {}, {"fields": 3}, {"version": 2, "fields": {}}])
def test_what_is_no_template_is_told(given):
    assert own_formats(given) == (None, None, ("it is no response_template of version 1",))


def test_thoughts_that_no_family_has_are_read():
    own = own_formats(template(reasoning_content={"open": "<why>", "close": "</why>", "content": "text"}))
    assert own.problems == ()
    assert own.thoughts not in THOUGHTS
    assert parsed(format_of(own), "<why>a</why>b") == ("a", "b", [])


@pytest.mark.parametrize(("blank", "is_call"), [("", False), (r"\s*", True)])
def test_white_space_behind_a_name_is_read_where_the_pattern_has_it(blank, is_call):
    pattern = r"<call>\s*to=(?P<name>[\w.-]+)" + blank + "<json>"
    format = format_of(own_formats(template({**NAMED, "open_pattern": pattern})))
    assert parsed(format, "<call>to=f<json>{}</call>") == ("", "", [("f", "{}", None)])
    text = "<call>to=f <json>{}</call>"
    assert parsed(format, text) == (("", "", [("f", "{}", None)]) if is_call else ("", text, []))


@pytest.mark.parametrize("space", ["", " ", "\n"])
def test_a_space_that_may_be_there_is_white_space(space):
    """Catches a literal that is empty once it is stripped, and what it would let follow."""
    own = own_formats(template({**NAMED, "open_pattern": r"<call>(?: )?to=(?P<name>[\w.-]+)(?: )?<json>"}))
    assert own.problems == ()
    assert parsed(format_of(own), f"<call>{space}to=f<json>{{}}</call>") == ("", "", [("f", "{}", None)])
    [way] = calls_named(own.calls)
    assert not any(isinstance(part, Literal) and not part.text for part in way.call)
