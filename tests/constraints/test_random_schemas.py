"""Schemas made at random, and answers drawn at random from what their masks leave: jsonschema finds each valid.

What is not enforced, or enforced in another sense than the standard's, shows as an answer that is not valid.
"""

import json
import random
from typing import Any

import jsonschema
import pytest

from aserve.constraints.compiler import Compiler
from aserve.constraints.matcher import Compiled
from aserve.core.errors import InvalidRequestError
from aserve.core.structured import StructuredOutputs
from tests.engines import EOS, VOCAB_SIZE, byte_tokenizer

NAMES = ("a", "b", "long name", "é")
CHECKER = jsonschema.FormatChecker(("date", "ipv4", "ipv6", "uuid", "email"))
LIKELY = frozenset(b'"}],0123')
"""Tokens that bring an answer to its end, and are taken more often."""


def random_schema(rng: random.Random, depth: int) -> Any:
    """Of any keywords that are enforced, some of which say nothing of the others' values."""
    if depth == 0 or rng.random() < 0.05:
        return rng.choice([True, {}, {"type": "boolean"}, {"const": 1}, {"enum": ["x", 2, None]}])
    schema: dict[str, Any] = {}
    for keywords in rng.sample([_of_strings, _of_numbers, _of_arrays, _of_objects, _of_any], rng.randint(1, 2)):
        schema |= keywords(rng, depth - 1)
    return schema


def _of_strings(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return rng.choice(
        [
            {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 4)},
            {"type": "string", "pattern": rng.choice(["^a+b?$", "b", "^[0-9]{2}", "x$", "^(no|yes)$"]), "maxLength": 9},
            {"type": "string", "format": rng.choice(["date", "ipv4", "ipv6", "uuid"])},
            {"minLength": low},
        ]
    )


def _of_numbers(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(-20, 20)
    kind = rng.choice(["integer", "number"])
    return rng.choice(
        [
            {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 30)},
            {"type": kind, "exclusiveMinimum": low, "exclusiveMaximum": low + 2.5},
            {"type": "integer", "multipleOf": rng.choice([2, 3, 10]), "minimum": low, "maximum": low + 60},
            {"minimum": low},
        ]
    )


def _of_arrays(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if rng.random() < 0.8:
        schema["items"] = random_schema(rng, depth)
    if rng.random() < 0.4:
        schema["prefixItems"] = [random_schema(rng, depth) for _ in range(rng.randint(1, 2))]
    return schema


def _of_objects(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 3))
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, depth) for name in names}}
    if rng.random() < 0.7:
        schema["required"] = rng.sample(NAMES, rng.randint(0, 2))
    schema["additionalProperties"] = rng.choice([False, False, random_schema(rng, 0)])
    if rng.random() < 0.2:
        schema["patternProperties"] = {"^p": random_schema(rng, 0)}
    return schema


def _of_any(rng: random.Random, depth: int) -> dict[str, Any]:
    keyword = rng.choice(["anyOf", "allOf", "oneOf", "type", "enum"])
    if keyword == "type":
        return {"type": rng.sample(["null", "boolean", "integer", "string"], 2), "maxLength": 4}
    if keyword == "enum":
        return {"enum": rng.sample([1, 2.5, "a", None, [1], {"a": 1}, True, "long name"], 4)}
    return {keyword: [random_schema(rng, depth) for _ in range(rng.randint(1, 2))]}


def answer(compiled: Compiled, rng: random.Random) -> str | None:
    """A text drawn from what is allowed; None where it has found no end."""
    constraint, said = compiled.constraint(), bytearray()
    while len(said) < 400:
        mask = constraint.masks()
        assert constraint.failure is None
        allowed = [i for i in range(VOCAB_SIZE) if mask[i // 8] >> i % 8 & 1]
        likely = [i for i in allowed if i in LIKELY or i == EOS]
        token_id = rng.choice(likely if likely and rng.random() < 0.6 else allowed)
        if token_id == EOS:
            return said.decode()
        said.append(token_id)
        constraint.advance([token_id])
    return None


@pytest.mark.slow
def test_whatever_a_schema_says_answers_are_valid() -> None:
    compiler = Compiler(byte_tokenizer(), VOCAB_SIZE, frozenset({EOS}))
    num_refused = num_answers = 0
    for seed in range(400):
        rng = random.Random(seed)
        schema = random_schema(rng, 3)
        try:
            compiled = compiler.compiled(StructuredOutputs(json=json.dumps(schema)))
        except InvalidRequestError:
            num_refused += 1
            continue
        validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
        for _ in range(4):
            text = answer(compiled, rng)
            if text is not None:
                num_answers += 1
                assert validator.is_valid(json.loads(text)), f"{seed}: {text} by {schema}"
    assert num_refused < 200
    assert num_answers > 600
