"""Compiling structures within bounds: bytes and depth before llguidance sees them, its own fuel, one mask, a cache.

    StructuredOutputs --> cached? --> grammar --> LLMatcher: an error? a warning? --> first mask: none? --> Compiled
                                      bounds      fuel for automata, items, states    a loop of references

May be called in any thread, and of so many at once as structures.py lets.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Set
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from aserve.constraints.grammars import grammar_of, json_grammar, parsed_json
from aserve.constraints.json_schema import parts_of
from aserve.constraints.matcher import GAVE_UP, Compiled, in_a_line
from aserve.constraints.places import refused
from aserve.constraints.vocabulary import vocabulary
from aserve.core.errors import InvalidRequestError
from aserve.core.faults import WISHES
from aserve.core.structured import StructuredOutputs
from aserve.text.tokenizer import Tokenizer

MAX_CACHED: Final = 64
"""Compiled structures that are kept, of up to some MB each."""
LOCATING_S: Final = 0.5
"""For finding the place of what is wrong in a schema, which is compiled part by part."""
DEFINITIONS: Final = ("$defs", "definitions", "$schema")
"""What a part of a schema is compiled with, so that it finds what it refers to."""
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=200_000,  # some 14 ms
    step_max_items=50_000,  # some 3 ms
    max_lexer_states=25_000,  # of 1 to 2 kB
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Compiler:
    """Of one model's vocabulary, which is prepared when the first structure is compiled."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._vocabulary: LLTokenizer | None = None
        self._preparing = threading.Lock()
        self._cache: OrderedDict[bytes, Compiled] = OrderedDict()
        self._caching = threading.Lock()

    def compiled(self, structured: StructuredOutputs) -> Compiled:
        """Compile, or find in the cache. Raises `InvalidRequestError`, with the place where a schema has one."""
        if not self._eos_ids:
            raise InvalidRequestError(
                "the model names no end-of-sequence token, without which no structure has an end", "structured"
            )
        key = _key(structured)
        with self._caching:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        made = self._compile(structured)
        with self._caching:
            self._cache[key] = made
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return made

    def _compile(self, structured: StructuredOutputs) -> Compiled:
        grammar = grammar_of(structured, self._special())
        matcher, problem = self._matcher(grammar)
        if matcher is None:
            if structured.kind == "json":
                self._locate(parsed_json(structured.json, "the JSON schema"), problem)
            raise InvalidRequestError(f"structured.{structured.kind}: {problem}", "structured")
        ends = sum(1 << eos_id for eos_id in self._eos_ids)
        return Compiled(matcher, -(-self._vocab_size // 32) * 4, ends)

    def _matcher(self, grammar: str) -> tuple[LLMatcher | None, str]:
        """At the beginning of a grammar; or None, and why not."""
        try:
            matcher = LLMatcher(self._prepared(), grammar, log_level=0, limits=LIMITS)
            if matcher.is_error():
                return None, in_a_line(matcher.get_error())
            if warnings := matcher.get_grammar_warnings():
                return None, in_a_line("; ".join(warnings))
            first = matcher.deep_copy()
            bits = first.compute_bitmask()
        except BaseException as error:  # a panic is no Exception
            if isinstance(error, (MemoryError, *WISHES)):
                raise
            return None, GAVE_UP
        if first.is_error() or not any(bits):
            return None, "no text is valid by it, or none that can be found: a reference that leads to itself, perhaps"
        return matcher, ""

    def _locate(self, schema: Any, problem: str) -> None:
        """Raise for the innermost schema that has the same problem by itself, looked for from the outside in."""
        end_s = time.monotonic() + LOCATING_S
        definitions = {key: schema[key] for key in DEFINITIONS if key in schema} if isinstance(schema, dict) else {}
        place, part = "#", schema
        while True:
            for inner, value in parts_of(place, part):
                if time.monotonic() > end_s or not isinstance(value, dict):
                    continue
                matcher, inner_problem = self._matcher(json_grammar({**definitions, **value}))
                if matcher is None and inner_problem == problem:
                    place, part = inner, value
                    break
            else:
                raise refused(place, problem)

    def _special(self) -> dict[str, int]:
        """The special tokens that a structure may have, by their texts."""
        known = self._tokenizer.special_ids - self._eos_ids
        token_ids = sorted(token_id for token_id in known if token_id < self._vocab_size)
        return dict(zip(self._tokenizer.token_strings(token_ids), token_ids, strict=True))

    def _prepared(self) -> LLTokenizer:
        with self._preparing:
            if self._vocabulary is None:
                self._vocabulary = vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
            return self._vocabulary


def _key(structured: StructuredOutputs) -> bytes:
    """Equal for equal structures. Raises `InvalidRequestError` for what is no JSON."""
    try:
        return msgspec.json.encode(structured)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidRequestError(f"structured.{structured.kind} is no JSON: {error}", "structured") from None
