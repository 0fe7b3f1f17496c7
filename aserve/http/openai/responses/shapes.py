"""What a request of POST /v1/responses may say, and what it asks of the engine: tools, structure, sampling."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.core.params import ALL_TOKENS, SamplingParams
from aserve.core.rules import MAX_INT
from aserve.core.structured import StructuredOutputs
from aserve.engine import Engine
from aserve.http.errors import echo
from aserve.http.explaining import check_extension
from aserve.http.openai.fields import check_names
from aserve.http.openai.logprobs import check_logprobs
from aserve.http.openai.schema import SamplingFields
from aserve.http.openai.structured import StructuredFields
from aserve.http.openai.tools import Effort, Verbosity
from aserve.http.shapes import ModelName, PositiveInt, converted
from aserve.http.tool_use import MAX_TOOLS, Tool, ToolName, ToolUse, check_tools, named_tools

MAX_ITEMS: Final = 4096
"""Of an input."""
MAX_RESPONSE_ID_CHARS: Final = 128

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # of hosted tools, of which there are none
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
ShortText = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(max_length=64)]

REFUSED: Final[Mapping[str, str]] = {
    "conversation": "send the history as input, or name a response by previous_response_id",
    "prompt": "send the prompt itself as instructions and input",
    "context_management": "responses are not compacted; truncation is",
    "moderation": "nothing is moderated",
    "image": "only text is taken",
    "access_programs": "there are none",
}
"""Fields of OpenAI's that do not work here, with what there is instead. Null asks for nothing."""


class FunctionTool(Tool, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """tools[] of the type function."""

    allowed_callers: None = None
    defer_loading: None = None
    output_schema: None = None


class NamespaceTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="namespace"):
    """tools[] of the type namespace: functions that are called by its name and their own, as Codex has them."""

    name: ToolName
    tools: Annotated[list[FunctionTool], Meta(min_length=1, max_length=MAX_TOOLS)]
    description: str | None = None


def flat_name(namespace: str | None, name: str) -> str:
    """What the model is told that a function is called."""
    return name if namespace is None else f"{namespace}__{name}"


