"""A oneOf of objects that a property tells apart: no value is valid by two of them, so that it is an anyOf.

    {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}, where kind is "cat", or "dog", and required

As types have it that a field tells apart (discriminated unions). llguidance finds that out where the objects stand
in the oneOf itself, and not behind references.
"""

from collections.abc import Sequence
from typing import Any

from aserve.constraints.json_schema import parts_of, resolved


def with_any_of(schema: Any) -> Any:
    """The schema, which was checked and is the caller's own, with anyOf in place of each such oneOf."""
    parts = [schema]
    while parts:
        part = parts.pop()
        parts.extend(inner for _, inner in parts_of("", part))
        if isinstance(part, dict) and "oneOf" in part and "anyOf" not in part and _exclude(schema, part["oneOf"]):
            part["anyOf"] = part.pop("oneOf")
    return schema


def _exclude(schema: Any, options: Sequence[Any]) -> bool:
    """Whether a property has other values in each of them. schema: to which references refer."""
    told = [_told_by(schema, option) for option in options]
    return any(
        sum(len(values[name]) for values in told) == len(set[str]().union(*(values[name] for values in told)))
        for name in told[0]
        if all(name in values for values in told)
    )


def _told_by(schema: Any, option: Any) -> dict[str, set[str]]:
    """The texts that each property of an object has to be one of, where it has to be there."""
    if isinstance(option, dict) and option.keys() == {"$ref"}:
        option = resolved(schema, option["$ref"], "")
    if not isinstance(option, dict) or option.get("type") != "object":
        return {}
    found = {}
    for name in option.get("required", ()):
        value = option.get("properties", {}).get(name)
        values = ([value["const"]] if "const" in value else value.get("enum", ())) if isinstance(value, dict) else ()
        if values and all(isinstance(text, str) for text in values):
            found[name] = set(values)
    return found
