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
from aserve.text.formats.choice import can_enforce
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
GOOD, BAD = '{"city": "Rome", "days": 3}', '{"city": "Rome", "days": "3"}'
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

    def check(rules, text):
        constraint = compiler.compiled(StructuredOutputs(calls=rules)).constraint()
        for token_id in (*tokenizer.encode(text, add_special_tokens=False), EOS):
            allowed = constraint.mask()
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
    match format:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in spelled)
        case "llama3_json":
            return "; ".join(each.replace('"arguments"', '"parameters"') for each in spelled)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(spelled)}]"
        case "phi4_mini_json":
            return f"functools[{', '.join(spelled)}]"
        case "granite":
            return f"<|tool_call|>[{', '.join(spelled)}]"
        case "deepseek_v3":
            begin, end = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"
            return _section(begin, "\n```json\n", end, calls)
        case "deepseek_v31":
            return _section("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", calls)
        case "kimi_k2":
            each = "".join(
                f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
                for index, (name, arguments) in enumerate(calls)
            )
            return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"
        case "openai":
            [(name, arguments)] = calls
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
        case _:
            return f"[{', '.join(spelled)}]"


def _section(begin, between, end, calls):
    each = "".join(f"{begin}{name}{between}{arguments}{end}" for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


ENFORCED = [name for name in (*CALLS, *CHANNELS) if can_enforce(name)]
SEVERAL = [name for name in ENFORCED if name != "openai"]


def test_what_is_enforced_is_what_has_json_for_arguments():
    tagged = {"qwen3_coder", "pythonic", "deepseek_v32", "glm45", "gemma4", "minimax_m2"}
    assert set(ENFORCED) == {*CALLS, *CHANNELS} - tagged


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
    before = "" if format in ("openai", "llama3_json") else "Look: "
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
    with pytest.raises(InvalidRequestError, match="cannot be enforced in the format glm45"):
        accepts(rules("glm45"), "")
