"""tools, tool_choice, reasoning_effort and verbosity in OpenAI's words, and the calls of a message in the history."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.http.openai.fields import check_names
from aserve.http.tool_use import MAX_TOOLS, Tool, ToolName, ToolUse, check_tools, named_tools

MAX_CALLS: Final = 128
"""Of one message in the history."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class ToolFields(msgspec.Struct, frozen=True, kw_only=True):
    """tools[]."""

    type: Literal["function"]
    function: Tool


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
        check_names(tool["function"], Tool.__struct_fields__, f"tools[{index}].function.")
    if isinstance(choice := raw.get("tool_choice"), dict):
        check_names(choice, ToolChoice.__struct_fields__, "tool_choice.")
        if (allowed := choice.get("allowed_tools")) is not None:
            check_names(allowed, AllowedTools.__struct_fields__, "tool_choice.allowed_tools.")
    for place, message in enumerate(raw.get("messages") or ()):
        for index, call in enumerate(message.get("tool_calls") or ()):
            where = f"messages[{place}].tool_calls[{index}]."
            check_names(call, CallFields.__struct_fields__, where)
            check_names(call["function"], CalledFunction.__struct_fields__, f"{where}function.")


def tool_use(tools: Sequence[ToolFields] | None, choice: Choice | None, *, parallel: bool | None) -> ToolUse | None:
    """What tools and tool_choice come to; None where nothing may be called. Raises `InvalidRequestError`."""
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequestError("tool_choice needs tools", "tool_choice")
        return None
    functions = [tool.function for tool in tools]
    check_tools(functions, path=".function")
    is_single = parallel is False
    if choice == "none":
        return None
    if choice is None or isinstance(choice, str):
        return ToolUse(tools=functions, is_required=choice == "required", is_single=is_single)
    if (choice.function is None) == (choice.type == "function"):
        raise InvalidRequestError(f"tool_choice of the type {choice.type} {_needs(choice)}", "tool_choice")
    if choice.function is not None:
        return ToolUse(
            tools=named_tools(functions, [choice.function.name]), is_required=True, is_single=True, is_named=True
        )
    if choice.allowed_tools is None:
        raise InvalidRequestError(f"tool_choice of the type {choice.type} needs allowed_tools", "tool_choice")
    allowed = named_tools(functions, [tool.function.name for tool in choice.allowed_tools.tools])
    return ToolUse(tools=allowed, is_required=choice.allowed_tools.mode == "required", is_single=is_single)


def _needs(choice: ToolChoice) -> str:
    return "needs function" if choice.type == "function" else "has no function"


def template_hints(effort: Effort | None, verbosity: Verbosity | None) -> dict[str, Any]:
    """What they say to templates: verbosity its word, effort its word or whether there is to be any thinking at all."""
    hints: dict[str, Any] = {} if verbosity is None else {"verbosity": verbosity}
    if effort is None:
        return hints
    thinks = effort != "none"
    return hints | {"enable_thinking": thinks, "thinking": thinks} | ({"reasoning_effort": effort} if thinks else {})
