"""response_format and structured_outputs: the structure of an answer, in OpenAI's words and in vLLM's."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from aserve.core.errors import InvalidRequestError
from aserve.core.structured import StructuredOutputs
from aserve.http.openai.fields import check_names


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """response_format.json_schema. The schema is enforced in full, whether strict or not; the rest has no effect."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """response_format. structures, triggers: of a structural_tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True):
    """structured_outputs: exactly one of them."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


PARTS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "response_format": ResponseFormat,
    "structured_outputs": StructuredFields,
}


def check_structure_names(raw: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for an unknown name in one of the two objects."""
    for field, kind in PARTS.items():
        if (given := raw.get(field)) is not None:
            check_names(given, kind.__struct_fields__, f"{field}.")
    if (schema := (raw.get("response_format") or {}).get("json_schema")) is not None:
        check_names(schema, JsonSchemaFormat.__struct_fields__, "response_format.json_schema.")


def structure_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredFields | None
) -> StructuredOutputs | None:
    """What a request asks for; None is any text. Raises `InvalidRequestError`."""
    formatted = None if response_format is None else _formatted(response_format)
    if structured_outputs is None:
        return formatted
    if formatted is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both give the answer a structure: leave one out",
            "structured_outputs",
        )
    return StructuredOutputs(**msgspec.structs.asdict(structured_outputs))


def _formatted(wanted: ResponseFormat) -> StructuredOutputs | None:
    parts = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers")}
    needed = parts.get(wanted.type, ())
    for name in ("json_schema", "structures", "triggers"):
        if (getattr(wanted, name) is None) == (name in needed):
            verb = "needs" if name in needed else "has no"
            raise InvalidRequestError(f"response_format of the type {wanted.type} {verb} {name}", "response_format")
    if wanted.json_schema is not None:
        return StructuredOutputs(json=wanted.json_schema.schema)
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    if wanted.type == "structural_tag":
        return StructuredOutputs(structural_tag={"structures": wanted.structures, "triggers": wanted.triggers})
    return None
