"""The formats of model families, by the names that vLLM gives them. A new family is an entry here.

    CALLS       how calls are written           THOUGHTS    how thoughts are

An example of each is in tests/text/formats/examples.py.
"""

from collections.abc import Mapping
from typing import Final

from aserve.text.formats.bare import BareArguments
from aserve.text.formats.parts import CallId, JsonArguments, JsonCall, Literal, Name, Part, TaggedArguments
from aserve.text.formats.syntax import Calls, Channels, Thoughts

_PYTHON: Final = (Name(follows="(", only_known=True), BareArguments("(", ('"', "'"), has_escapes=True))
_QWEN_FUNCTION: Final = (
    Name(follows=">"),
    Literal(">"),
    TaggedArguments("<parameter=", ">", "</parameter>", around="\n"),
    Literal("</function>", after="\n"),
)
_DSML: Final = "｜DSML｜"


def _list(*begins: str) -> Calls:
    """A JSON array of calls."""
    return Calls(begins=begins, opens="[", call=(JsonCall(),), separator=",", ends=("]",))


def _deepseek(*call: Part) -> Calls:
    """Between DeepSeek's markers of a call."""
    begin, end = Literal("<｜tool▁call▁begin｜>"), Literal("<｜tool▁call▁end｜>")
    return Calls(
        begins=("<｜tool▁calls▁begin｜>",), call=(begin, *call, end), separator="", ends=("<｜tool▁calls▁end｜>",)
    )


CALLS: Final[Mapping[str, tuple[Calls, ...]]] = {
    "hermes": (Calls(begins=("<tool_call>",), call=(JsonCall(around="\n"),), ends=("</tool_call>",)),),
    "qwen3_coder": (
        Calls(begins=("<tool_call>",), line="\n", opens="<function=", call=_QWEN_FUNCTION, ends=("</tool_call>",)),
        Calls(begins=("<function=",), call=_QWEN_FUNCTION, ends=("</tool_call>",)),
    ),
    "llama3_json": (
        Calls(begins=("",), call=(JsonCall(only_known=True, arguments_key="parameters"),), separator=";"),
        Calls(begins=("<|python_tag|>",), call=(JsonCall(),), separator=";"),
    ),
    "pythonic": (
        Calls(begins=("<|python_start|>", ""), opens="[", call=_PYTHON, separator=",", ends=("]", "<|python_end|>")),
    ),
    "mistral": (
        _list("[TOOL_CALLS]"),
        Calls(
            begins=("[TOOL_CALLS]",),
            call=(
                Name(follows="[{"),
                CallId("[CALL_ID]", follows="[{"),
                Literal("[ARGS]", is_optional=True),
                JsonArguments(),
            ),
        ),
    ),
    "deepseek_v3": (
        _deepseek(
            Literal("function"),
            Literal("<｜tool▁sep｜>"),
            Name(follows="\n"),
            Literal("```json", before="\n", after="\n"),
            JsonArguments(),
            Literal("```", before="\n"),
        ),
    ),
    "deepseek_v31": (_deepseek(Name(follows="<"), Literal("<｜tool▁sep｜>"), JsonArguments()),),
    "deepseek_v32": (
        Calls(
            begins=(f"<{_DSML}function_calls>",),
            call=(
                Literal(f'<{_DSML}invoke name="'),
                Name(follows='"'),
                Literal('">'),
                TaggedArguments(f'<{_DSML}parameter name="', '" string="', f"</{_DSML}parameter>", has_types=True),
                Literal(f"</{_DSML}invoke>", after="\n"),
            ),
            line="\n",
            separator="",
            ends=(f"</{_DSML}function_calls>",),
        ),
    ),
    "glm45": (
        Calls(
            begins=("<tool_call>",),
            call=(Name(follows="\n<"), TaggedArguments("<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>")),
            ends=("</tool_call>",),
        ),
    ),
    "kimi_k2": (
        Calls(
            begins=("<|tool_calls_section_begin|>",),
            call=(
                Literal("<|tool_call_begin|>"),
                Name(follows="<", prefix="functions.", has_id=True),
                Literal("<|tool_call_argument_begin|>"),
                JsonArguments(),
                Literal("<|tool_call_end|>"),
            ),
            separator="",
            ends=("<|tool_calls_section_end|>",),
        ),
    ),
    "gemma4": (
        Calls(
            begins=("<|tool_call>",),
            call=(Literal("call:"), Name(follows="{"), BareArguments("{", ('<|"|>',))),
            ends=("<tool_call|>",),
        ),
    ),
    "minimax_m2": (
        Calls(
            begins=("<minimax:tool_call>",),
            call=(
                Literal('<invoke name="'),
                Name(follows='"'),
                Literal('">'),
                TaggedArguments('<parameter name="', '">', "</parameter>"),
                Literal("</invoke>", after="\n"),
            ),
            line="\n",
            separator="",
            ends=("</minimax:tool_call>",),
        ),
    ),
    "minimax": (Calls(begins=("<tool_calls>",), call=(JsonCall(around="\n"),), separator="", ends=("</tool_calls>",)),),
    "phi4_mini_json": (_list("functools", "<|tool_calls|>", "<|tool_call|>"),),
    "granite": (
        _list("<|tool_call|>", "<tool_call>"),
        Calls(begins=("<tool_call>",), call=(JsonCall(),), ends=("</tool_call>",)),
    ),
    "granite-20b-fc": (Calls(begins=("<function_call>",), call=(JsonCall(),)),),
}

THOUGHTS: Final[Mapping[str, Thoughts]] = {
    "think": Thoughts("<think>", "</think>"),
    "mistral": Thoughts("[THINK]", "[/THINK]"),
    "gemma4": Thoughts("<|channel>thought", "<channel|>"),
    "minimax_m3": Thoughts("<mm:think>", "</mm:think>"),
}

HARMONY: Final = Channels(
    start="<|start|>",
    channel="<|channel|>",
    constrain="<|constrain|>",
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    names=("analysis", "commentary", "final"),
    thoughts="analysis",
    words=("assistant", "json", "code"),
    prefix="functions.",
)
BARE: Final = (Calls(begins=("",), opens="[", call=(JsonCall(only_known=True),), separator=",", ends=("]",)),)
"""For models whose own format of calls is not known."""
CHANNELS: Final[Mapping[str, Channels]] = {"openai": HARMONY}
"""Formats of calls and thoughts in one."""
