"""What would end the process in llguidance, or answer with another number, is refused before it gets there."""

import json
import random
import subprocess
import sys
import time
from typing import Any

import pytest

from aserve.constraints.compiler import Compiler
from aserve.constraints.formats import with_patterns
from aserve.constraints.references import depth_of
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
threading.stack_size(int(sys.argv[1]))
thread = threading.Thread(target=compile)
thread.start()
thread.join()
json.dump(told, sys.stdout)
"""


def compiler_of_bytes() -> Compiler:
    return Compiler(byte_tokenizer(), 300, frozenset({EOS}))


def told_by_a_child(structures: list[dict[str, Any]], stack_bytes: int = 0) -> list[str]:
    """What is told of each, compiled in a thread of another process, which must outlive them; "" where all is well."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(stack_bytes)],
        input=json.dumps(structures),
        capture_output=True,
        text=True,
        timeout=120,
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
        (integer | {"minimum": LEAST, "maximum": LEAST + 1}, "#/maximum", str(LEAST + 1)),
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
        ({"type": "integer", "maximum": -(2**53)}, "#/maximum"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "#/exclusiveMinimum"),
        ({"type": "number", "minimum": 1e16}, "#/minimum"),
        ({"type": "number", "maximum": 10**400}, "#/maximum"),
    ],
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
        ({"type": "integer", "minimum": 2**53 - 1, "maximum": 2**63 - 1}, {"9007199254740991"}),
        ({"allOf": [{"type": "integer", "minimum": -(2**63)}, {"maximum": 1 - 2**53}]}, {"-9007199254740991"}),
    ],
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
        (f'{{"maximum": {NINES}}}', "#/maximum: must be a number of at least -9007199254740991"),
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


def chained(length: int, link: str, name: str = "r") -> str:
    """A grammar of rules each of which has the next one in it."""
    links = [f"{name}{i}: {link.format(f'{name}{i + 1}')}" for i in range(length)]
    return "\n".join([f"start: {name}0", *links, f'{name}{length}: "a"', ""])


GBNF = "\n".join(["root ::= r0 r0", *(f'r{i} ::= r{i + 1} | "b" root' for i in range(1500)), 'r1500 ::= "a"', ""])
TOO_DEEP = {
    "rules": chained(4000, "{}"),
    "terminals": chained(4500, "{}", "T"),
    "what terminals are not": chained(3500, "~{}", "T"),
    "optional terminals": chained(2600, '("b" {})?', "T"),
    "rules that lead back": chained(3500, "{}").replace('"a"', 'r0 | "a"'),
    "brackets": chained(400, "(" * 28 + "{}" + ")" * 28),
    "brackets of terminals": chained(400, "(~" * 25 + "{}" + ")" * 25, "T"),
    "attributes": "start: r0\n" + "".join(f"r{i}[suffix=T{i}]: /b/\nT{i}: {{}}\n" for i in range(3)).format(
        "T1", "T2", "S0\n" + chained(3000, "{}", "S").partition("\n")[2]
    ),
    "gbnf": GBNF,
}  # fmt: skip


@pytest.mark.slow
def test_rules_that_refer_too_deep_are_refused_and_end_no_process() -> None:
    for message in told_by_a_child([{"grammar": grammar} for grammar in TOO_DEEP.values()]):
        assert message.startswith("the grammar: rules and terminals that refer to one another")
        assert "600 deep" in message


@pytest.mark.slow
def test_rules_within_the_bound_compile_with_room_on_the_stack() -> None:
    """In a thread whose stack is a quarter of what threads have."""
    within = [
        chained(597, "{}"),
        chained(597, "~{}", "T"),
        chained(298, '("b" {})?', "T"),
        chained(298, '~("b" | /c+/ & {})', "T"),
        chained(20, "(" * 28 + "{}" + ")" * 28),
        chained(20, '("b" ' * 28 + "{}" + ")*" * 28, "T"),
        chained(597, "{}").replace('"a"', 'r0 | "a"'),
    ]
    assert told_by_a_child([{"grammar": grammar} for grammar in within], stack_bytes=2**21) == [""] * len(within)


@pytest.mark.parametrize(
    ("lark", "depth"),
    [
        ('start: "a"', 1),
        ("start: a b\na: b\nb: C\nC: /c/", 4),
        ("start: a b\na: ((b))\nb: C", 5),
        ("start: a\na: b | C\nb: a | start\nC: D\nD: /d/", 5),
        ('start: a\na: "b: c" /b\nc:/ # d: e\n | <b> // f: g\nb: /x/', 2),
        ('start: "x"ia\na: /y/sb\nb: 0xabz\nz: "z"', 4),
        ('start: a\na[capture="b", stop=T]: /x/\nT: ~S\nS: "s"\nb: /b/', 5),
        ("start: a::0x0\na::_: b::incr([0:3]) %if is_ones([0:3])\nb::_.5: c\n_c: ?d\n!d: /x/", 7),
        ("?start: a\n | b\nb: (c\n | d)\nc: d\nd:", 5),
        ('start: T\nT: %regex {"substring_chars": "a: b"} S\nS: "x"', 4),
    ],
)
def test_how_deep_rules_refer_to_one_another(lark: str, depth: int) -> None:
    assert depth_of(lark) == depth


