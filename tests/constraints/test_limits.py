"""What would end the process in llguidance, or answer with another number, is refused before it gets there."""

import json
import random
import subprocess
import sys
from typing import Any

import pytest

from aserve.constraints.compiler import Compiler
from aserve.core.errors import InvalidRequestError
from aserve.core.structured import StructuredOutputs
from tests.engines import byte_tokenizer

EOS = 256
LEAST = -(2**63)
CHILD = """
import json, sys, threading
from aserve.core.errors import InvalidRequestError
from aserve.core.structured import StructuredOutputs
from tests.constraints.test_limits import compiler_of_bytes
told, compiler = [], compiler_of_bytes()
def compile():
    for fields in json.load(sys.stdin):
        try:
            compiler.compiled(StructuredOutputs(**fields)).constraint().masks()
            told.append("")
        except InvalidRequestError as error:
            told.append(error.message)
thread = threading.Thread(target=compile)
thread.start()
thread.join()
json.dump(told, sys.stdout)
"""


def compiler_of_bytes() -> Compiler:
    return Compiler(byte_tokenizer(), 300, frozenset({EOS}))


def told_by_a_child(structures: list[dict[str, Any]]) -> list[str]:
    """What is told of each, compiled in a thread of another process, which must outlive them; "" where all is well."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(structures), capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr[-2000:]
    told: list[str] = json.loads(child.stdout)
    return told


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return compiler_of_bytes()


def answers(compiler: Compiler, schema: Any, tries: int = 12) -> set[str]:
    """Answers drawn at random, as far as they end."""
    compiled, found = compiler.compiled(StructuredOutputs(json=schema)), set()
    for seed in range(tries):
        rng, said, constraint = random.Random(seed), bytearray(), compiled.constraint()
        for _ in range(100):
            mask = constraint.masks()
            token_id = rng.choice([i for i in range(EOS + 1) if mask[i // 8] >> i % 8 & 1])
            if token_id == EOS:
                found.add(said.decode())
                break
            said.append(token_id)
            constraint.advance([token_id])
    return found


@pytest.mark.slow
def test_bounds_beyond_whole_numbers_are_refused_and_end_no_process() -> None:
    """Catches ranges both of whose ends are the least number of 64 bits to llguidance, which recurses for ever."""
    integer = {"type": "integer"}
    cases = [
        (integer | {"minimum": LEAST, "maximum": LEAST + 1}, "#/minimum", str(LEAST)),
        (integer | {"maximum": -9.3e18, "minimum": -1e19}, "#/maximum", "-9.3e+18"),
        (integer | {"exclusiveMaximum": LEAST + 1, "minimum": -1e25}, "#/exclusiveMaximum", str(LEAST + 1)),
        (integer | {"const": -1e19}, "#/const", "-1e+19"),
        ({"anyOf": [integer, {"enum": [LEAST]}]}, "#/anyOf/1/enum/0", str(LEAST)),
    ]
    told = told_by_a_child([{"json": schema} for schema, _, _ in cases])
    for message, (_, place, given) in zip(told, cases, strict=True):
        assert message.startswith(f"the JSON schema at {place}: must be a number ")
        assert "9007199254740991" in message
        assert f"got {given}" in message


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": 2**53 + 1}, "#/const"),
        ({"enum": ["a", 1099511627776123457]}, "#/enum/1"),
        ({"items": {"const": {"a/b": [1, {"c": 2**53 + 1}]}}}, "#/items/const/a~1b/1/c"),
        ({"const": 2**64}, "#/const"),
        ({"const": 2.0**60}, "#/const"),  # it would be told as 1152921504606847000
        ({"type": "integer", "maximum": 2**53}, "#/maximum"),
        ({"type": "integer", "exclusiveMinimum": -(2**53)}, "#/exclusiveMinimum"),
        ({"type": "number", "minimum": 1e16}, "#/minimum"),
    ],
    ids=str,
)
def test_numbers_that_would_be_rounded_are_refused_at_their_place(
    compiler: Compiler, schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(InvalidRequestError, match="must be a number") as caught:
        compiler.compiled(StructuredOutputs(json=schema))
    assert caught.value.message.startswith(f"the JSON schema at {place}: ")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"const": 2**53 - 1}, {"9007199254740991"}),
        ({"const": -(2**60)}, {"-1152921504606846976"}),
        ({"type": "number", "enum": [2**60, 0.1]}, {"1152921504606846976", "0.1"}),
        ({"const": 1e18}, {"1000000000000000000"}),
        ({"const": 1.0}, {"1"}),
        ({"const": 1e3}, {"1000"}),
        ({"const": -0.0}, {"-0"}),
        ({"const": -12345678901234.5}, {"-12345678901234.5"}),
        (
            {"type": "integer", "minimum": 2**53 - 2, "maximum": 2**53 - 1},
            {"9007199254740990", "9007199254740991"},
        ),
        ({"type": "integer", "exclusiveMinimum": 1 - 2**53, "maximum": 2 - 2**53}, {"-9007199254740990"}),
    ],
    ids=str,
)
def test_numbers_that_are_taken_are_answered_to_the_last_digit(
    compiler: Compiler, schema: dict[str, Any], said: set[str]
) -> None:
    assert answers(compiler, schema) == said


NINES = "9" * 310


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (f'{{"const": {NINES}}}', "#/const: must be a number within a double's range, got an integer of"),
        (f'{{"enum": [1, -{NINES}]}}', "#/enum/1: must be a number within a double's range"),
        (f'{{"items": {{"default": {NINES}}}}}', "#/items/default: must be a number within a double's range"),
        ('{"examples": [{"a": 1e400}]}', "#/examples/0/a: must be a number within a double's range, got inf"),
        ('{"title": NaN}', "#/title: must be a number within a double's range, got nan"),
        (f'{{"maximum": {NINES}}}', "#/maximum: must be a number in"),
        (f'{{"multipleOf": {NINES}}}', "#/multipleOf: must be a number over 0"),
        ('{"default": ' + "[" * 500 + "]" * 500 + "}", "#/default: values may be nested 64 deep"),
        ('{"const": ' + "[" * 65 + "]" * 65 + "}", "#/const: values may be nested 64 deep"),
        ('{"$comment": ' + '{"a":' * 65 + "1" + "}" * 66, "#/$comment: values may be nested 64 deep"),
        ('{"const": "\\ud800"}', "#: "),  # half a character: told by the library
        ('{"properties": {"a": ' * 63 + "{}" + "}}" * 63, "#"),  # 64 schemas, and JSON 127 deep
    ],
    ids=lambda value: value[:25],
)
def test_what_the_library_cannot_read_is_refused(compiler: Compiler, schema: str, told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compiled(StructuredOutputs(json=schema))
    assert caught.value.message.startswith(f"the JSON schema at {told}")
    assert len(caught.value.message) < 400


def test_annotations_may_have_any_other_value(compiler: Compiler) -> None:
    deep = json.loads("[" * 64 + "]" * 64)
    schema = {"const": 1, "default": deep, "examples": [10**300, 1e308, 2**53 + 1]}
    assert answers(compiler, schema) == {"1"}


NUMBER = {"type": "integer", "minimum": LEAST, "maximum": LEAST + 1}
IN_A_BASE = {"x": {"$id": "http://a/x", "$ref": "#/$defs/y", "$defs": {"y": {"const": 1}}}, "y": {"const": 2}}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"$ref": "#/examples/0", "examples": [NUMBER]}, "#/$ref: '#/examples/0' is no schema"),
        ({"$ref": "#/const", "const": NUMBER["type"]}, "#/$ref: '#/const' is no schema"),
        ({"$ref": "#/$defs", "$defs": {"const": {"default": LEAST}}}, "#/$ref: '#/$defs' is no schema"),
        ({"$ref": "#/$defs/%61", "$defs": {"%61": {}, "a": {}}}, "#/$ref: must be a reference into"),
        ({"$ref": "#/$defs/x", "$defs": IN_A_BASE}, "#/$defs/x/$id: may be at the root alone"),
    ],
    ids=str,
)
def test_references_lead_to_what_was_checked(compiler: Compiler, schema: dict[str, Any], told: str) -> None:
    """Catches schemas that are looked at in one place and enforced from another."""
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compiled(StructuredOutputs(json=schema))
    assert caught.value.message.startswith(f"the JSON schema at {told}")


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "http://a/x", "$ref": "#/$defs/y", "$defs": {"y": {"const": 1}}},
        {"$id": "http://a/x", "items": {"$id": "b.json"}, "const": 1},
        {"$defs": {"y": {"$id": "#y", "const": 1}}, "$ref": "#/$defs/y"},
    ],
    ids=str,
)
def test_names_of_schemas_that_lead_nowhere_are_taken(compiler: Compiler, schema: dict[str, Any]) -> None:
    assert answers(compiler, schema) == {"1"}
