"""Which format a model's answers have: told by its template, its architecture or a name."""

import pytest

from aserve.core.config import ModelInfo
from aserve.core.errors import ConfigError
from aserve.text.formats.choice import (
    CALL_NAMES,
    THOUGHT_NAMES,
    answer_format,
    choose_calls,
    choose_thoughts,
)
from aserve.text.formats.families import BARE, CALLS, CHANNELS, HARMONY, THOUGHTS
from aserve.text.formats.parser import parser_of
from tests.text.formats.examples import EXAMPLES


def chosen(calls, thoughts):
    return ModelInfo(
        names=("m",),
        root="m",
        vocab_size=1,
        max_model_len=1,
        eos_ids=frozenset(),
        created_s=0,
        call_format=calls,
        thought_format=thoughts,
    )


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if not name.startswith("llama3_json") and name != "pythonic"]
)
def test_a_template_that_writes_calls_as_a_family_does_is_of_that_family(name):
    """A template has in it what it writes: here, for want of templates, an answer of the family."""
    example = EXAMPLES[name]
    assert choose_calls("auto", example.text, None) == example.calls
    if example.thoughts or example.calls in CHANNELS:
        assert choose_thoughts("auto", example.text, None) == (example.thoughts or example.calls)


@pytest.mark.parametrize(
    ("template", "architecture", "calls", "thoughts"),
    [
        ("{{ messages }}", None, None, None),
        ("{{ messages }}", "LlamaForCausalLM", None, None),
        ("{{ messages }}", "DeepseekV32ForCausalLM", "deepseek_v32", "think"),
        ("Environment: ipython {'name': 'f', \"parameters\": {}}", "LlamaForCausalLM", "llama3_json", None),
        ("<tool_call>", "DeepseekV32ForCausalLM", "hermes", "think"),
        ("{% if '</think>' in content %}", None, None, "think"),
        ("<|python_start|>", None, "pythonic", None),
    ],
)
def test_the_template_tells_or_else_the_architecture(template, architecture, calls, thoughts):
    assert choose_calls("auto", template, architecture) == calls
    assert choose_thoughts("auto", template, architecture) == thoughts


def test_a_name_wins_and_none_is_none():
    assert choose_calls("mistral", "<tool_call>", None) == "mistral"
    assert choose_calls("none", "<tool_call>", None) is None
    assert choose_thoughts("none", "<think>", None) is None
    assert choose_thoughts("deepseek_r1", "", None) == "think"
    with pytest.raises(ConfigError, match=r"tool_call_parser must be one of auto, none, hermes.*, got 'hermse'"):
        choose_calls("hermse", "", None)
    with pytest.raises(ConfigError, match="reasoning_parser must be one of"):
        choose_thoughts("qwen", "", None)


def test_every_name_leads_to_a_format():
    for name in CALL_NAMES[2:]:
        calls = choose_calls(name, "", None)
        assert calls in {*CALLS, *CHANNELS}
        format = answer_format(chosen(calls, None), with_calls=True)
        assert [event.text for event in parser_of(format, {}).feed("a b")] == ["a b"]
    for name in THOUGHT_NAMES[2:]:
        thoughts = choose_thoughts(name, "", None)
        assert answer_format(chosen(None, thoughts), with_calls=False) is not None


def test_what_is_looked_for():
    assert answer_format(chosen(None, None), with_calls=True) is None
    assert answer_format(chosen("hermes", None), with_calls=False) is None
    assert answer_format(chosen("hermes", "think"), with_calls=False).calls == ()
    assert answer_format(chosen("hermes", "think"), with_calls=True).thoughts is THOUGHTS["think"]
    assert answer_format(chosen("gemma4", None), with_calls=True, is_bare=True).calls == BARE
    assert answer_format(chosen("openai", "think"), with_calls=False).channels is HARMONY
