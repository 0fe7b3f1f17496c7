"""Items of an input: what a request sends, as they are kept, and as the messages that a chat template takes.

    text | messages, function_call, function_call_output, reasoning --> items, each with an id --> messages
    item_reference --> the item of an earlier response that has the id (keeping.py)

What an assistant did in one turn is one message: its thoughts, then its text, then its calls.
"""

import base64
import binascii
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.http.errors import echo
from aserve.http.openai.fields import check_names
from aserve.http.openai.responses.shapes import flat_name
from aserve.http.openai.schema import ADDED
from aserve.http.shapes import converted

Item = dict[str, Any]
Messages = list[dict[str, Any]]

TEXT_PARTS: Final = ("input_text", "output_text", "text")
SEALED: Final = "aserve."
"""How encrypted_content begins: the thoughts follow, in base64, for clients that send back nothing else of them."""

ItemId = Annotated[str, Meta(max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]
Parts = list[dict[str, Any]]


class MessageItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message. phase: of OpenAI's models, without effect."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    type: Literal["message"] = "message"
    id: ItemId | None = None
    status: Status | None = None
    phase: str | None = None


class CallItem(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: ItemId
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str
    id: ItemId | None = None
    status: Status | None = None
    caller: None = None
    namespace: Annotated[str, Meta(max_length=256)] | None = None


class CallOutputItem(msgspec.Struct, frozen=True, kw_only=True):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: str | Parts
    id: ItemId | None = None
    status: Status | None = None
    name: str | None = None
    caller: None = None
    namespace: Annotated[str, Meta(max_length=256)] | None = None


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True):
    """Thoughts, by their text or, where that is missing, by encrypted_content. Summaries are not the model's words."""

    type: Literal["reasoning"]
    summary: Parts = []
    content: Parts | None = None
    encrypted_content: str | None = None
    id: ItemId | None = None
    status: Status | None = None


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """An item of an earlier response, by its id."""

    id: ItemId
    type: Literal["item_reference"]


REFERENCE: Final = "item_reference"
KINDS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    REFERENCE: Reference,
}
PREFIXES: Final[Mapping[str, str]] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
"""How ids of each kind begin."""
RESPONSE: Final = "resp_"
"""How a response's id begins."""
RESPONSE_DIGITS: Final = 48
"""Of a response's id, with which those of its output's items begin behind their prefix."""


def new_response_id() -> str:
    """Of a new response."""
    return f"{RESPONSE}{secrets.token_hex(RESPONSE_DIGITS // 2)}"


def new_item_id(kind: str) -> str:
    """Of a new item of an input."""
    return f"{PREFIXES[kind]}_{secrets.token_hex(16)}"


def output_item_id(kind: str, response_id: str, index: int) -> str:
    """Of an item of a response's output: it tells of which, see `response_of`."""
    return f"{PREFIXES[kind]}_{response_id.removeprefix(RESPONSE)}{index:04x}"


def response_of(item_id: str) -> str | None:
    """The id of the response whose output has the item; None of an id that was not made here."""
    digits = item_id.partition("_")[2]
    return f"{RESPONSE}{digits[:RESPONSE_DIGITS]}" if len(digits) > RESPONSE_DIGITS else None


def with_own_ids(items: Sequence[Item]) -> list[Item]:
    """No two of one id: a client may send what it was answered once more, or choose ids. Always the same for the same.

    The first of them keeps it; the others' have a number behind it.
    """
    taken: set[str] = set()
    numbers: dict[str, int] = {}
    told = []
    for item in items:
        id = given = item["id"]
        while id in taken:
            numbers[given] = numbers.get(given, 1) + 1
            id = f"{given}_{numbers[given]}"
        taken.add(id)
        told.append(item if id == given else {**item, "id": id})
    return told


def sealed(thoughts: str) -> str:
    """encrypted_content of thoughts."""
    return SEALED + base64.b64encode(thoughts.encode(errors="surrogatepass")).decode()


