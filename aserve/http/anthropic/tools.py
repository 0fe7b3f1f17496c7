"""tools, tool_choice and thinking in the Messages API's words."""

import secrets
from collections.abc import Sequence
from typing import Any

from aserve.core.errors import InvalidRequestError
from aserve.http.anthropic.schema import OutputConfig, Thinking, ToolChoice, ToolFields
from aserve.http.tool_use import Tool, ToolUse, check_tools, named_tools


def new_tool_use_id() -> str:
    """For a call, as Anthropic's look."""
    return f"toolu_{secrets.token_hex(12)}"


def tool_use(tools: Sequence[ToolFields] | None, choice: ToolChoice | None) -> ToolUse | None:
    """What tools and tool_choice come to; None where nothing may be called. Raises `InvalidRequestError`."""
    kind = "auto" if choice is None else choice.type
    name = None if choice is None else choice.name
    if (name is not None) != (kind == "tool"):
        raise InvalidRequestError(
            f"tool_choice of the type {kind} {'needs' if name is None else 'has no'} name", "tool_choice"
        )
    if not tools:
        if kind in ("any", "tool"):
            raise InvalidRequestError(f"tool_choice of the type {kind} needs tools", "tool_choice")
        return None
    _check_refused(tools)
    functions = [
        Tool(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
        for tool in tools
    ]
    check_tools(functions, path="", parameters="input_schema")
    if kind == "none":
        return None
    return ToolUse(
        tools=functions if name is None else named_tools(functions, [name]),
        is_required=kind in ("any", "tool"),
        is_single=choice is not None and choice.disable_parallel_tool_use is True,
    )


def _check_refused(tools: Sequence[ToolFields]) -> None:
    """What would have to be known of, and is not."""
    for index, tool in enumerate(tools):
        asked = {
            "defer_loading": tool.defer_loading,
            "allowed_callers": tool.allowed_callers not in (None, [], ["direct"]),
            "input_examples": tool.input_examples,
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise InvalidRequestError(f"tools[{index}].{name} is not supported yet", "tools")


def thinking_hints(thinking: Thinking | None, config: OutputConfig | None) -> dict[str, Any]:
    """What thinking and output_config.effort say to templates, which read what they know of."""
    hints: dict[str, Any] = {}
    if thinking is not None:
        thinks = thinking.type != "disabled"
        hints = {"enable_thinking": thinks, "thinking": thinks}
    if config is not None and config.effort is not None and hints.get("thinking", True):
        hints["reasoning_effort"] = config.effort
    return hints


def check_thinking(thinking: Thinking | None, max_tokens: int) -> None:
    """Raise `InvalidRequestError` for a budget without the kind that has one, or that leaves nothing for the answer."""
    if thinking is None:
        return
    budget = thinking.budget_tokens
    if (budget is not None) != (thinking.type == "enabled"):
        verb = "needs" if budget is None else "has no"
        raise InvalidRequestError(f"thinking of the type {thinking.type} {verb} budget_tokens", "thinking")
    if budget is not None and budget >= max_tokens:
        raise InvalidRequestError(
            f"thinking.budget_tokens must be less than max_tokens ({max_tokens}), got {budget}", "thinking"
        )
