"""What is enforced of calls, in every format for which that is so: an answer is one, or its next token is not allowed.

The vocabulary is bytes, and one special token for each marker that would be one.
"""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from aserve.constraints.compiler import Compiler
from aserve.core.errors import InvalidRequestError
from aserve.core.structured import CallRules, StructuredOutputs, ToolRule
from aserve.text.formats.families import CALLS, CHANNELS
from aserve.text.tokenizer import Tokenizer
from aserve.text.tokenizer_config import TokenizerConfig
from tests.engines import byte_characters
from tests.text.formats.reading import format_named, parsed

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
GOOD, BAD = '{"city": "Rome", "days": 3}', '{"city": "Rome", "days": "x"}'
MARKERS = ("<|end_of_text|>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>")
MARKERS += ("<|constrain|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call|>")
EOS = 256


@pytest.fixture(scope="module")
def tokenizer():
    spelled = {char: byte for byte, char in enumerate(byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=spelled, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in MARKERS])
    return Tokenizer(backend, TokenizerConfig({"eos_token": MARKERS[0]}, (), (), {}))


@pytest.fixture(scope="module")
def accepts(tokenizer):
    """Whether a text is an answer by the rules, as a whole: every token is allowed in its turn, and then the end is."""
    compiler = Compiler(tokenizer, tokenizer.vocab_size, {EOS})

    def check(rules, text, **otherwise):
        constraint = compiler.compiled(StructuredOutputs(calls=rules, **otherwise)).constraint()
        for token_id in (*tokenizer.encode(text, add_special_tokens=False), EOS):
            allowed = constraint.masks()
            assert any(allowed), constraint.failure
            if not allowed[token_id // 8] >> token_id % 8 & 1:
                return False
            if token_id != EOS:
                constraint.advance([token_id])
        return True

    return check


def rules(format, **fields):
    given = {"thoughts": None, "in_thought": False, "is_required": True, "is_single": False, **fields}
    tools = (ToolRule(name="get_weather", schema=SCHEMA), ToolRule(name="now", schema=None))
    return CallRules(**{"format": format, "tools": tools, **given})


def written(format, *calls):
    """Calls by name and arguments, as the format has them."""
    spelled = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    array = f"[{', '.join(spelled)}]"
    dsml = "｜DSML｜"
    ways = {
        "hermes": lambda: "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in spelled),
        "llama3_json": lambda: "; ".join(each.replace('"arguments"', '"parameters"') for each in spelled),
        "mistral": lambda: f"[TOOL_CALLS]{array}",
        "phi4_mini_json": lambda: f"functools{array}",
        "granite-20b-fc": lambda: "".join(f"<function_call>{each}" for each in spelled),
        "minimax": lambda: "<tool_calls>" + "".join(f"\n{each}\n" for each in spelled) + "</tool_calls>",
        "granite": lambda: f"<|tool_call|>{array}",
        "deepseek_v3": lambda: _section(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", calls
        ),
        "deepseek_v31": lambda: _section("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", calls),
        "kimi_k2": lambda: _kimi(calls),
        "pythonic": lambda: f"[{', '.join(f'{name}({_python(arguments)})' for name, arguments in calls)}]",
        "gemma4": lambda: "\n".join(
            f"<|tool_call>call:{name}{_gemma(json.loads(arguments))}<tool_call|>" for name, arguments in calls
        ),
        "openai": lambda: f"<|channel|>commentary to=functions.{calls[0][0]} <|constrain|>json<|message|>{calls[0][1]}",
        "qwen3_coder": lambda: _tagged(
            "",
            "<tool_call>\n<function=",
            ">",
            "<parameter={}>\n{}\n</parameter>",
            "</function>\n</tool_call>",
            "\n",
            calls,
        ),
        "glm45": lambda: _tagged(
            "", "<tool_call>", "", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>", "</tool_call>", "\n", calls
        ),
        "minimax_m2": lambda: (
            _tagged(
                "<minimax:tool_call>\n",
                '<invoke name="',
                '">',
                '<parameter name="{}">{}</parameter>',
                "</invoke>\n",
                "",
                calls,
            )
            + "</minimax:tool_call>"
        ),
        "deepseek_v32": lambda: (
            _tagged(
                f"<{dsml}function_calls>\n",
                f'<{dsml}invoke name="',
                '">',
                f'<{dsml}parameter name="{{}}" string="{{}}">{{}}</{dsml}parameter>',
                f"</{dsml}invoke>\n",
                "",
                calls,
            )
            + f"</{dsml}function_calls>"
        ),
    }
    return ways.get(format, lambda: array)()


def _python(arguments):
    """As keywords of a call in Python, whose strings are written with double quotes."""
    words = {True: "True", False: "False", None: "None"}
    spelled = {
        key: words[value] if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
        for key, value in json.loads(arguments).items()
    }
    return ", ".join(f"{key}={value}" for key, value in spelled.items())


def _gemma(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return json.dumps(value)


def _kimi(calls):
    each = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"


def _tagged(before, begin, after, tag, end, between, calls):
    """Calls whose arguments have tags."""
    made = []
    for name, arguments in calls:
        tags = ""
        for key, value in json.loads(arguments).items():
            text = value if isinstance(value, str) else json.dumps(value)
            kinds = [str(isinstance(value, str)).lower()] if tag.count("{}") == 3 else []
            tags += tag.format(key, *kinds, text) + "\n"
        made.append(f"{begin}{name}{after}\n{tags}{end}")
    return before + between.join(made)


def _section(begin, between, end, calls):
    each = "".join(f"{begin}{name}{between}{arguments}{end}" for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


ENFORCED = [*CALLS, *CHANNELS]
WITHOUT_MARKERS = ("llama3_json", "pythonic")
SEVERAL = [name for name in ENFORCED if name != "openai"]


@pytest.mark.parametrize("format", [*ENFORCED, None])
def test_a_required_call_is_one_by_its_schema_and_is_read_back(accepts, format):
    good = written(format, ("get_weather", GOOD))
    assert accepts(rules(format), good)
    assert not accepts(rules(format), written(format, ("get_weather", BAD)))
    assert not accepts(rules(format), written(format, ("get_time", "{}")))
    assert not accepts(rules(format), "Rome has weather.")
    assert not accepts(rules(format), "")
    if format is not None:
        [(name, arguments, _)] = parsed(format_named(format), good, schemas={"get_weather": SCHEMA})[2]
        assert (name, json.loads(arguments)) == ("get_weather", json.loads(GOOD))


@pytest.mark.parametrize("format", sorted({*ENFORCED} - {*WITHOUT_MARKERS}))
def test_an_answer_with_a_structure_or_a_call(accepts, format):
    """Catches a structure that bars the calls, a call that is free of its schema, and text that is neither."""
    thinks = {"thoughts": "think"} if format != "openai" else {}
    either, thoughtful = rules(format, is_required=False), rules(format, is_required=False, **thinks)
    answers = {"json": {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}}
    head = "<|channel|>final<|message|>" if format == "openai" else ""
    thought = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant" if format == "openai" else "<think>Hm</think>"
    for text in (f'{head}{{"sum": 5}}', written(format, ("get_weather", GOOD))):
        assert accepts(either, text, **answers)
        assert accepts(thoughtful, f"{thought}{text}", **answers)
    for text in (f'{head}{{"sum": "x"}}', f"{head}Rome", written(format, ("get_weather", BAD))):
        assert not accepts(either, text, **answers)
        assert not accepts(thoughtful, f"{thought}{text}", **answers)


@pytest.mark.parametrize("format", WITHOUT_MARKERS)
def test_a_structure_that_a_call_cannot_be_told_from_is_that_of_all_answers(accepts, format):
    """The lexer cannot go back: with calls beside them, answers that begin as calls do would be barred."""
    answers = {"json": {"anyOf": [{"type": "array"}, {"type": "object", "additionalProperties": {"type": "integer"}}]}}
    for text in ('{"sum": 5}', "[5]", '["get_weather"]'):
        assert accepts(rules(format, is_required=False), text, **answers)
    assert not accepts(rules(format, is_required=False), written(format, ("get_weather", GOOD)), **answers)


@pytest.mark.parametrize("format", [*SEVERAL, None])
def test_several_calls_unless_one_is_asked_for(accepts, format):
    both = written(format, ("get_weather", GOOD), ("now", '{"zone": 1}'))
    assert accepts(rules(format), both)
    assert not accepts(rules(format, is_single=True), both)
    assert accepts(rules(format, is_single=True), written(format, ("now", "{}")))


@pytest.mark.parametrize("format", ENFORCED)
def test_a_call_that_need_not_be_made_is_by_its_schema_once_begun(accepts, format):
    free = rules(format, is_required=False)
    text = "<|channel|>final<|message|>It is {fine}." if format == "openai" else "It is {fine}."
    assert accepts(free, text)
    before = "" if format in ("openai", "llama3_json", "pythonic") else "Look: "
    assert accepts(free, before + written(format, ("get_weather", GOOD)))
    assert not accepts(free, before + written(format, ("get_weather", BAD)))
    assert not accepts(free, before + written(format, ("get_time", "{}")))


@pytest.mark.parametrize("is_required", [True, False])
def test_thoughts_are_free_until_their_end(accepts, is_required):
    hermes = rules("hermes", thoughts="think", is_required=is_required)
    call = written("hermes", ("get_weather", GOOD))
    thought = "Shall I <tool_call> or {not}?\n"
    assert accepts(hermes, f"<think>\n{thought}</think>\n\n{call}")
    assert accepts(hermes, call)
    assert accepts(
        rules("hermes", thoughts="think", in_thought=True, is_required=is_required), f"{thought}</think>{call}"
    )
    assert not accepts(hermes, f"<think>{thought}</think>{written('hermes', ('get_weather', BAD))}")
    channel = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    openai = rules("openai", thoughts="openai", is_required=is_required)
    assert accepts(openai, channel + written("openai", ("get_weather", GOOD)))


def test_what_cannot_be_enforced_is_refused_with_its_place(accepts):
    tools = (ToolRule(name="f", schema={"type": "object", "properties": {"a": {"not": {}}}}),)
    with pytest.raises(InvalidRequestError, match=r"of the tool f: .*#/properties/a/not"):
        accepts(rules("hermes", tools=tools), "")
    tools = (ToolRule(name="f", schema={"type": "object", "properties": {"a": {"type": "string", "pattern": "b"}}}),)
    with pytest.raises(InvalidRequestError, match=r"of the tool f: #/properties/a: pattern cannot be enforced here"):
        accepts(rules("gemma4", tools=tools), "")


TAGGED = {
    "name": "f",
    "schema": {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["C", "F"]},
            "note": {"type": ["string", "null"], "maxLength": 3},
            "at": {"$ref": "#/$defs/hour"},
            "any": True,
        },
        "required": ["unit", "at"],
        "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
    },
}


@pytest.mark.parametrize(
    ("arguments", "is_good"),
    [
        ({"unit": "C", "at": 5}, True),
        ({"unit": "C", "note": "abc", "at": 5, "any": [1]}, True),
        ({"unit": "K", "at": 5}, False),
        ({"unit": "C", "at": 24}, False),
        ({"unit": "C", "note": "abcd", "at": 5}, False),
        ({"at": 5}, False),
        ({"unit": "C", "at": 5, "more": 1}, False),
    ],
)
def test_arguments_with_tags_are_by_their_schema(accepts, arguments, is_good):
    text = written("qwen3_coder", ("f", json.dumps(arguments)))
    tools = (ToolRule(**TAGGED),)
    assert accepts(rules("qwen3_coder", tools=tools), text) == is_good
    assert accepts(rules("qwen3_coder", tools=tools, is_required=False), text) == is_good
    if is_good:
        [(_, said, _)] = parsed(format_named("qwen3_coder"), text, schemas={"f": TAGGED["schema"]})[2]
        assert json.loads(said) == arguments


@pytest.mark.parametrize("value", [{"type": "string", "pattern": "a"}, False])
def test_what_cannot_be_written_in_a_tag_is_refused(accepts, value):
    tools = (ToolRule(name="f", schema={"type": "object", "properties": {"a": value}}),)
    with pytest.raises(InvalidRequestError, match="#/properties/a"):
        accepts(rules("glm45", tools=tools), "")


BARE = {
    "name": "f",
    "schema": {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["C", "F"]},
            "note": {"type": ["string", "null"], "maxLength": 3},
            "at": {"$ref": "#/$defs/hour"},
            "far": {"type": "boolean"},
            "tree": {"$ref": "#/$defs/tree"},
            "list": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"const": "x"}]}, "maxItems": 2},
            "any": True,
        },
        "required": ["unit", "at"],
        "$defs": {
            "hour": {"type": "integer", "minimum": 0, "maximum": 23},
            "tree": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "child": {"$ref": "#/$defs/tree"}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
    },
}


