"""Structures compile into masks that allow what they should, within bounds; what cannot be is told, with its place."""

import json
import random
import re
import threading
from pathlib import Path

import pytest

import aserve
from aserve.constraints.compiler import MAX_CACHED, Compiler
from aserve.constraints.matcher import Compiled
from aserve.core.errors import InvalidRequestError
from aserve.core.structured import StructuredOutputs
from aserve.text.tokenizer import Tokenizer
from tests.engines import byte_tokenizer

VOCAB_SIZE = 300
EOS = 256
EOS_OF_DEMO = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, VOCAB_SIZE, frozenset({EOS}))


def allowed(compiled: Compiled, said: bytes) -> set[int]:
    constraint = compiled.constraint()
    constraint.advance(list(said))
    mask = constraint.masks()
    assert len(mask) == -(-VOCAB_SIZE // 32) * 4
    return {byte * 8 + bit for byte, bits in enumerate(mask) for bit in range(8) if bits >> bit & 1}


def says(compiled: Compiled, seed: int, most: int = 400) -> bytes | None:
    """An answer drawn at random from what is allowed; None if it has no end by then."""
    rng, said = random.Random(seed), bytearray()
    constraint = compiled.constraint()
    for _ in range(most):
        mask = constraint.masks()
        assert constraint.failure is None
        token_id = rng.choice([i for i in range(VOCAB_SIZE) if mask[i // 8] >> i % 8 & 1])
        if token_id == EOS:
            return bytes(said)
        assert token_id < 256, "a special token, or one that there is not"
        said.append(token_id)
        constraint.advance([token_id])
    return None


@pytest.mark.parametrize("drafts", [b"d", b"de", b"dx", b"x", b"defg"])
def test_masks_of_drafts_leave_it_where_it_is(compiler: Compiler, drafts: bytes) -> None:
    constraint = compiler.compiled(StructuredOutputs(choice=("abcdef",))).constraint()
    constraint.advance(list(b"abc"))
    mask = constraint.masks()
    assert constraint.masks(drafts).startswith(mask)
    assert constraint.masks() == mask


def test_memory_that_is_short_is_not_the_structures_fault(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: object, **_options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("aserve.constraints.compiler.LLMatcher", fails)
    with pytest.raises(MemoryError):
        compiler.compiled(StructuredOutputs(choice=("never compiled before",)))


def test_an_answer_ends_only_where_it_is_complete(compiler: Compiler) -> None:
    yes = compiler.compiled(StructuredOutputs(choice=("yes", "yet", "y")))
    assert allowed(yes, b"") == {ord("y")}
    assert allowed(yes, b"y") == {ord("e"), EOS}
    assert allowed(yes, b"ye") == {ord("s"), ord("t")}
    assert allowed(yes, b"yes") == {EOS}


PETS = {
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}},
    "$defs": {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name}},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for name in ("cat", "dog")
    },
}
"""A discriminated union, as pydantic has it."""


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({"regex": r"^[a-c]{2}\d$"}, lambda text: len(text) == 3 and text[2].isdigit()),
        (
            {"choice": ['a"b\\', "\x01\x7f\n", "é😀-[", "/x/"]},
            lambda text: text in ('a"b\\', "\x01\x7f\n", "é😀-[", "/x/"),
        ),
        ({"grammar": 'root ::= "a" ("b" | "c")'}, lambda text: text in ("ab", "ac")),
        ({"grammar": 'start: "a" /[bc]/'}, lambda text: text in ("ab", "ac")),
        ({"json": {"enum": ["a", 1, None]}}, lambda text: json.loads(text) in ("a", 1, None)),
        ({"json": '{"const": {"a": [true]}}'}, lambda text: json.loads(text) == {"a": [True]}),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 17}}, lambda text: 3 <= int(text) <= 17),
        ({"json": PETS}, lambda text: json.loads(text)["kind"] in ("cat", "dog")),
    ],
    ids=["regex", "choice", "gbnf", "lark", "enum", "const", "integer", "told apart"],
)
def test_what_comes_out_is_what_was_asked_for(compiler: Compiler, fields: dict[str, object], good) -> None:
    compiled = compiler.compiled(StructuredOutputs(**fields))
    for seed in range(20):
        answer = says(compiled, seed)
        assert answer is not None
        assert good(answer.decode()), answer


