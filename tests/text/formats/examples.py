"""An answer of each family, as its chat template or its maker's documentation writes it, and what it says.

Each has content or thoughts where the family puts them, and two calls: of `get_weather` with a string that has every
kind of character, a number and a nested value, and of `now`, without arguments where the family can say that.
"""

from dataclasses import dataclass, field

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
}
CITY = 'São "Tomé"\n<b>\\ {}'
ARGUMENTS = {"city": CITY, "days": 3, "at": {"hours": [6, 18.5], "dst": True, "zone": None}}
JSON = '{"city": "São \\"Tomé\\"\\n<b>\\\\ {}", "days": 3, "at": {"hours": [6, 18.5], "dst": true, "zone": null}}'
AT = '{"hours": [6, 18.5], "dst": true, "zone": null}'


@dataclass(frozen=True)
class Example:
    """calls: a name of CALLS or CHANNELS. thoughts: a name of THOUGHTS. says: reasoning, content, calls by name."""

    calls: str
    text: str
    thoughts: str | None = None
    content: str = ""
    reasoning: str = ""
    says: list = field(default_factory=lambda: [("get_weather", ARGUMENTS), ("now", {})])
    ids: tuple = (None, None)


def qwen(*, wrapped: bool) -> str:
    before, after = ("<tool_call>\n", "\n</tool_call>") if wrapped else ("", "")
    return (
        f"{before}<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        f"<parameter=at>\n{AT}\n</parameter>\n</function>{after}\n{before}<function=now>\n</function>{after}"
    )


def tagged(open_tags: str, key: str, string: str, close_key: str, between: str, close_tags: str) -> str:
    other = string.replace("true", "false")
    values = ((CITY, string), (3, other), (AT, other))
    keys = ("city", "days", "at")
    arguments = "\n".join(
        f"{key}{name}{kind}{value}{close_key}" for name, (value, kind) in zip(keys, values, strict=True)
    )
    return open_tags + arguments + between + close_tags


THINK = "<think>\nFirst <b>\n\nthen\n</think>\n\n"
THOUGHT = "First <b>\n\nthen"
DSML = "｜DSML｜"

EXAMPLES = {
    "hermes": Example(
        "hermes",
        f'{THINK}Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        thoughts="think",
        content="Let me see.\n",
        reasoning=THOUGHT,
    ),
    "qwen3_coder": Example("qwen3_coder", "Now:\n\n" + qwen(wrapped=True), content="Now:\n\n"),
    "qwen3_coder bare": Example("qwen3_coder", qwen(wrapped=False)),
    "llama3_json": Example(
        "llama3_json", f'{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}'
    ),
    "llama3_json tagged": Example(
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {JSON}}};{{"name": "now"}}',
    ),
    "pythonic": Example(
        "pythonic",
        "[get_weather(city='São \"Tomé\"\\n<b>\\\\ {}', days=3, "
        "at={'hours': [6, 18.5], 'dst': True, 'zone': None}), now()]",
    ),
    "mistral": Example(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}, "id": "abcdef123"}}, '
        '{"name": "now", "arguments": {}}]',
        ids=(None, None),
    ),
    "mistral named": Example(
        "mistral",
        f"[THINK]First <b>\n\nthen[/THINK]Hm[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]now[CALL_ID]xyz[ARGS]{{}}",
        thoughts="mistral",
        content="Hm",
        reasoning=THOUGHT,
        ids=(None, "xyz"),
    ),
    "deepseek_v3": Example(
        "deepseek_v3",
        f"{THINK}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{JSON}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        thoughts="think",
        reasoning=THOUGHT,
    ),
    "deepseek_v31": Example(
        "deepseek_v31",
        f"Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content="Look.",
    ),
    "deepseek_v32": Example(
        "deepseek_v32",
        tagged(
            f'<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n',
            f'<{DSML}parameter name="',
            '" string="true">',
            f"</{DSML}parameter>",
            f"\n</{DSML}invoke>\n",
            f'<{DSML}invoke name="now">\n</{DSML}invoke>\n</{DSML}function_calls>',
        ),
    ),
    "glm45": Example(
        "glm45",
        THINK
        + tagged(
            "<tool_call>get_weather\n",
            "<arg_key>",
            "</arg_key>\n<arg_value>",
            "</arg_value>",
            "\n</tool_call>",
            "<tool_call>now\n</tool_call>",
        ),
        thoughts="think",
        reasoning=THOUGHT,
    ),
    "kimi_k2": Example(
        "kimi_k2",
        "So<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        content="So",
        ids=("functions.get_weather:0", "functions.now:1"),
    ),
    "gemma4": Example(
        "gemma4",
        '<|channel>thought\nFirst <b>\n\nthen\n<channel|><|tool_call>call:get_weather{city:<|"|>'
        f'{CITY}<|"|>,days:3,at:{{hours:[6,18.5],dst:true,zone:null}}}}<tool_call|><|tool_call>call:now{{}}<tool_call|>',
        thoughts="gemma4",
        reasoning=THOUGHT,
    ),
    "minimax_m2": Example(
        "minimax_m2",
        THINK
        + tagged(
            '<minimax:tool_call>\n<invoke name="get_weather">\n',
            '<parameter name="',
            '">',
            "</parameter>",
            "\n</invoke>\n",
            '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        ),
        thoughts="think",
        reasoning=THOUGHT,
    ),
    "minimax": Example(
        "minimax",
        THINK + f'<tool_calls>\n{{"name": "get_weather", "arguments": {JSON}}}\n{{"name": "now", "arguments": {{}}}}\n'
        "</tool_calls>",
        thoughts="think",
        reasoning=THOUGHT,
    ),
    "granite-20b-fc": Example(
        "granite-20b-fc",
        f'<function_call> {{"name": "get_weather", "arguments": {JSON}}}'
        '<function_call> {"name": "now", "arguments": {}}',
    ),
    "phi4_mini_json": Example(
        "phi4_mini_json",
        f'functools[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "granite": Example(
        "granite",
        f'<|tool_call|>[{{"arguments": {JSON}, "name": "get_weather"}}, {{"name": "now", "arguments": "{{}}"}}]',
    ),
    "openai": Example(
        "openai",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{JSON}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>",
        content="Wait.",
        reasoning=THOUGHT,
    ),
    "openai recipient first": Example(
        "openai",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{JSON}<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.now<|message|>{}",
    ),
}