@pytest.mark.parametrize("format", ["pythonic", "gemma4"])
@pytest.mark.parametrize(
    ("arguments", "is_good"),
    [
        ({"unit": "C", "at": 5}, True),
        ({"unit": "C", "note": "abc", "at": 5, "any": [1, "b c", {"d": None, "e": {}}, []]}, True),
        ({"unit": "C", "note": None, "at": 5}, True),
        ({"unit": "C", "at": 5, "far": True}, True),
        ({"unit": "C", "at": 5, "tree": {"name": "a, b", "child": {"name": "{c:d}"}}}, True),
        ({"unit": "C", "at": 5, "list": [7, "x"]}, True),
        ({"unit": "C", "at": 5, "list": []}, True),
        ({"unit": "C", "at": 5, "any": 'é "} ]'}, True),
        ({"unit": "K", "at": 5}, False),
        ({"unit": "C", "at": 24}, False),
        ({"unit": "C", "note": "abcd", "at": 5}, False),
        ({"at": 5}, False),
        ({"unit": "C"}, False),
        ({}, False),
        ({"unit": "C", "at": 5, "more": 1}, False),
        ({"unit": "C", "at": 5, "far": 1}, False),
        ({"unit": "C", "at": 5, "tree": {"child": {"name": "c"}}}, False),
        ({"unit": "C", "at": 5, "tree": {"name": "a", "more": 1}}, False),
        ({"unit": "C", "at": 5, "list": [7, 8, 9]}, False),
        ({"unit": "C", "at": 5, "list": ["y"]}, False),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_arguments_as_programs_write_them_are_by_their_schema(accepts, format, arguments, is_good):
    """Fault: a value that the schema does not allow, or one that is read back as another."""
    text = written(format, ("f", json.dumps(arguments)))
    tools = (ToolRule(**BARE),)
    assert accepts(rules(format, tools=tools), text) == is_good
    assert accepts(rules(format, tools=tools, is_required=False), text) == is_good
    if is_good:
        [(_, said, _)] = parsed(format_named(format), text, schemas={"f": BARE["schema"]})[2]
        assert json.loads(said) == arguments


@pytest.mark.parametrize("format", ["pythonic", "gemma4"])
def test_a_tool_without_parameters_takes_none(accepts, format):
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = (ToolRule(name="f", schema=schema), ToolRule(name="g"))
    assert accepts(rules(format, tools=tools), written(format, ("f", "{}")))
    assert not accepts(rules(format, tools=tools), written(format, ("f", '{"a": 1}')))
    assert accepts(rules(format, tools=tools), written(format, ("g", '{"a": 1, "b": "c"}')))
    assert accepts(rules(format, tools=tools), written(format, ("g", "{}")))


MANY = {"type": "object", "properties": {f"b{i}": {"type": "null"} for i in range(201)}}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"a b": {}}, "#/properties/a b cannot be written"),
        ({"a": False}, "#/properties/a cannot be written"),
        ({"a": {"enum": [{}]}}, "an enum of objects"),
        ({"a": {"minimum": 1}}, "#/properties/a: None cannot be enforced"),
        ({"a": {"enum": ['<|"|>']}}, "cannot be written here"),
        ({"a": {"type": "array", "items": {"allOf": [{}]}}}, "#/properties/a/items"),
        ({f"a{i}": {"type": "string"} for i in range(601)}, "#/properties: a tool may have at most 600"),
        ({f"a{i}": {"type": "string"} for i in range(400)} | {"a": MANY}, "#/properties/a/properties: a tool may"),
    ],
)
def test_what_cannot_be_written_as_gemma_does_is_refused(accepts, schema, told):
    tools = (ToolRule(name="f", schema={"type": "object", "properties": schema}),)
    with pytest.raises(InvalidRequestError, match=told):
        accepts(rules("gemma4", tools=tools), "")
