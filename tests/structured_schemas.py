"""JSON Schemas as people write them, sixty of them, each of which has an end: nothing in them may go on for ever."""

from typing import Any, Final

WORD: Final = {"type": "string", "minLength": 1, "maxLength": 8}
AGE: Final = {"type": "integer", "minimum": 0, "maximum": 150}
DATE: Final = {"type": "string", "format": "date"}


def record(**properties: Any) -> dict[str, Any]:
    """An object that has just these."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def some(item: Any, most: int = 3, least: int = 0) -> dict[str, Any]:
    """A list of so many."""
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


PERSON: Final = record(name=WORD, age=AGE)
POINT: Final = record(
    x={"type": "integer", "minimum": -9, "maximum": 9}, y={"type": "integer", "minimum": -9, "maximum": 9}
)

SCALARS: Final[list[Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    WORD,
    AGE,
    DATE,
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "pattern": "^(north|south) (east|west)$"},
    {"type": "string", "enum": ["red", "green", "blue"]},
    {"enum": [1, "two", None, True, [3], {"four": 4}]},
    {"const": {"exactly": ["this", 1.5, None]}},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20},
    {"type": ["boolean", "null"]},
    {"anyOf": [DATE, {"type": "null"}]},
    {"oneOf": [AGE, {"type": "string", "enum": ["unknown"]}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
]
OBJECTS: Final[list[Any]] = [
    PERSON,
    POINT,
    record(id={"type": "string", "pattern": "^[a-f0-9]{8}$"}, ok={"type": "boolean"}),
    record(name=WORD, born=DATE, email={"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.com$"}),
    record(street=WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"}, country={"enum": ["NL", "DE", "FR"]}),
    record(person=PERSON, at=POINT),
    record(a=record(b=record(c=record(d={"type": "boolean"})))),
    record(**{f"field_{i}": {"type": "boolean"} for i in range(12)}),
    record(**{"a key with spaces": AGE, "ünïcödé": WORD, 'quo"ted': {"type": "null"}, "sla/sh~": {"type": "boolean"}}),
    {
        "type": "object",
        "properties": {"name": WORD, "nickname": WORD},
        "required": ["name"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"a": AGE, "b": AGE, "c": AGE}, "additionalProperties": False},
    {"type": "object", "properties": {}, "additionalProperties": False},
    record(sentiment={"enum": ["positive", "negative", "neutral"]}, score=AGE),
    record(city=WORD, unit={"enum": ["celsius", "fahrenheit"]}),
    record(
        query=WORD, limit={"type": "integer", "minimum": 1, "maximum": 100}, after={"anyOf": [DATE, {"type": "null"}]}
    ),
    record(action={"const": "move"}, to=POINT),
    {"anyOf": [record(kind={"const": "cat"}, lives=AGE), record(kind={"const": "dog"}, barks={"type": "boolean"})]},
    {"oneOf": [record(kind={"const": "a"}, n=AGE), record(kind={"const": "b"}, s=WORD)]},
    {"allOf": [{"$ref": "#/$defs/base"}], "$defs": {"base": PERSON}},
    {
        "$ref": "#/$defs/pair",
        "$defs": {"pair": record(left={"$ref": "#/$defs/p"}, right={"$ref": "#/$defs/p"}), "p": POINT},
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"n": AGE},
        **record(n={"$ref": "#/definitions/n"}),
    },
    {
        "title": "Invoice",
        "description": "One line.",
        **record(total={"type": "integer", "minimum": 0, "maximum": 99999}),
    },
]
LISTS: Final[list[Any]] = [
    some({"type": "boolean"}),
    some(AGE, 5, 2),
    some(WORD, 3, 1),
    some(PERSON, 2, 1),
    some(some({"type": "integer", "minimum": 0, "maximum": 9}, 3), 3),
    some({"enum": ["x", "y"]}, 6),
    {"type": "array", "prefixItems": [WORD, AGE], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": "point"}], "items": {"type": "boolean"}, "maxItems": 4, "minItems": 1},
    record(tags=some(WORD, 2), people=some(PERSON, 2)),
    record(matrix=some(some(AGE, 2, 2), 2, 2)),
    record(steps=some(record(explanation=WORD, output=WORD), 2, 1), final_answer=WORD),
    record(
        items=some(record(sku={"type": "string", "pattern": "^[A-Z]{3}[0-9]{2}$"}, qty=AGE), 2, 1),
        paid={"type": "boolean"},
    ),
    some({"anyOf": [{"type": "null"}, AGE, {"enum": ["n/a"]}]}, 4),
    some({"$ref": "#/$defs/row"}, 2) | {"$defs": {"row": record(k=WORD, v={"anyOf": [AGE, {"type": "null"}]})}},
    record(calls=some(record(name={"enum": ["get", "put"]}, arguments=record(key=WORD)), 2)),
    {"type": "array", "minItems": 0, "maxItems": 0},
    record(scores=some({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}, 3)),
    record(when=some(DATE, 2, 1), where=some(POINT, 2, 1)),
]
SCHEMAS: Final = [*SCALARS, *OBJECTS, *LISTS]
