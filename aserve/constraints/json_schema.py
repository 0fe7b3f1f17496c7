"""Which JSON Schemas are enforced in full: each keyword is known, has a value of its type, and refers to nothing else.

    enforced     llguidance masks tokens by it        annotation    says nothing about what is valid
    any other    400, with its place: what is not enforced is never passed over in silence

A schema may be well-formed here and still ask for what llguidance cannot do, or what contradicts itself: that is found
when it is compiled (compiler.py), and its place by `parts_of`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Set
from decimal import Decimal
from typing import Any, Final

from aserve.constraints.numbers import LOWER, MAX_BOUND, UPPER, check_value, is_bound, is_lower, is_upper
from aserve.constraints.places import escaped, refused
from aserve.core.rules import shown

MAX_DEPTH: Final = 64
"""Of a schema in a schema."""
MAX_REFERRED_DEPTH: Final = 400
"""Of the schema and all that it refers to, together: llguidance follows references on its stack, which has an end."""
MAX_PROPERTIES: Final = 1000
"""Of one object; the time to compile them grows with their square."""
MAX_PATTERN_PROPERTIES: Final = 48
"""Of the schema; each is compared with each."""
MAX_JOINED_PATTERNS: Final = 16
"""Patterns of a schema that has allOf, which joins them."""
MAX_MULTIPLE: Final = 10_000
"""Of multipleOf, without its decimal point; and where values may be joined, of their least common multiple."""

DRAFTS: Final = (
    "json-schema.org/draft/2020-12/schema",
    "json-schema.org/draft/2019-09/schema",
    "json-schema.org/draft-07/schema",
    "json-schema.org/draft-06/schema",
    "json-schema.org/draft-04/schema",
)
TYPES: Final = ("null", "boolean", "object", "array", "number", "integer", "string")
FORMATS: Final = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
FREE_FORMATS: Final = ("password", "binary", "path", "float", "double")
"""Which every string has, or every number."""
WHOLE_FORMATS: Final[Mapping[str, tuple[int, int]]] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-MAX_BOUND, MAX_BOUND),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, MAX_BOUND),
}
"""OpenAPI's, of whole numbers: the least and the greatest, as far as they are exact."""
ANNOTATIONS: Final = frozenset(
    {
        *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"),
        *("example", "externalDocs"),  # OpenAPI's
        *("$id", "discriminator", "strict"),  # strict is a tool's, and is often written a level too deep
    }
)
ENFORCED: Final = frozenset({"const", "enum"})
"""Keywords whose values are answers."""
ONE: Final = frozenset({"items", "additionalProperties"})
SEVERAL: Final = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value is a schema, a list of them, or schemas by name."""

Check = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_multiple(value: Any) -> bool:
    return is_bound(value) and value > 0 and _digits(value)[0] <= MAX_MULTIPLE


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_type(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else _is_texts(value) and bool(value) and set(value) <= set(TYPES)


def _is_draft(value: Any) -> bool:
    return isinstance(value, str) and value.removesuffix("#").partition("://")[2] in DRAFTS


def _is_local(value: Any) -> bool:
    return isinstance(value, str) and (value == "#" or value.startswith("#/")) and "%" not in value


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


VALUES: Final[Mapping[str, tuple[Check, str]]] = {
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "a whole number of at least 0"),
    ),
    **dict.fromkeys(LOWER, (is_lower, f"a number of at most {MAX_BOUND}, up to which bounds are exact")),
    **dict.fromkeys(UPPER, (is_upper, f"a number of at least -{MAX_BOUND}, down to which bounds are exact")),
    "pattern": (lambda value: isinstance(value, str), "a string"),
    "format": (
        lambda value: value in {*FORMATS, *FREE_FORMATS, *WHOLE_FORMATS} if isinstance(value, str) else False,
        f"one of {', '.join((*FORMATS, *FREE_FORMATS, *WHOLE_FORMATS))}: others cannot be enforced",
    ),
    "multipleOf": (_is_multiple, f"a number over 0, of at most {MAX_MULTIPLE} without its decimal point"),
    "required": (_is_texts, "a list of strings"),
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of some of them"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list with at least one value"),
    "const": (lambda value: True, "any value"),
    "$schema": (_is_draft, f"one of {', '.join(DRAFTS)}"),
    "$ref": (
        _is_local,
        'a reference into the schema itself, such as "#/$defs/name", and without %: nothing is fetched',
    ),
    **dict.fromkeys(ONE, (_is_schema, "a schema, which is an object or a boolean; for a list of them use prefixItems")),
    **dict.fromkeys(
        SEVERAL,
        (lambda value: isinstance(value, list) and bool(value) and all(map(_is_schema, value)), "a list of schemas"),
    ),
    **dict.fromkeys(
        NAMED, (lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())), "an object of schemas")
    ),
}
"""What the value of each keyword has to be: a check, and that in words."""
HINTS: Final = {
    "additionalItems": "use prefixItems, and items for what follows them",
    "nullable": 'use "type": ["string", "null"] or its like',
    "x-guidance": "options of the library are not the request's to set",
    "$anchor": 'refer to "#/$defs/name"',
}


def is_annotation(keyword: str) -> bool:
    """Whether a keyword says nothing about what is valid: one of these, or an extension (x-...)."""
    return keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword not in HINTS)


def enforced_in(schema: Mapping[str, Any]) -> set[str]:
    """The keywords of a schema that say what is valid."""
    return {keyword for keyword in schema if not is_annotation(keyword)}


def check_schema(schema: object) -> None:
    """Raise `InvalidRequestError` that names the place of what is malformed, unknown, too much or not enforceable."""
    if not _is_schema(schema):
        raise refused("#", f"a schema must be an object or a boolean, got {shown(schema)}")
    sums = _Sums()
    parts = [("#", schema, 1)]
    checked: set[int] = set()
    while parts:
        place, part, depth = parts.pop()
        checked.add(id(part))
        if depth > MAX_DEPTH:
            raise refused(place, f"schemas may be nested {MAX_DEPTH} deep")
        if isinstance(part, dict):
            for keyword, value in part.items():
                _check_keyword(place, keyword, value)
            sums.add(place, part)
        parts.extend((inner, value, depth + 1) for inner, value in parts_of(place, part))
    sums.check(schema, checked)


def _check_keyword(place: str, keyword: str, value: Any) -> None:
    at = f"{place}/{escaped(keyword)}"
    if is_annotation(keyword):
        check_value(at, value, is_enforced=False)
        return
    if keyword not in VALUES:
        hint = HINTS.get(keyword)
        raise refused(at, f"cannot be enforced{f': {hint}' if hint else ''}")
    is_good, allowed = VALUES[keyword]
    if not is_good(value):
        raise refused(at, f"must be {allowed}, got {shown(value)}")
    if keyword in ENFORCED:
        check_value(at, value, is_enforced=True)


class _Sums:
    """What the time and the stack of compiling a schema depend on, added up over its parts."""

    def __init__(self) -> None:
        self._references: dict[str, str] = {}
        self._base: str | None = None
        self._multiples: list[tuple[int, int]] = []
        self._num_patterns = self._num_pattern_properties = 0
        self._joins = False

    def add(self, place: str, part: dict[str, Any]) -> None:
        """A schema whose keywords are well-formed."""
        if len(part.get("properties", ())) > MAX_PROPERTIES:
            raise refused(f"{place}/properties", f"an object may have at most {MAX_PROPERTIES}")
        self._num_pattern_properties += len(part.get("patternProperties", ()))
        self._num_patterns += "pattern" in part
        self._joins |= "allOf" in part or "oneOf" in part or ("$ref" in part and len(part) > 1)
        if "multipleOf" in part:
            self._multiples.append(_digits(part["multipleOf"]))
        if "$ref" in part:
            self._references.setdefault(part["$ref"], f"{place}/$ref")
        if place != "#" and not str(part.get("$id", "#")).startswith("#"):
            self._base = f"{place}/$id"
        if self._num_pattern_properties > MAX_PATTERN_PROPERTIES:
            raise refused(f"{place}/patternProperties", f"a schema may have at most {MAX_PATTERN_PROPERTIES} of them")

    def check(self, schema: Any, checked: Set[int]) -> None:
        """All has been added up. checked: ids of the parts of the schema."""
        if self._references and self._base:
            raise refused(self._base, "may be at the root alone where there are references, which would lead from it")
        depth = _depth(schema)
        for reference, place in self._references.items():
            found = resolved(schema, reference, place)
            if id(found) not in checked and not isinstance(found, bool):
                raise refused(place, f"{shown(reference)} is no schema")
            depth += _depth(found)
            if depth > MAX_REFERRED_DEPTH:
                raise refused(place, f"a schema and all that it refers to may be {MAX_REFERRED_DEPTH} deep together")
        if not self._joins:
            return
        if self._num_patterns > MAX_JOINED_PATTERNS:
            raise refused("#", f"at most {MAX_JOINED_PATTERNS} patterns go together with allOf, oneOf or beside $ref")
        places = max((decimals for _, decimals in self._multiples), default=0)
        if math.lcm(*(number * 10 ** (places - decimals) for number, decimals in self._multiples)) > MAX_MULTIPLE:
            raise refused(
                "#", f"the least common multiple of all multipleOf may be {MAX_MULTIPLE} beside allOf, oneOf or $ref"
            )


def _digits(number: float) -> tuple[int, int]:
    """A number over 0 without its decimal point, and how many decimals it had: 0.25 is 25 and 2."""
    numerator, denominator = Decimal(str(number)).as_integer_ratio()
    decimals = 0
    while denominator > 1 and decimals < 20:
        divisor = math.gcd(denominator, 10)
        numerator, denominator, decimals = numerator * 10 // divisor, denominator // divisor, decimals + 1
    return numerator, decimals


def _depth(schema: Any) -> int:
    """Schemas in one another, without what is only defined in it."""
    deepest, parts = 0, [(schema, 1)]
    while parts:
        part, depth = parts.pop()
        deepest = max(deepest, depth)
        if isinstance(part, dict):
            used = {keyword: value for keyword, value in part.items() if keyword not in ("$defs", "definitions")}
            parts.extend((value, depth + 1) for _, value in parts_of("", used))
    return deepest


def resolved(schema: Any, reference: str, place: str) -> Any:
    """The schema that a reference leads to. Raises for one that leads nowhere."""
    found = schema
    for name in reference.split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise refused(place, f"there is no {shown(reference)} in the schema") from None
    if not _is_schema(found):
        raise refused(place, f"{shown(reference)} is no schema")
    return found


def parts_of(place: str, schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas right in a schema whose keywords are well-formed, with their places."""
    if isinstance(schema, bool):
        return
    for keyword, value in schema.items():
        at = f"{place}/{escaped(keyword)}"
        if keyword in ONE:
            yield at, value
        elif keyword in SEVERAL:
            yield from ((f"{at}/{index}", item) for index, item in enumerate(value))
        elif keyword in NAMED:
            yield from ((f"{at}/{escaped(name)}", item) for name, item in value.items())
