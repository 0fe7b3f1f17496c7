"""Schemas are refused for what is not enforced, malformed or too much, each with its place."""

import json

import pytest

from aserve.constraints.json_schema import (
    MAX_DEPTH,
    MAX_PATTERN_PROPERTIES,
    MAX_PROPERTIES,
    MAX_REFERRED_DEPTH,
    _digits,
    check_schema,
)
from aserve.core.errors import InvalidRequestError

STRING = {"type": "string"}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def chain(length: int) -> dict[str, object]:
    """Definitions each of which refers to the next."""
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": STRING}}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": ["string", "null"], "maxLength": 3, "title": "t", "description": "d", "default": None},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$defs": {"a": STRING}, "$ref": "#/$defs/a"},
        {"properties": {"a/b": STRING}, "required": ["a/b"], "additionalProperties": False},
        {"properties": {"a~/b": STRING}, "items": {"$ref": "#/properties/a~0~1b"}},
        {"anyOf": [{"const": {"a": [1, 2.5]}}, {"enum": [None]}], "oneOf": [STRING, {"type": "integer"}]},
        {"prefixItems": [STRING, True], "items": False, "minItems": 1},
        {"multipleOf": 0.01, "minimum": -1.5, "exclusiveMaximum": 10},
        {"x-order": ["a"], "properties": {"a": {"x-ui": {"hidden": True}, "example": 1}}},
        {"type": "integer", "format": "int64"},
        nested(MAX_DEPTH),
        chain(150),
    ],
    ids=str,
)
def test_what_is_enforced_is_taken(schema: object) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        (None, "#", "an object or a boolean"),
        ([], "#", "an object or a boolean"),
        ({"fooBar": 1}, "#/fooBar", "cannot be enforced"),
        ({"properties": {"a": {"not": STRING}}}, "#/properties/a/not", "cannot be enforced"),
        ({"items": {"uniqueItems": True}}, "#/items/uniqueItems", "cannot be enforced"),
        ({"nullable": True}, "#/nullable", '"type"'),
        ({"x-guidance": {"lenient": True}}, "#/x-guidance", "not the request's"),
        ({"format": 5}, "#/format", "must be one of date"),
        ({"x-deep": json.loads("[" * 70 + "]" * 70)}, "#/x-deep", "nested 64 deep"),
        ({"contentEncoding": "base64"}, "#/contentEncoding", "cannot be enforced"),
        ({"type": "strin"}, "#/type", "must be one of null"),
        ({"type": []}, "#/type", "must be one of null"),
        ({"minLength": -1}, "#/minLength", "whole number"),
        ({"minLength": 1.0}, "#/minLength", "whole number"),
        ({"minLength": True}, "#/minLength", "whole number"),
        ({"minimum": "1"}, "#/minimum", "a number"),
        ({"exclusiveMinimum": True, "minimum": 1}, "#/exclusiveMinimum", "a number"),
        ({"properties": [1]}, "#/properties", "an object of schemas"),
        ({"properties": {"a": 1}}, "#/properties", "an object of schemas"),
        ({"anyOf": []}, "#/anyOf", "a list of schemas"),
        ({"anyOf": [1]}, "#/anyOf", "a list of schemas"),
        ({"items": [STRING]}, "#/items", "prefixItems"),
        ({"required": "a"}, "#/required", "a list of strings"),
        ({"enum": []}, "#/enum", "at least one"),
        ({"$schema": "http://example.com/"}, "#/$schema", "2020-12"),
        ({"$ref": "http://example.com/a.json"}, "#/$ref", "nothing is fetched"),
        ({"$ref": "other.json#/a"}, "#/$ref", "nothing is fetched"),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {}}, "#/items/$ref", "there is no '#/$defs/a'"),
        ({"$ref": "#/$defs", "$defs": {"a": {"anyOf": []}}}, "#/$defs/a/anyOf", "a list of schemas"),
        ({"$ref": "#/required", "required": []}, "#/$ref", "is no schema"),
        ({"multipleOf": 0}, "#/multipleOf", "over 0"),
        ({"multipleOf": 999_983}, "#/multipleOf", "10000"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "#", "least common multiple"),
        ({"patternProperties": {f"^a{i}": STRING for i in range(MAX_PATTERN_PROPERTIES + 1)}}, "#/", "at most"),
        ({"properties": {f"a{i}": STRING for i in range(MAX_PROPERTIES + 1)}}, "#/properties", "at most"),
        ({"allOf": [{"pattern": f"a{i}"} for i in range(17)]}, "#", "16 patterns"),
        (nested(MAX_DEPTH + 1), "#" + "/items" * MAX_DEPTH, "deep"),
        (chain(MAX_REFERRED_DEPTH), "#/$defs", "deep together"),
        ({"x" * 100: 1}, "#/" + "x" * 61 + "...", "cannot be enforced"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_is_refused_at_its_place(schema: object, place: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_schema(schema)
    assert caught.value.message.startswith(f"the JSON schema at {place}")
    assert reason in caught.value.message
    assert caught.value.param == "structured"


@pytest.mark.parametrize(
    ("number", "digits"),
    [(3, (3, 0)), (0.25, (25, 2)), (10.0, (10, 0)), (1e-5, (1, 5)), (2.5, (25, 1)), (1e3, (1000, 0))],
)
def test_a_number_without_its_decimal_point(number: float, digits: tuple[int, int]) -> None:
    assert _digits(number) == digits