class ChosenTool(msgspec.Struct, frozen=True, kw_only=True):
    """tool_choice.tools[]."""

    type: Literal["function"]
    name: ToolName


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """tool_choice, as an object: one tool that has to be called, by name, or several that may be."""

    type: Literal["function", "allowed_tools"]
    name: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """text.format. schema is enforced in full, whether strict or not; name and description have no effect."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextFields(msgspec.Struct, frozen=True, kw_only=True):
    """text. verbosity: for chat templates that read it."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningFields(msgspec.Struct, frozen=True, kw_only=True):
    """reasoning. effort: for chat templates that read it. Thoughts are told as they are: nothing sums them up."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """stream_options, which has no effect: nothing is obfuscated."""

    include_obfuscation: bool | None = None


class ResponseFields(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/responses. None is OpenAI's default, or as the model's generation_config.json says."""

    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)]
    model: ModelName | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=MAX_RESPONSE_ID_CHARS)] | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: StreamOptions | None = None
    include: Annotated[list[Includable], Meta(max_length=16)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[Name, ShortText], Meta(max_length=16)] | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    client_metadata: dict[str, str] | None = None
    tools: Annotated[list[FunctionTool | NamespaceTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: PositiveInt | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    max_output_tokens: PositiveInt | None = None
    top_logprobs: Annotated[int, Meta(ge=ALL_TOKENS, le=MAX_INT)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the response can be asked for later, as it can unless the request says otherwise."""
        return self.store is not False

    @property
    def with_logprobs(self) -> bool:
        """Whether output_text has them."""
        return LOGPROBS in (self.include or ())

    @property
    def functions(self) -> list[tuple[str | None, Tool]]:
        """The tools that there are, each with its namespace."""
        found: list[tuple[str | None, Tool]] = []
        for tool in self.tools or ():
            if isinstance(tool, NamespaceTool):
                found += [(tool.name, function) for function in tool.tools]
            else:
                found.append((None, tool))
        return found

    @property
    def effort(self) -> Effort | None:
        """Of reasoning."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def structures(self) -> dict[str, Any]:
        """What may ask for a structure of the answer, by name."""
        return {"structured_outputs": self.structured_outputs, "text": self.text, "tools": self.tools}


_AS_GIVEN: Final = tuple(name for name in ResponseFields.__struct_fields__ if name in SamplingParams.__struct_fields__)
"""Fields that `SamplingParams` has under the same name, and takes as they are."""


def parse_response(raw: dict[str, Any]) -> ResponseFields:
    """The fields of a request. Raises `InvalidRequestError` naming the one that is wrong, unknown or not supported."""
    for name, instead in REFUSED.items():
        if raw.get(name) is not None:
            raise InvalidRequestError(f"{name} is not supported: {instead}", name)
    _check_kinds(raw)
    fields = converted(raw, ResponseFields)
    check_names(raw, (*ResponseFields.__struct_fields__, *REFUSED))
    _check_parts(raw)
    check_extension(raw, fields.x_aserve)
    if fields.top_logprobs and not fields.with_logprobs:
        raise InvalidRequestError(f"top_logprobs needs logprobs: include {LOGPROBS}", "top_logprobs")
    if fields.background and not fields.is_stored:
        raise InvalidRequestError("background needs store: nobody could ask for the response", "background")
    return fields


FUNCTION_NAMES: Final = ("type", *FunctionTool.__struct_fields__)
NAMESPACE_NAMES: Final = ("type", *NamespaceTool.__struct_fields__)


def _check_kinds(raw: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for tools that OpenAI runs, or a choice of one, by what they are called."""
    tools = raw.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("function", "namespace"):
            raise InvalidRequestError(
                f"tools[{index}]: the type {echo(kind)} is not supported; tools are functions that the client calls",
                "tools",
            )


def _check_parts(raw: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for an unknown name within a field."""
    kinds = {
        "text": TextFields,
        "reasoning": ReasoningFields,
        "stream_options": StreamOptions,
        "structured_outputs": StructuredFields,
    }
    for field, kind in kinds.items():
        if (given := raw.get(field)) is not None:
            check_names(given, kind.__struct_fields__, f"{field}.")
    if (format := (raw.get("text") or {}).get("format")) is not None:
        check_names(format, TextFormat.__struct_fields__, "text.format.")
    for index, tool in enumerate(raw.get("tools") or ()):
        is_function = tool["type"] == "function"
        check_names(tool, (FUNCTION_NAMES if is_function else NAMESPACE_NAMES), f"tools[{index}].")
        for place, function in enumerate(tool.get("tools", ())):
            check_names(function, FUNCTION_NAMES, f"tools[{index}].tools[{place}].")
    if isinstance(choice := raw.get("tool_choice"), dict):
        check_names(choice, ToolChoice.__struct_fields__, "tool_choice.")


def tool_use_of(fields: ResponseFields) -> ToolUse | None:
    """What tools and tool_choice come to; None where nothing may be called. Raises `InvalidRequestError`."""
    choice = fields.tool_choice
    tools = [
        function if namespace is None else _renamed(function, flat_name(namespace, function.name))
        for namespace, function in fields.functions
    ]
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools", "tool_choice")
        return None
    check_tools(tools, path="")
    is_single = fields.parallel_tool_calls is False
    if choice == "none":
        return None
    if choice is None or isinstance(choice, str):
        return ToolUse(tools=tools, is_required=choice == "required", is_single=is_single)
    if choice.type == "function":
        if choice.name is None or choice.mode is not None or choice.tools is not None:
            raise InvalidRequestError("tool_choice of the type function has a name, and nothing else", "tool_choice")
        return ToolUse(tools=named_tools(tools, [choice.name]), is_required=True, is_single=True, is_named=True)
    if choice.name is not None or choice.mode is None or choice.tools is None:
        raise InvalidRequestError("tool_choice of the type allowed_tools has mode and tools", "tool_choice")
    allowed = named_tools(tools, [tool.name for tool in choice.tools])
    return ToolUse(tools=allowed, is_required=choice.mode == "required", is_single=is_single)


def _renamed(function: Tool, name: str) -> Tool:
    """Raises `InvalidRequestError` where the name gets too long."""
    given = {"name": name, "description": function.description, "strict": function.strict}
    return converted({**given, "parameters": function.parameters}, Tool)


def params_of(engine: Engine, fields: ResponseFields) -> SamplingParams:
    """How to sample: what the request says, else the model's defaults. Raises `InvalidRequestError` out of bounds."""
    check_logprobs(engine, fields)
    return engine.default_params(
        **{name: getattr(fields, name) for name in _AS_GIVEN},
        max_tokens=fields.max_output_tokens,
        logprobs=(fields.top_logprobs or 0) if fields.with_logprobs else None,
        structured=_structure_of(fields),
    )


def _structure_of(fields: ResponseFields) -> StructuredOutputs | None:
    """What text.format or structured_outputs asks for; None is any text. Raises `InvalidRequestError`."""
    formatted = None
    if fields.text is not None and fields.text.format is not None:
        formatted = _formatted(fields.text.format)
    if fields.structured_outputs is None:
        return formatted
    if formatted is not None:
        raise InvalidRequestError(
            "text.format and structured_outputs both give the answer a structure: leave one out", "structured_outputs"
        )
    return StructuredOutputs(**msgspec.structs.asdict(fields.structured_outputs))


def _formatted(format: TextFormat) -> StructuredOutputs | None:
    if (format.schema is None) == (format.type == "json_schema"):
        verb = "needs a schema" if format.schema is None else "has no schema"
        raise InvalidRequestError(f"text.format of the type {format.type} {verb}", "text")
    if format.schema is not None:
        return StructuredOutputs(json=format.schema)
    return StructuredOutputs(json_object=True) if format.type == "json_object" else None
