"""The shapes of the Messages API's requests: which fields there are, and what becomes of each.

    Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock

A field that would change the answer and does not work is refused by name. `Ignored` are those without which the answer
is the same, or has more to go by: of caching, accounts, and of leaving out what is old.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.http.anthropic.errors import UnthreadedError
from aserve.http.errors import echo
from aserve.http.explaining import XAserve
from aserve.http.shapes import MAX_MESSAGES, ModelName, check_names, converted
from aserve.http.tool_use import MAX_TOOLS, ToolName

MAX_IGNORED_BYTES: Final = 16 * 1024
Ignored = Any
BlockId = Annotated[str, Meta(min_length=1, max_length=256)]


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Thoughts of an earlier answer. signature: not verified."""

    thinking: str
    signature: str | None = None
    cache_control: Ignored = None


class RedactedThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Thoughts that nobody can read; the model is not told of them."""

    data: str
    cache_control: Ignored = None


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that an earlier answer made."""

    id: BlockId
    name: BlockId
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None


class ToolResultBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    """What a call came to."""

    tool_use_id: BlockId
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Ignored = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """messages[]."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolFields(msgspec.Struct, frozen=True, kw_only=True):
    """tools[], of the type custom: called by the model, and run by the client."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[Any] | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """tool_choice. name: of the type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """thinking. display: "omitted" leaves the text out, and not the block."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """output_config.format."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """output_config."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """metadata, without effect."""

    user_id: str | None = None


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: what a prompt is made of."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: ModelName | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: list[Any] | None = None
    cache_control: Ignored = None
    context_management: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None


class MessagesFields(PromptFields, frozen=True, kw_only=True):
    """POST /v1/messages. max_tokens: 0 computes the prompt and nothing else."""

    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Literal[None] = None
    x_aserve: XAserve | None = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None


WITHOUT_EFFECT: Final = (
    *("cache_control", "context_management", "speed", "user_profile_id", "workspace_id"),
    *("metadata", "diagnostics", "inference_geo"),
)
"""Accepted up to MAX_IGNORED_BYTES each."""

Fields = TypeVar("Fields", bound=PromptFields)

_OTHER_TYPE: Final = re.compile(r"(?P<path>.*)\.type: invalid value '(?P<type>.*)'")
_WORKS: Final = {
    "system": "text",
    "messages": "text, thinking, redacted_thinking, tool_use and tool_result; in a tool_result, text",
}


def parse(raw: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """The fields of a request. Raises `InvalidRequestError` naming the one that is wrong, unknown or not supported."""
    if raw.get("thread") is not None:
        raise UnthreadedError
    _check_client_tools(raw.get("tools"))
    try:
        fields = converted(raw, kind)
    except InvalidRequestError as error:
        raise _explained(error) from None
    check_names(raw, fields)
    for name in WITHOUT_EFFECT:
        if len(msgspec.json.encode(raw.get(name))) > MAX_IGNORED_BYTES:
            raise InvalidRequestError(f"{name} is longer than {MAX_IGNORED_BYTES} bytes", name)
    if fields.mcp_servers:
        raise InvalidRequestError("mcp_servers is not supported yet", "mcp_servers")
    return fields


def _check_client_tools(tools: Any) -> None:
    """Those of another type have fields of their own, which would be told to be unknown."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise InvalidRequestError(
                f"tools[{index}]: {echo(kind)} is a tool of Anthropic's, which is not supported; those of the type "
                f"custom are",
                "tools",
            )


def _explained(error: InvalidRequestError) -> InvalidRequestError:
    """With what would work in place of a block of another type."""
    other = _OTHER_TYPE.fullmatch(error.message)
    if other is None or error.param not in _WORKS:
        return error
    told = f"{other['path']}: blocks of the type {echo(other['type'])} are not supported"
    return InvalidRequestError(f"{told}; these are: {_WORKS[error.param]}", error.param)
