"""Which format a model's answers have: by name, or by what its chat template says that they look like.

--tool-call-parser, --reasoning-parser: a name, or its alias    none: nothing is looked for
auto: the first row of TRACES all of whose texts are in the template, or by the architecture where none is
"""

from collections.abc import Mapping
from typing import Final, Protocol

from aserve.core.errors import ConfigError
from aserve.core.rules import shown
from aserve.text.formats.families import BARE, CALLS, CHANNELS, THOUGHTS
from aserve.text.formats.named import calls_named, thoughts_named
from aserve.text.formats.syntax import AnswerFormat, Calls, Thoughts

AUTO: Final = "auto"
NONE: Final = "none"
CALL_TRACES: Final = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("deepseek_v32", ("DSML",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("minimax_m2", ("minimax:tool_call",)),
    ("minimax", ("<tool_calls>",)),
    ("gemma4", ("<|tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_mini_json", ("functools",)),
    ("phi4_mini_json", ("<|tool_calls|>",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("granite-20b-fc", ("<function_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("ipython", '"parameters"')),
)
THOUGHT_TRACES: Final = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("minimax_m3", ("<mm:think>",)),
    ("gemma4", ("<|channel>",)),
    ("mistral", ("[THINK]",)),
    ("think", ("<think>",)),
    ("think", ("</think>",)),
)
ARCHITECTURES: Final[Mapping[str, tuple[str, str | None]]] = {
    "GptOssForCausalLM": ("openai", "openai"),
    "DeepseekV32ForCausalLM": ("deepseek_v32", "think"),
    "Llama4ForConditionalGeneration": ("pythonic", None),
    "Phi3ForCausalLM": ("phi4_mini_json", None),
}
"""Calls and thoughts of models whose template does not tell."""
ALIASES: Final[Mapping[str, str]] = {
    "qwen3_xml": "qwen3_coder",
    "llama3_pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "llama4_json": "llama3_json",
    "glm47": "glm45",
}
"""Names that vLLM has for what is the same here."""
THOUGHT_ALIASES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "hermes"), "think"),
    "openai_gptoss": "openai",
}
CALL_NAMES: Final = (AUTO, NONE, *CALLS, *CHANNELS, *ALIASES)
THOUGHT_NAMES: Final = (AUTO, NONE, *THOUGHTS, *CHANNELS, *THOUGHT_ALIASES)


class Formats(Protocol):
    """The formats that were chosen for a model, by name. None is that nothing is looked for."""

    @property
    def call_format(self) -> str | None:
        """Of calls."""
        ...

    @property
    def thought_format(self) -> str | None:
        """Of thoughts."""
        ...


def choose_calls(wish: str, template: str, architecture: str | None, own: str | None = None) -> str | None:
    """The name of a format of calls. wish: one of CALL_NAMES. template: the source of the chat templates.

    own: what the checkpoint declares (`own_formats`), which counts before what its template looks like.
    Raises `ConfigError` for another.
    """
    check_names(calls=wish)
    if wish != AUTO:
        return None if wish == NONE else ALIASES.get(wish, wish)
    return own or _traced(CALL_TRACES, template) or ARCHITECTURES.get(architecture or "", (None, None))[0]


def choose_thoughts(wish: str, template: str, architecture: str | None, own: str | None = None) -> str | None:
    """The name of a format of thoughts. wish: one of THOUGHT_NAMES. own: as for calls. Raises as `choose_calls`."""
    check_names(thoughts=wish)
    if wish != AUTO:
        return None if wish == NONE else THOUGHT_ALIASES.get(wish, wish)
    return own or _traced(THOUGHT_TRACES, template) or ARCHITECTURES.get(architecture or "", (None, None))[1]


def check_names(*, calls: str = AUTO, thoughts: str = AUTO) -> None:
    """Raise `ConfigError` for a wish that is neither a format's name nor an alias."""
    _check("tool_call_parser", calls, CALL_NAMES)
    _check("reasoning_parser", thoughts, THOUGHT_NAMES)


def _check(option: str, wish: str, names: tuple[str, ...]) -> None:
    if wish not in names:
        raise ConfigError(f"{option} must be one of {', '.join(names)}, got {shown(wish)}")


def _traced(traces: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str | None:
    return next((name for name, texts in traces if all(text in template for text in texts)), None)


def thought_markers(chosen: Formats) -> Thoughts | None:
    """Between what thoughts stand; None where none are known."""
    channels = CHANNELS.get(chosen.thought_format or "")
    if channels is not None:
        return Thoughts(channels.channel + channels.thoughts + channels.message, channels.ends[0])
    return thoughts_named(chosen.thought_format)


def answer_format(chosen: Formats, *, with_calls: bool, is_bare: bool = False) -> AnswerFormat | None:
    """How answers are read; None where there is nothing to look for.

    with_calls: tools may be called. is_bare: and have to be, as a JSON array of calls, whatever the model's format.
    """
    channels = CHANNELS.get(chosen.call_format or "") or CHANNELS.get(chosen.thought_format or "")
    if channels is not None and not is_bare:
        return AnswerFormat(channels=channels)
    thoughts = thoughts_named(chosen.thought_format)
    calls: tuple[Calls, ...] = ()
    if with_calls:
        calls = BARE if is_bare else calls_named(chosen.call_format)
    return AnswerFormat(thoughts=thoughts, calls=calls) if thoughts or calls else None