@pytest.mark.timing
@pytest.mark.parametrize("piece", ["/a\\", '"\\', "/", "<a", "(", "a ", "a: b\n", "/\\\n"])
def test_no_text_takes_long_to_look_through(piece: str) -> None:
    begin = time.monotonic()
    depth_of("start: a\n" + piece * (64 * 1024 // len(piece)))
    assert time.monotonic() - begin < 0.5


def test_a_grammar_of_many_rules_compiles(compiler: Compiler) -> None:
    """As grammars of programming languages have them: expressions in one another, which lead back, and keywords."""
    levels = [f'e{i}: e{i + 1} ("o{i}" e{i + 1})*' for i in range(40)]
    words = [f'k{i}: W{i} e0\nW{i}: "w{i}"' for i in range(400)]
    grammar = [
        "start: s+",
        "s: " + " | ".join(f"k{i}" for i in range(400)),
        *levels,
        'e40: "(" e0 ")" | /[0-9]/',
        *words,
    ]
    compiled = compiler.compiled(StructuredOutputs(grammar="\n".join(grammar)))
    constraint = compiled.constraint()
    said = list(b"w399((1o39(2)))w1")
    assert constraint.num_valid(said) == len(said)


def takes(compiler: Compiler, schema: dict[str, Any], text: str) -> bool:
    """Whether a text is an answer, whole."""
    constraint = compiler.compiled(StructuredOutputs(json=schema)).constraint()
    if constraint.num_valid(list(text.encode())) < len(text):
        return False
    constraint.advance(list(text.encode()))
    return bool(constraint.masks()[EOS // 8] >> EOS % 8 & 1)


def joined(**keywords: object) -> list[dict[str, Any]]:
    """Bounds of one schema, and of several that are joined."""
    apart = [{key: value} for key, value in keywords.items()]
    return [
        {"type": "number", **keywords},
        {"allOf": [{"type": "number"}, *apart]},
        {"$ref": "#/$defs/a", "type": "number", **apart[1], "$defs": {"a": apart[0]}},
        {"type": "number", **apart[0], "anyOf": [apart[1], {"type": "null"}]},
    ]


@pytest.mark.parametrize(
    ("bounds", "excluded", "taken"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.1}, ["0", "0.0", "0.00", "-0"], ["0.1", "0.05", "0.000001"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0", "0.5", "0.50"], ["0.4", "0.0001"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1", "1.0", "1.000"], ["1.5", "1.000001"]),
        ({"exclusiveMaximum": -1, "minimum": -1.5}, ["-1", "-1.0"], ["-1.5", "-1.0001"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["0", "-0", "-0.0"], ["-0.5", "-0.001"]),
        ({"exclusiveMaximum": 1, "minimum": 0.5}, ["1", "1.0"], ["0.5", "0.9999"]),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, ["-1", "-1.0"], ["-0.5", "-0.9999"]),
    ],
    ids=str,
)
def test_a_bound_that_is_excluded_never_comes(
    compiler: Compiler, bounds: dict[str, float], excluded: list[str], taken: list[str]
) -> None:
    for schema in joined(**bounds):
        assert [text for text in excluded if takes(compiler, schema, text)] == []
        assert [text for text in taken if not takes(compiler, schema, text)] == []


@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"]], ids=str)
def test_exclusive_bounds_of_joined_schemas_keep_whole_numbers(compiler: Compiler, kind: object) -> None:
    schema = {"allOf": [{"type": kind, "exclusiveMinimum": 3}, {"exclusiveMaximum": 6}]}
    assert [text for text in "3456" if takes(compiler, schema, text)] == ["4", "5"]
    near = {"allOf": [{"type": "integer", "exclusiveMinimum": 10**15 - 2}, {"maximum": 10**15}]}
    assert [add for add in (-2, -1, 0) if takes(compiler, near, str(10**15 + add))] == [-1, 0]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0.5, "maximum": 1}, {"type": "null"}], "title": "t"},
        {"type": "object", "properties": {"a": {"type": "integer", "exclusiveMaximum": 3, "minimum": 1}}},
    ],
    ids=str,
)
def test_bounds_that_are_kept_anyway_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert with_patterns(schema) == {key: value for key, value in schema.items() if key != "title"}
