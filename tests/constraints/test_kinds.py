"""Which oneOf is an anyOf: of objects that a property tells apart, wherever they stand."""

import copy
from typing import Any

import pytest

from aserve.constraints.kinds import with_any_of


def kind(**value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": value, "n": {"const": "n"}}, "required": ["n", "kind"]}


CAT, DOG = kind(const="cat"), kind(enum=["dog", "wolf"])
DEFS = {"cat": CAT, "dog": DOG, "more": {"$ref": "#/$defs/dog"}, "all": True}


def one_of(*options: Any) -> dict[str, Any]:
    return {"properties": {"pet": {"oneOf": [*options]}}, "$defs": copy.deepcopy(DEFS)}


@pytest.mark.parametrize(
    "options",
    [
        [CAT, DOG],
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        [{"$ref": "#/$defs/cat"}, kind(const="fox"), DOG],
    ],
    ids=["inline", "referred", "mixed"],
)
def test_what_a_property_tells_apart_is_any_of(options: list[Any]) -> None:
    schema = with_any_of(one_of(*copy.deepcopy(options)))
    assert schema["properties"]["pet"] == {"anyOf": options}


@pytest.mark.parametrize(
    "option",
    [
        CAT,
        kind(enum=["dog", "cat"]),
        kind(type="string"),
        kind(const=1),
        {**DOG, "required": ["n"]},
        {key: value for key, value in DOG.items() if key != "type"},
        {"$ref": "#/$defs/dog", "title": "beside"},
        {"$ref": "#/$defs/more"},
        {"$ref": "#/$defs/all"},
        {"$ref": "#"},
        {"type": "null"},
        True,
    ],
    ids=lambda option: str(option)[:60],
)
def test_what_may_be_valid_by_two_stays_as_it_is(option: Any) -> None:
    schema = one_of({"$ref": "#/$defs/cat"}, option)
    assert with_any_of(copy.deepcopy(schema)) == schema
