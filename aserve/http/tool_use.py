"""ToolUse: the tools that an answer may call, whether it has to, and what is enforced. Each API has its own words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.core.structured import CallRules, ToolRule
from aserve.http.errors import echo

MAX_TOOLS: Final = 128
MAX_TOOL_BYTES: Final = 128 * 1024
"""Of a tool's parameters, as a schema in response_format may have."""
MAX_TOOLS_BYTES: Final = 1024 * 1024
"""Of all tools together."""

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.\-]{1,128}\Z")]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that may be called. parameters: a JSON Schema, enforced where `strict` or where a call is forced."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that an answer may call. is_required: at least one of them. is_single: at most one call.

    is_named: the request names the one that has to be called.
    """

    tools: Sequence[Tool]
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
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.parameters or {"type": "object", "properties": {}},
                },
            }
            for tool in self.tools
        ]

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Their parameters, by name."""
        return {tool.name: tool.parameters or {} for tool in self.tools}

    @property
    def is_enforced(self) -> bool:
        """Whether masks have to see to it that calls are as they must."""
        return self.is_required or any(tool.strict for tool in self.tools)

    def rules(self, format: str | None, thoughts: str | None, *, in_thought: bool) -> CallRules:
        """What is enforced of calls. A schema counts where it is strict, or where a call has to be made."""
        tools = tuple(
            ToolRule(
                name=tool.name,
                schema=tool.parameters if self.is_required or tool.strict else None,
            )
            for tool in self.tools
        )
        return CallRules(
            format=format,
            thoughts=thoughts,
            in_thought=in_thought,
            tools=tools,
            is_required=self.is_required,
            is_single=self.is_single,
        )


def check_tools(tools: Sequence[Tool], *, path: str, parameters: str = "parameters") -> None:
    """Raise `InvalidRequestError` for a name that is there twice, and for tools that are too large.

    path, parameters: how the request calls a tool, after its place in the list, and its schema: ".function", say.
    """
    names: set[str] = set()
    num_bytes = 0
    for index, tool in enumerate(tools):
        where = f"tools[{index}]{path}"
        if tool.name in names:
            raise InvalidRequestError(f"{where}.name: {echo(tool.name)} is there twice", "tools")
        names.add(tool.name)
        size = len(msgspec.json.encode(tool.parameters))
        if size > MAX_TOOL_BYTES:
            raise InvalidRequestError(
                f"{where}.{parameters} may have at most {MAX_TOOL_BYTES} bytes, got {size}", "tools"
            )
        num_bytes += size + len((tool.description or "").encode(errors="surrogatepass"))
    if num_bytes > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"tools may have at most {MAX_TOOLS_BYTES} bytes together, got {num_bytes}", "tools")


def named_tools(tools: Sequence[Tool], names: Iterable[str]) -> list[Tool]:
    """Those of the names, each once. Raises `InvalidRequestError` for a name that is none of theirs."""
    known = {tool.name: tool for tool in tools}
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in known:
            raise InvalidRequestError(f"tool_choice: {echo(name)} is none of the tools", "tool_choice")
    return [known[name] for name in wanted]