def input_items(given: str | Sequence[dict[str, Any]]) -> list[Item]:
    """The items of an input, as it was sent, checked and as they are kept. Raises `InvalidRequestError`."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for index, item in enumerate(given):
        place = f"input[{index}]"
        with _told_of(place):
            items.append(_item(item))
        for name in ADDED:
            item.pop(name, None)
        check_names(item, KINDS[items[-1]["type"]].__struct_fields__, f"{place}.")
    if not items:
        raise InvalidRequestError("input is empty", "input")
    return items


def _without_added(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in ADDED}


def _item(given: Mapping[str, Any]) -> Item:
    kind = given.get("type") or ("message" if "role" in given else REFERENCE if given.keys() == {"id"} else None)
    if not isinstance(kind, str) or kind not in KINDS:
        told = "this field is required" if kind is None else f"{echo(kind)} is not supported"
        raise InvalidRequestError(f"type: {told}; items are of the types {', '.join(KINDS)}")
    fields = converted({**given, "type": kind}, KINDS[kind])
    item = {name: value for name, value in msgspec.structs.asdict(fields).items() if value is not None}
    if kind == REFERENCE:
        return item
    item["id"] = item.get("id") or new_item_id(kind)
    item.setdefault("status", "completed")
    if isinstance(fields, MessageItem):
        text_type = "output_text" if fields.role == "assistant" else "input_text"
        item["content"] = (
            [{"type": text_type, "text": fields.content}]
            if isinstance(fields.content, str)
            else [
                {**_without_added(part), "type": text_type, "text": text}
                for part, text in zip(fields.content, _texts("content", fields.content), strict=True)
            ]
        )
        if fields.role == "assistant":
            item["content"] = [{"annotations": [], **part} for part in item["content"]]
    elif isinstance(fields, CallOutputItem) and not isinstance(fields.output, str):
        list(_texts("output", fields.output))
    elif isinstance(fields, ReasoningItem):
        _thoughts(item)
    return item


@contextmanager
def _told_of(place: str) -> Iterator[None]:
    """What is wrong is told with its place, which begins with the field's name."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{place}.{error.message}", place.partition("[")[0]) from None


def _texts(field: str, parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Of the parts of a content. Raises `InvalidRequestError` for those that are none."""
    for index, part in enumerate(parts):
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in (*TEXT_PARTS, "refusal", "reasoning_text"):
            raise InvalidRequestError(
                f"{field}[{index}]: a part of the type {echo(kind)} is not supported, only text is"
            )
        if not isinstance(text, str):
            raise InvalidRequestError(f"{field}[{index}].text: a string is expected")
        yield text


def _thoughts(item: Item) -> str:
    """What a reasoning item says. Raises `InvalidRequestError` for what is sealed by others."""
    if item.get("content"):
        return "\n".join(_texts("content", item["content"]))
    seal = item.get("encrypted_content") or ""
    try:
        if not seal.startswith(SEALED):
            raise ValueError
        return base64.b64decode(seal.removeprefix(SEALED), validate=True).decode(errors="surrogatepass")
    except (ValueError, binascii.Error):
        if not seal:
            return ""
        raise InvalidRequestError("encrypted_content was not made here, and cannot be read") from None


def messages_of(items: Iterable[Item], instructions: str | None, *, has_developer: bool) -> Messages:
    """The conversation, as chat templates take it. items: of `input_items`, and outputs of earlier responses.

    has_developer: the template has such messages; else they are told as the system's. Those at the beginning are one:
    most templates take one.
    """
    messages: Messages = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    called: dict[str, str] = {}
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            parts = item["output"]
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item["call_id"],
                    "name": item.get("name") or called.get(item["call_id"]),
                    "content": parts if isinstance(parts, str) else "\n".join(_texts("output", parts)),
                }
            )
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" and not has_developer else item["role"]
            text = "\n".join(_texts("content", item["content"]))
            if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
                messages[0]["content"] += f"\n\n{text}"
            else:
                messages.append({"role": role, "content": text})
        elif kind == "reasoning":
            if thoughts := _thoughts(item):
                _turn(messages, "reasoning", "content", "tool_calls")["reasoning"] = thoughts
        elif kind == "message":
            _turn(messages, "content", "tool_calls")["content"] = "\n".join(_texts("content", item["content"]))
        else:
            called[item["call_id"]] = name = flat_name(item.get("namespace"), item["name"])
            function = {"name": name, "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            _turn(messages).setdefault("tool_calls", []).append(call)
    return messages


def _turn(messages: Messages, *taken: str) -> dict[str, Any]:
    """The assistant's message under way, or a new one where that has one of the fields already."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in taken):
        messages.append({"role": "assistant"})
    return messages[-1]
