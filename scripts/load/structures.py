"""Schemas whose answers have no end before they are cut, so that each has as many tokens as one of free text."""

from collections.abc import Mapping
from typing import Any, Final

WORD: Final = {"type": "string", "maxLength": 12}
COUNT: Final = {"type": "integer", "minimum": 0, "maximum": 1000}


def record(**properties: Any) -> dict[str, Any]:
    """An object that has just these."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def endless(item: Mapping[str, Any]) -> dict[str, Any]:
    """A list of at least 32 items, of some ten tokens each: longer than a benchmark's answers."""
    return {"type": "array", "items": dict(item), "minItems": 32}


def asking_for(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request for such an answer, in vLLM's words."""
    return {"structured_outputs": {"json": schema}}


SCHEMAS: Final[tuple[dict[str, Any], ...]] = (
    endless(record(name=WORD, age=COUNT, tags={"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3})),
    endless(record(city=WORD, unit={"enum": ["celsius", "fahrenheit"]}, temperature={"type": "number"})),
    endless(record(id={"type": "string", "pattern": "^[a-f0-9]{8}$"}, is_open={"type": "boolean"}, note=WORD)),
    endless(record(person=record(first_name=WORD, last_name=WORD), born={"type": "string", "format": "date"})),
)
