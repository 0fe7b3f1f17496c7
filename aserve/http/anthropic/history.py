"""A conversation in the Messages API's words, as the turns that chat templates take.

    user       [tool_result, text]                -> tool, user
    assistant  [thinking, text, tool_use]         -> assistant with reasoning, content and tool_calls

Turns of one role that follow each other are one, as the API says: many templates insist on turns that alternate. Most
take a system turn at the beginning only: a later one is told as the user's, between <system> and </system>.
"""

from collections.abc import Sequence
from typing import Any, Final

from aserve.core.errors import InvalidRequestError
from aserve.http.anthropic.schema import (
    Block,
    Message,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

BILLING: Final = "x-anthropic-billing-header:"

Turn = dict[str, Any]

ROLES: Final = {ThinkingBlock: "assistant", RedactedThinkingBlock: "assistant", ToolUseBlock: "assistant"}
"""Of blocks that are not everybody's; a tool's result is the user's."""


def turns_of(system: str | Sequence[TextBlock] | None, messages: Sequence[Message]) -> list[Turn]:
    """The conversation. Raises `InvalidRequestError` for a block in a message of the wrong role."""
    turns: list[Turn] = []
    names: dict[str, str] = {}
    if told := _system_text(system):
        turns.append({"role": "system", "content": told})
    for index, message in enumerate(messages):
        content = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
        _check_roles(content, message.role, f"messages[{index}]")
        if message.role == "assistant":
            _answer(turns, content, names)
        else:
            _ask(turns, message.role, content, names)
    if turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
        raise InvalidRequestError(
            "messages: the last one is the assistant's, and has no text to go on from",
            "messages",
        )
    return turns


def _system_text(system: str | Sequence[TextBlock] | None) -> str:
    """All but what clients say there to those who keep accounts: it may change each time, and so would all prefixes."""
    if system is None or isinstance(system, str):
        return system or ""
    return _joined([block for block in system if not block.text.startswith(BILLING)])


def _check_roles(content: Sequence[Block], role: str, where: str) -> None:
    for place, block in enumerate(content):
        wanted = "user" if isinstance(block, ToolResultBlock) else ROLES.get(type(block), role)
        if wanted != role:
            kind = block.__struct_config__.tag
            raise InvalidRequestError(f"{where}.content[{place}]: a {kind} block is the {wanted}'s", "messages")


def _ask(turns: list[Turn], role: str, content: Sequence[Block], names: dict[str, str]) -> None:
    """What a user says, or the system, and what tools came to."""
    if not content:
        _say(turns, "")
    for block in content:
        if isinstance(block, TextBlock):
            _say(turns, f"<system>\n{block.text}\n</system>" if role == "system" else block.text)
        elif isinstance(block, ToolResultBlock):
            told = _joined(block.content or "")
            turn = {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": f"Error: {told}" if block.is_error else told,
            }
            name = names.get(block.tool_use_id)
            turns.append(turn if name is None else {**turn, "name": name})


def _say(turns: list[Turn], text: str) -> None:
    if turns and turns[-1]["role"] == "user":
        turns[-1]["content"] += f"\n{text}"
    else:
        turns.append({"role": "user", "content": text})


def _answer(turns: list[Turn], content: Sequence[Block], names: dict[str, str]) -> None:
    """What the assistant thought, said and called. names: of calls, by their ids."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": None})
    turn = turns[-1]
    for block in content:
        if isinstance(block, TextBlock):
            turn["content"] = (turn["content"] or "") + block.text
        elif isinstance(block, ThinkingBlock):
            turn["reasoning"] = turn.get("reasoning", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
