"""From what a request asks for to a grammar of llguidance. Pure; raises `InvalidRequestError` for what is malformed."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from aserve.constraints.calls import calls_grammar, has_marker
from aserve.constraints.formats import with_patterns
from aserve.constraints.json_schema import check_schema
from aserve.constraints.lark import after_thoughts
from aserve.constraints.matcher import in_a_line
from aserve.constraints.places import refused
from aserve.constraints.references import MAX_DEPTH, depth_of
from aserve.core.errors import InvalidRequestError
from aserve.core.rules import shown
from aserve.core.structured import StructuredOutputs

MAX_SCHEMA_BYTES: Final = 128 * 1024
MAX_REGEX_BYTES: Final = 8 * 1024
MAX_GRAMMAR_BYTES: Final = 64 * 1024
MAX_CHOICE_BYTES: Final = 32 * 1024
MAX_TAGS: Final = 128
WHITESPACE: Final = r"[ \n\r\t]{1,32}"
"""Between the tokens of JSON: enough for any indentation, and not so much that an answer could be nothing else."""
NOT_IN_GRAMMARS: Final = {
    "%lark": "all rules are of one grammar",
    "%json": "give a JSON schema as json",
    "%llguidance": "options of the library are not the request's to set",
    "temperature=": "the request has a temperature",
    "max_tokens=": "the request has max_tokens",
}
_OPTIONS: Final = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}


def grammar_of(structured: StructuredOutputs, special: Mapping[str, int] = MappingProxyType({})) -> str:
    """The grammar of a structure. It has not been compiled: llguidance may refuse it yet.

    special: ids of special tokens by their texts, in which calls of tools and thoughts may be written.
    """
    calls = structured.calls
    if calls is not None and structured.kind == "calls":
        return calls_grammar(calls, special, _OPTIONS)
    grammar, thoughts = _answer_grammar(structured), structured.thoughts
    if calls is not None and has_marker(calls, special):
        return calls_grammar(calls, special, _OPTIONS, otherwise=grammar)
    if thoughts is None or (structured.structural_tag is not None and not thoughts.in_thought):
        return grammar  # thoughts that need not come are free text between tags
    return after_thoughts(grammar, thoughts, special)


def _answer_grammar(structured: StructuredOutputs) -> str:
    match structured.kind:
        case "json":
            return json_grammar(parsed_json(structured.json, "the JSON schema"))
        case "json_object":
            return json_grammar({"type": "object"})
        case "regex":
            _check_size("the regular expression", structured.regex or "", MAX_REGEX_BYTES)
            return LLMatcher.grammar_from_regex(structured.regex or "")
        case "choice":
            choices = structured.choice or ()
            _check_size("the choices", "".join(choices), MAX_CHOICE_BYTES)
            return LLMatcher.grammar_from_regex("|".join(map(_literally, choices)))
        case "grammar":
            return _context_free(structured.grammar or "")
        case _:
            return _tags(parsed_json(structured.structural_tag, "the structural tag"))


def json_grammar(schema: Any) -> str:
    """Of a JSON Schema. Raises `InvalidRequestError` for one that cannot be enforced in full."""
    check_schema(schema)
    if schema is False:
        raise refused("#", "nothing is valid by it")
    spelled = {} if schema is True else with_patterns(schema)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(spelled), overrides=_OPTIONS)  # type: ignore[arg-type]  # a TypedDict
    except ValueError as error:
        raise refused("#", in_a_line(str(error))) from None


def parsed_json(given: Any, what: str) -> Any:
    """A JSON value that was given as such or as text, and its size looked at."""
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        _check_size(what, text, MAX_SCHEMA_BYTES)
        return json.loads(text)
    except RecursionError:
        raise _wrong(f"{what} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _wrong(f"{what} is no JSON: {error}") from None


def _literally(text: str) -> str:
    """A regular expression that matches a text and nothing else."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _context_free(text: str) -> str:
    _check_size("the grammar", text, MAX_GRAMMAR_BYTES)
    for words, hint in NOT_IN_GRAMMARS.items():
        if words in "".join(text.split()):
            raise _wrong(f"the grammar: {words.rstrip('=')} is not for grammars: {hint}")
    try:
        lark = any_to_lark(text)
    except Exception as error:  # of whatever kind a text makes it raise
        raise _wrong(f"the grammar is neither Lark's nor GBNF: {error}") from None
    if (depth := depth_of(lark)) > MAX_DEPTH:
        raise _wrong(
            f"the grammar: rules and terminals that refer to one another, with the brackets in them, may be "
            f"{MAX_DEPTH} deep together, got {depth}"
        )
    return LLMatcher.grammar_from_lark(lark)


def _tags(given: Any) -> str:
    """Text with tags. A tag's content is a JSON Schema."""
    structures, triggers = _tag_fields(given)
    tags = []
    for index, each in enumerate(structures):
        place = f"the structural tag's structures[{index}]"
        if not isinstance(each, Mapping) or set(each) != {"begin", "schema", "end"}:
            raise _wrong(f"{place} must have begin, schema and end, got {shown(each)}")
        begin, end = each["begin"], each["end"]
        if not (isinstance(begin, str) and isinstance(end, str) and begin):
            raise _wrong(f"{place}: begin and end must be strings, and begin not empty")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise _wrong(f"{place}: begin must start with one of the triggers, got {shown(begin)}")
        if not isinstance(each["schema"], dict):
            raise _wrong(f"{place}: schema must be an object")
        check_schema(each["schema"])
        schema = {"x-guidance": _OPTIONS, **with_patterns(each["schema"])}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


def _tag_fields(given: Any) -> tuple[list[Any], list[str]]:
    if not isinstance(given, Mapping) or not set(given) <= {"type", "structures", "triggers"}:
        raise _wrong(f"the structural tag must have structures and triggers, and nothing else, got {shown(given)}")
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not 1 <= len(structures) <= MAX_TAGS:
        raise _wrong(f"the structural tag's structures must be a list of 1 to {MAX_TAGS}, got {shown(structures)}")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise _wrong(f"the structural tag's triggers must be a list of strings, got {shown(triggers)}")
    return structures, triggers


def _check_size(what: str, text: str, most: int) -> None:
    num_bytes = len(text.encode(errors="surrogatepass"))
    if num_bytes > most:
        raise _wrong(f"{what} may have at most {most} bytes, got {num_bytes}")


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, "structured")