def test_an_object_is_an_object(compiler: Compiler) -> None:
    assert allowed(compiler.compiled(StructuredOutputs(json_object=True)), b"") == {ord("{")}


def test_tags_follow_their_trigger_and_text_is_free(compiler: Compiler) -> None:
    tag = {"begin": "<f=x>", "schema": {"type": "integer", "minimum": 1, "maximum": 2}, "end": "</f>"}
    given = {"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}
    compiled = compiler.compiled(StructuredOutputs(structural_tag=given))
    assert {EOS, ord("a"), ord("<")} <= allowed(compiled, b"any text ")
    assert allowed(compiled, b"text <f") == {ord("=")}
    assert allowed(compiled, b"text <f=x>") == {ord("1"), ord("2")}
    assert allowed(compiled, b"text <f=x>1") == {ord("<")}
    assert {EOS, ord("a")} <= allowed(compiled, b"text <f=x>1</f>")


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
THREE_TAGS = {
    "structures": [
        {"begin": "<tool_call>", "schema": CITY, "end": "</tool_call>"},
        {"begin": "<tool_list>", "schema": {"type": "array", "items": {"enum": [1, 2]}}, "end": "</tool_list>"},
        {"begin": "[NUMBER]", "schema": {"type": "integer", "minimum": 0, "maximum": 42}, "end": ""},
    ],
    "triggers": ["<tool_", "[NUMBER]"],
}
SAID = (
    'Let me see. <tool_call>{"city": "Oslo"}</tool_call> and < or <to do, then <tool_list>[1, 2]</tool_list>[NUMBER]42 '
    'and once more: <tool_call>{"city":"Rome"}</tool_call> done.'
)


@pytest.fixture(scope="module")
def demo() -> tuple[Compiler, Tokenizer]:
    """The demonstration model's vocabulary, whose tokens begin and end within markers."""
    tokenizer = Tokenizer.load(Path(aserve.__file__).parent / "demo")
    return Compiler(tokenizer, 2048, frozenset({EOS_OF_DEMO})), tokenizer


def next_token(tokenizer: Tokenizer, rest: str, rng: random.Random) -> int:
    """A token that a text begins with, of any length."""
    return tokenizer.encode(rest[: rng.randint(1, 8)], add_special_tokens=False)[0]


@pytest.mark.parametrize("seed", range(40))
def test_three_tags_are_kept_to_wherever_tokens_begin_and_end(demo: tuple[Compiler, Tokenizer], seed: int) -> None:
    """Text, a tag, text, tags side by side, text. A token may begin and end anywhere, in a trigger as well, unless what
    follows is forced: then the usual spelling alone is allowed. An end may come in text, and nowhere else.
    """
    compiler, tokenizer = demo
    constraint = compiler.compiled(StructuredOutputs(structural_tag=THREE_TAGS)).constraint()
    rng, spelled = random.Random(seed), ""
    while spelled != SAID:
        token_id, mask = next_token(tokenizer, SAID[len(spelled) :], rng), constraint.masks()
        if not mask[token_id // 8] >> token_id % 8 & 1:
            token_id, *_ = constraint.forced()
            assert mask == (1 << token_id).to_bytes(len(mask), "little")
        inside = re.search(r"<tool_(?!call>.*?</tool_call>|list>.*?</tool_list>)|\[NUMBER\]$", spelled)
        assert bool(mask[EOS_OF_DEMO // 8] >> EOS_OF_DEMO % 8 & 1) == (inside is None), f"an end after {spelled!r}"
        constraint.advance([token_id])
        spelled += tokenizer.decode([token_id])
        assert SAID.startswith(spelled)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("<tool_", "x"),
        ("a <tool_call>", "["),
        ('<tool_call>{"city": "', "Paris"),
        ('<tool_call>{"city": "Rome"}', "."),
        ("<tool_list>[1, ", "3"),
        ("[NUMBER]", "a"),
    ],
)
def test_in_a_tag_nothing_else_may_follow(demo: tuple[Compiler, Tokenizer], said: str, wrong: str) -> None:
    compiler, tokenizer = demo
    compiled = compiler.compiled(StructuredOutputs(structural_tag=THREE_TAGS))
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (said, wrong))
    constraint = compiled.after(before).constraint()
    assert constraint.num_valid(after) < len(after)
    assert compiled.constraint().num_valid(before) == len(before)
    assert compiled.after(tokenizer.encode("text: ", add_special_tokens=False)).constraint().num_valid(after) == len(
        after
    )


def test_no_answer_says_a_special_token(compiler: Compiler, tokenizer: Tokenizer) -> None:
    free = allowed(compiler.compiled(StructuredOutputs(regex="(.|\n)*")), b"")
    assert EOS in free
    assert not free & (tokenizer.special_ids - {EOS})
    assert max(free) <= max(255, EOS)


def test_whitespace_between_tokens_has_an_end(compiler: Compiler) -> None:
    compiled = compiler.compiled(StructuredOutputs(json={"type": "object"}))
    assert ord(" ") in allowed(compiled, b"{" + b" " * 31)
    assert ord(" ") not in allowed(compiled, b"{" + b" " * 32)


def test_a_structure_goes_on_where_another_answer_has_come_to(compiler: Compiler) -> None:
    compiled = compiler.compiled(StructuredOutputs(choice=("yes", "no")))
    rest = compiled.after(list(b"y")).after(list(b"e"))
    assert allowed(rest, b"") == {ord("s")}
    assert rest.constraint().num_tokens == 0
    assert allowed(compiled, b"") == {ord("y"), ord("n")}, "the structure itself has not moved on"


def test_an_answer_that_ignores_its_end_ends_where_nothing_else_may_follow(compiler: Compiler) -> None:
    """Catches an end that is left beside other tokens, and a mask of nothing where it is all there is."""
    digits = compiler.compiled(StructuredOutputs(regex="[0-9]{1,2}"))
    endless = digits.going_on(ignores_end=True)
    one, two = allowed(digits, b"1"), allowed(digits, b"12")
    assert two == {EOS} < one
    assert (allowed(endless, b"1"), allowed(endless, b"12")) == (one - {EOS}, {EOS})
    assert allowed(endless.after(list(b"1")), b"") == one - {EOS}
    assert allowed(endless.going_on(ignores_end=False), b"1") == one


@pytest.mark.parametrize("drafts", [b"", b"yes", b"ye", b"yex", b"x", b"no", b"nox", b"yes\0"])
def test_masks_behind_drafts_are_those_of_answers_that_have_them(compiler: Compiler, drafts: bytes) -> None:
    """And the drafts leave nothing behind, right or wrong: what was asked for before is asked for after."""
    compiled = compiler.compiled(StructuredOutputs(choice=("yes", "no")))
    constraint = compiled.constraint()
    before = constraint.masks()
    draft_ids = [EOS if byte == 0 else byte for byte in drafts]
    masks = constraint.masks(draft_ids)
    assert constraint.failure is None
    for num in range(len(draft_ids) + 1):
        is_valid = constraint.num_valid(draft_ids[:num]) == num
        other = compiled.after(draft_ids[:num]).constraint()
        expected = other.masks() if is_valid else bytes(len(before))
        assert masks[num * len(before) : (num + 1) * len(before)] == expected, num
    assert (constraint.masks(), constraint.num_tokens) == (before, 0)


def test_a_dead_end_behind_drafts_is_one_only_for_who_goes_there(compiler: Compiler) -> None:
    """No token of this vocabulary is what follows "b"; a matcher's error stays, and so must not be of a guess."""
    compiled = compiler.compiled(StructuredOutputs(grammar='start: "a" "c" | "b" T\nT: /x/ & /y/\n'))
    constraint = compiled.constraint()
    before = constraint.masks()
    assert not any(constraint.masks([ord("b")])[len(before) :])
    assert constraint.masks() == before
    assert constraint.failure is None
    constraint.advance([ord("a")])
    assert (constraint.masks()[ord("c") // 8], constraint.failure) == (1 << ord("c") % 8, None)


def test_what_has_to_come_is_told_until_it_is_open(compiler: Compiler) -> None:
    compiled = compiler.compiled(StructuredOutputs(regex="(yes|no), really[!?]"))
    assert compiled.constraint().forced() == ()
    assert bytes(compiled.after(list(b"y")).constraint().forced()) == b"es, really"
    assert compiled.after(list(b"yes, really")).constraint().forced() == ()
    assert compiled.after(list(b"yes, really!")).constraint().forced() == (), "the end is for the model to say"


def test_a_token_that_was_not_allowed_ends_in_masks_of_nothing(compiler: Compiler) -> None:
    constraint = compiler.compiled(StructuredOutputs(choice=("yes", "no"))).constraint()
    constraint.advance(list(b"x"))
    assert not any(constraint.masks())
    assert constraint.failure


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "a" * 9000}, "at most 8192 bytes"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": 'start[temperature=0.2]: "a"'}, "temperature"),
        ({"grammar": 'start: %json {"foo": 1}'}, "%json"),
        ({"grammar": 'root ::= ("a"'}, "neither"),
        ({"grammar": "x" * 70000}, "at most 65536 bytes"),
        ({"json": "{"}, "no JSON"),
        ({"json": "false"}, "at #: nothing is valid"),
        ({"json": "[" * 5000}, "JSON"),
        ({"json": {"a": float}}, "no JSON"),
        ({"json": {"enum": ["x" * 200_000]}}, "at most 131072 bytes"),
        ({"json": {"$ref": "#"}}, "at #: no text is valid"),
        ({"json": {"allOf": [{"type": "integer"}, {"type": "string"}]}}, "at #: Unsatisfiable"),
        ({"json": {"properties": {"a": {"pattern": "(a"}}}}, "at #/properties/a: "),
        ({"json": {"items": {"anyOf": [{}, {"format": "foo"}]}}}, "at #/items/anyOf/1/format: must be one of date"),
        (
            {"json": {"items": {"anyOf": [{"type": "null"}, {"pattern": "(a"}]}}},
            "at #/items/anyOf/1: regex parse error",
        ),
        ({"json": {"format": "unknown"}}, "must be one of date"),
        (
            {"json": {"$defs": {"d": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "$ref": "#/$defs/d"}},
            "oneOf",
        ),
        ({"structural_tag": {"structures": []}}, "1 to 128"),
        ({"structural_tag": {"structures": [{"begin": "a"}], "triggers": ["a"]}}, "structures[0] must have begin"),
        (
            {"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}},
            "one of the triggers",
        ),
        (
            {"structural_tag": {"structures": [{"begin": "a", "schema": {"not": {}}, "end": ""}], "triggers": ["a"]}},
            "#/not",
        ),
        ({"structural_tag": {"format": {}}}, "structures and triggers"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_is_told(compiler: Compiler, fields: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compiled(StructuredOutputs(**fields))
    assert told in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    assert caught.value.param == "structured"


def test_a_model_without_an_end_is_told_so(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        Compiler(tokenizer, VOCAB_SIZE, frozenset()).compiled(StructuredOutputs(json_object=True))


def test_equal_structures_compile_once_and_the_cache_is_bounded(compiler: Compiler) -> None:
    first = compiler.compiled(StructuredOutputs(json={"const": "kept"}))
    assert compiler.compiled(StructuredOutputs(json={"const": "kept"})) is first
    for i in range(MAX_CACHED):
        compiler.compiled(StructuredOutputs(regex=f"a{i}"))
    assert len(compiler._cache) == MAX_CACHED
    assert compiler.compiled(StructuredOutputs(json={"const": "kept"})) is not first


def test_several_threads_may_compile_at_once(tokenizer: Tokenizer) -> None:
    """The vocabulary, which is made with the first structure, is made once."""
    compiler = Compiler(tokenizer, VOCAB_SIZE, frozenset({EOS}))
    made: list[Compiled] = []
    threads = [
        threading.Thread(target=lambda i=i: made.append(compiler.compiled(StructuredOutputs(choice=(f"a{i % 3}",)))))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {tuple(sorted(allowed(compiled, b"a"))) for compiled in made} == {(48,), (49,), (50,)}
