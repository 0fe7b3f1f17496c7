"""Arguments as programs write them, by a schema: f(city="Rome", days=3) and {city:<|"|>Rome<|"|>,days:3}.

Where strings are those of JSON, a value is JSON, but that Python's words stand for true, false and null where these
are whole arguments. Else a value is spelled out here, by the keywords that this has words for; others are refused.
Arguments come in the schema's order, and no others.
"""

import json
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Final

from aserve.constraints.json_schema import enforced_in
from aserve.text.formats.bare import BareArguments

DELIMITERS: Final = frozenset("{}[](),:='\"<> \t\r\n|\\")
"""No part of an argument's name."""
ANY_NAME: Final = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
SCALARS: Final = ("integer", "number", "boolean", "null")
WORDS: Final = {"boolean": '("True" | "False")', "null": '"None"'}
KNOWN: Final = {
    "string": {"enum", "const", "minLength", "maxLength"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""Keywords of a schema that is spelled out, by its type."""
MAX_DEPTH: Final = 16
MAX_PROPERTIES: Final = 600
"""Of one tool, those of objects in one another and of definitions together: each is a rule in the one before it."""


class Refusal(Exception):
    """What of a schema cannot be spelled, with its place."""


class BareGrammar:
    """Of one tool's arguments. lines: rules that are made on the way.

    as_json: a schema as a term. lazy: a text by a regular expression, and its end, as a term. prefix: of its rules.
    """

    def __init__(
        self,
        part: BareArguments,
        as_json: Callable[[Mapping[str, Any]], str],
        lazy: Callable[[str, str], str],
        terms: Callable[[str], str],
        prefix: str,
    ) -> None:
        self.lines: list[str] = []
        self._part = part
        self._is_json = '"' in part.quotes
        self._assign = "=" if part.begin == "(" else ":"
        self._as_json, self._lazy, self._terms, self._prefix = as_json, lazy, terms, prefix
        self._definitions: dict[str, Any] = {}
        self._named: dict[str, str] = {}
        self._num_properties = 0

    def arguments(self, schema: Mapping[str, Any] | None) -> str:
        """All arguments, with the brackets around. schema: None is any."""
        end = ")" if self._part.begin == "(" else "}"
        self._definitions = {key: schema[key] for key in ("$defs", "definitions") if schema and key in schema}
        given = {"type": "object"} if schema is None else {"type": "object", **schema}
        return f"{json.dumps(self._part.begin)} {self._members(given, '#')} {json.dumps(end)}"

    def _members(self, schema: Mapping[str, Any], place: str) -> str:
        """Names and values, of which some may be left out."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if missing := [name for name in required if name not in properties]:
            raise Refusal(f"no property {missing[0]}, which is required")
        separator = '", "' if self._is_json else '","'
        if not properties:
            if schema.get("additionalProperties") is False:
                return ""
            member = f"{ANY_NAME} {json.dumps(self._assign)} {self._any()}"
            return f"({member} ({separator} {member})*)?"
        self._num_properties += len(properties)
        if self._num_properties > MAX_PROPERTIES:
            raise Refusal(f"{place}/properties: a tool may have at most {MAX_PROPERTIES} in these calls, in all")
        first, rest = "", ""  # behind the last one there is nothing
        for name, value in reversed(properties.items()):
            where = f"{place}/properties/{name}"
            if value is False or not name or set(name) & DELIMITERS:
                raise Refusal(f"{where} cannot be written as an argument")
            member = f"{json.dumps(name + self._assign)} {self._value({} if value is True else value, where)}"
            needed = name in required
            first, rest = (
                self._rule(f"{member} {rest}" + ("" if needed else f" | {first or self._empty}")),
                self._rule(f"{separator} {member} {rest}" + ("" if needed else f" | {rest or self._empty}")),
            )
        return first

    _empty: Final = '""'

    def _value(self, schema: Mapping[str, Any], place: str, depth: int = 0) -> str:
        if self._is_json:
            return self._python(schema)
        if depth > MAX_DEPTH:
            raise Refusal(f"{place} is nested too deeply")
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), place)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                each = [self._value(one, f"{place}/{key}/{at}", depth + 1) for at, one in enumerate(schema[key])]
                return f"({' | '.join(each)})"
        if "enum" in schema or "const" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return f"({' | '.join(self._constant(value, place) for value in values)})"
        kind = schema.get("type")
        if isinstance(kind, list):
            return f"({' | '.join(self._value(one, place, depth + 1) for one in _by_type(schema))})"
        if kind is None and not enforced_in(schema):
            return self._any()
        if kind in SCALARS:
            return self._as_json(schema)
        return self._spelled(schema, str(kind), place, depth)

    def _python(self, schema: Mapping[str, Any]) -> str:
        """JSON, or one of Python's words."""
        parts = _by_type(schema) if isinstance(schema.get("type"), list) else schema.get("anyOf", [schema])
        if schema.keys() & {"enum", "const", "allOf"} or not all(isinstance(part, Mapping) for part in parts):
            parts = [schema]
        words = [WORDS.get(str(part.get("type"))) if enforced_in(part) <= {"type"} else None for part in parts]
        return " | ".join(
            word or self._as_json({**self._definitions, **part}) for word, part in zip(words, parts, strict=True)
        ).join("()")

    def _spelled(self, schema: Mapping[str, Any], kind: str, place: str, depth: int) -> str:
        """A string, an array or an object."""
        if kind not in KNOWN or (unknown := enforced_in(schema) - {"type", *KNOWN[kind]}):
            raise Refusal(f"{place}: {', '.join(sorted(unknown)) if kind in KNOWN else kind} cannot be enforced here")
        if kind == "string":
            return self._string(schema.get("minLength", 0), schema.get("maxLength", ""))
        if kind == "object":
            return f'"{{" {self._members(schema, place)} "}}"'
        items = schema.get("items", {})
        item = self._rule(self._value({} if items is True else items, f"{place}/items", depth + 1))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {more if least else f"({more})?"} "]"'

    def _reference(self, name: str, place: str) -> str:
        """A definition of the schema's, which may refer to itself."""
        if name in self._named:
            return self._named[name]
        root, _, key = name.removeprefix("#/").partition("/")
        found = self._definitions.get(root, {}).get(key)
        if not isinstance(found, Mapping):
            raise Refusal(f"{place}: {name} cannot be followed here")
        rule = self._named[name] = self._new_name()
        self.lines.append(f"{rule}: {self._value(found, name)}")
        return rule

    def _constant(self, value: Any, place: str) -> str:
        if isinstance(value, str):
            if self._part.quotes[0] in value:
                raise Refusal(f"{place}: {value!r} cannot be written here")
            return self._terms(self._part.quotes[0] + value + self._part.quotes[0])
        if isinstance(value, (dict, list)):
            raise Refusal(f"{place}: an enum of objects or arrays cannot be enforced here")
        return json.dumps(json.dumps(value))

    def _string(self, least: int = 0, most: int | str = "") -> str:
        quote = self._part.quotes[0]
        text = f"/(.|\\n){{{least},{most}}}/" if least or most != "" else "TEXT"
        return f"{self._terms(quote)} {self._lazy(quote, text)}"

    def _any(self) -> str:
        """Any value: what JSON has, with the strings of this format."""
        if self._is_json:
            return self._as_json({})
        if "" not in self._named:
            rule = self._named[""] = self._new_name()
            scalars = " | ".join(self._as_json({"type": kind}) for kind in SCALARS)
            member = f'{ANY_NAME} ":" {rule}'
            array, nested = f'"[" ({rule} ("," {rule})*)? "]"', f'"{{" ({member} ("," {member})*)? "}}"'
            self.lines.append(f"{rule}: {scalars} | {self._string()} | {array} | {nested}")
        return self._named[""]

    def _rule(self, body: str) -> str:
        name = self._new_name()
        self.lines.append(f"{name}: {body}")
        return name

    def _new_name(self) -> str:
        return f"{self._prefix}_{len(self.lines) + len(self._named)}"


def _by_type(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A schema of several types as one of each, with the keywords that are of any other type left out."""
    others = {kind: {*chain.from_iterable(KNOWN[other] for other in KNOWN if other != kind)} for kind in schema["type"]}
    return [
        {**{key: value for key, value in schema.items() if key not in others[kind]}, "type": kind}
        for kind in schema["type"]
    ]
