"""tools and tool_choice: which tools a request's answer may call, whether it has to, and what is enforced of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.core.structured import CallRules, StructuredOutputs, ToolRule
from aserve.http.errors import echo
from aserve.http.openai.fields import check_names

MAX_TOOLS: Final = 128
MAX_TOOL_BYTES: Final = 128 * 1024
"""Of a tool's parameters, as a schema in response_format may have."""
MAX_TOOLS_BYTES: Final = 1024 * 1024
"""Of all tools together."""
MAX_CALLS: Final = 128
"""Of one message in the history."""

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.\-]{1,128}\Z")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionFields(msgspec.Struct, frozen=True, kw_only=True):
    """tools[].function. parameters: a JSON Schema, enforced where `strict` or where a call is forced."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(msgspec.Struct, frozen=True, kw_only=True):
    """tools[]."""

    type: Literal["function"]
    function: FunctionFields


class FunctionName(msgspec.Struct, frozen=True, kw_only=True):
    """tool_choice.function."""

    name: ToolName


class ChosenTool(msgspec.Struct, frozen=True, kw_only=True):
    """tool_choice.allowed_tools.tools[]."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """tool_choice.allowed_tools: the others are as if they had not been given."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """tool_choice, as an object: one tool that has to be called, or several that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """tool_calls[].function of a message: arguments as JSON, or as whatever the model wrote."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class CallFields(msgspec.Struct, frozen=True, kw_only=True):
    """tool_calls[] of a message. index: as streams have it, without effect."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Literal["function"] = "function"
    index: int | None = None


Tools = Annotated[list[ToolFields], Meta(min_length=1, max_length=MAX_TOOLS)]
ToolCalls = Annotated[list[CallFields], Meta(max_length=MAX_CALLS)]
Choice = Literal["none", "auto", "required"] | ToolChoice


def check_tool_names(raw: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for an unknown name in tools, tool_choice or a message's tool_calls."""
    for index, tool in enumerate(raw.get("tools") or ()):
        check_names(tool, ToolFields.__struct_fields__, f"tools[{index}].")
        check_names(tool["function"], FunctionFields.__struct_fields__, f"tools[{index}].function.")
    if isinstance(choice := raw.get("tool_choice"), dict):
        check_names(choice, ToolChoice.__struct_fields__, "tool_choice.")
        if (allowed := choice.get("allowed_tools")) is not None:
            check_names(allowed, AllowedTools.__struct_fields__, "tool_choice.allowed_tools.")
    for place, message in enumerate(raw.get("messages") or ()):
        for index, call in enumerate(message.get("tool_calls") or ()):
            where = f"messages[{place}].tool_calls[{index}]."
            check_names(call, CallFields.__struct_fields__, where)
            check_names(call["function"], CalledFunction.__struct_fields__, f"{where}function.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that an answer may call. is_required: at least one of them. is_single: at most one call.

    is_named: the request names the one that has to be called.
    """

    tools: Sequence[ToolFields]
    is_required: bool = False
    is_single: bool = False
    is_named: bool = False

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.function.name,
                    "description": tool.function.description or "",
                    "parameters": tool.function.parameters or {"type": "object", "properties": {}},
                },
            }
            for tool in self.tools
        ]

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Their parameters, by name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    @property
    def is_enforced(self) -> bool:
        """Whether masks have to see to it that calls are as they must."""
        return self.is_required or any(tool.function.strict for tool in self.tools)

    def structure(self, format: str | None, thoughts: str | None, *, in_thought: bool) -> StructuredOutputs:
        """What is enforced. A schema counts where it is strict, or where a call has to be made."""
        rules = tuple(
            ToolRule(
                name=tool.function.name,
                schema=tool.function.parameters if self.is_required or tool.function.strict else None,
            )
            for tool in self.tools
        )
        return StructuredOutputs(
            calls=CallRules(
                format=format,
                thoughts=thoughts,
                in_thought=in_thought,
                tools=rules,
                is_required=self.is_required,
                is_single=self.is_single,
            )
        )


def tool_use(tools: Sequence[ToolFields] | None, choice: Choice | None, *, parallel: bool | None) -> ToolUse | None:
    """What tools and tool_choice come to; None where nothing may be called. Raises `InvalidRequestError`."""
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequestError("tool_choice needs tools", "tool_choice")
        return None
    _check(tools)
    is_single = parallel is False
    if choice == "none":
        return None
    if choice is None or isinstance(choice, str):
        return ToolUse(tools=tools, is_required=choice == "required", is_single=is_single)
    if (choice.function is None) == (choice.type == "function"):
        raise InvalidRequestError(f"tool_choice of the type {choice.type} {_needs(choice)}", "tool_choice")
    if choice.function is not None:
        return ToolUse(tools=_named(tools, [choice.function]), is_required=True, is_single=True, is_named=True)
    if choice.allowed_tools is None:
        raise InvalidRequestError(f"tool_choice of the type {choice.type} needs allowed_tools", "tool_choice")
    allowed = _named(tools, [tool.function for tool in choice.allowed_tools.tools])
    return ToolUse(tools=allowed, is_required=choice.allowed_tools.mode == "required", is_single=is_single)


def _needs(choice: ToolChoice) -> str:
    return "needs function" if choice.type == "function" else "has no function"


def _check(tools: Sequence[ToolFields]) -> None:
    names: set[str] = set()
    num_bytes = 0
    for index, tool in enumerate(tools):
        function = tool.function
        if function.name in names:
            raise InvalidRequestError(f"tools[{index}].function.name: {echo(function.name)} is there twice", "tools")
        names.add(function.name)
        parameters = len(msgspec.json.encode(function.parameters))
        if parameters > MAX_TOOL_BYTES:
            raise InvalidRequestError(
                f"tools[{index}].function.parameters may have at most {MAX_TOOL_BYTES} bytes, got {parameters}", "tools"
            )
        num_bytes += parameters + len((function.description or "").encode(errors="surrogatepass"))
    if num_bytes > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"tools may have at most {MAX_TOOLS_BYTES} bytes together, got {num_bytes}", "tools")


def _named(tools: Sequence[ToolFields], wanted: Sequence[FunctionName]) -> list[ToolFields]:
    known = {tool.function.name: tool for tool in tools}
    for function in wanted:
        if function.name not in known:
            raise InvalidRequestError(f"tool_choice: {echo(function.name)} is none of the tools", "tool_choice")
    return [known[name] for name in dict.fromkeys(function.name for function in wanted)]


def thinking_hints(effort: Effort | None) -> dict[str, Any]:
    """What reasoning_effort says to templates: they read its word, or whether there is to be any thinking at all."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"enable_thinking": thinks, "thinking": thinks} | ({"reasoning_effort": effort} if thinks else {})
