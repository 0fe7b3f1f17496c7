"""A budget of thinking tokens: what may come next, whatever came before, alone and in front of a structure."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.constraints.compiler import Compiler
from aserve.constraints.thinking import BoundedThinking, Budget, Thought
from aserve.core.config import ModelInfo
from aserve.core.structured import StructuredOutputs, ThoughtRules
from aserve.text.formats.choice import thought_markers
from aserve.text.formats.families import THOUGHTS
from tests.engines import SPECIAL_TOKENS, byte_tokenizer
from tests.text.formats.reading import format_named, parsed

PLAIN = byte_tokenizer()
SPECIAL = byte_tokenizer((*SPECIAL_TOKENS, "<think>", "</think>"))
EOS = 256
JSON = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
LIKELY = {*b"<think/>", SPECIAL.vocab_size - 2, SPECIAL.vocab_size - 1}
OVERRUN = 3
"""Tokens that may follow a budget, where a character is cut."""


def bounded(tokenizer, most, *, in_thought=True, structure=None, thoughts=THOUGHTS["think"]):
    return BoundedThinking(Budget(tokenizer, thoughts, tokenizer.vocab_size), most, Thought(in_thought), structure)


def allowed(mask):
    return [token_id for token_id in range(len(mask) * 8) if mask[token_id // 8] >> token_id % 8 & 1]


def says(tokenizer, constraint, seed, most_tokens=200):
    """An answer drawn at random under its masks, now and then with letters of the markers."""
    rng, said = random.Random(seed), []
    for _ in range(most_tokens):
        choices = allowed(constraint.masks())
        assert choices, constraint.failure
        likely = [token_id for token_id in choices if token_id in LIKELY]
        token_id = rng.choice(likely if likely and rng.random() < 0.5 else choices)
        if token_id == EOS:
            break
        said.append(token_id)
        constraint.advance([token_id])
    return said


@pytest.mark.parametrize("tokenizer", [PLAIN, SPECIAL], ids=["markers as text", "markers as tokens"])
@settings(max_examples=40)
@given(most=st.integers(0, 20), in_thought=st.booleans(), seed=st.integers(0, 2**32))
def test_an_answer_thinks_no_longer_than_its_budget(tokenizer, most, in_thought, seed):
    """Fault: thoughts that go on, by whatever spelling of the markers and however characters are cut."""
    constraint = bounded(tokenizer, most, in_thought=in_thought).constraint()
    said = says(tokenizer, constraint, seed)
    text = tokenizer.token_bytes
    thoughts, is_open, rest = 0, in_thought, b""
    for token_id in said:
        rest += text[token_id]
        marker = b"</think>" if is_open else b"<think>"
        if marker in rest:
            is_open, rest = not is_open, b""
        elif is_open:
            thoughts += 1
        end = len(tokenizer.encode("</think>", add_special_tokens=False))
        assert thoughts <= most + OVERRUN + end, bytes(b"".join(text[each] for each in said))


def test_a_thought_that_ends_by_itself_is_not_touched():
    constraint = bounded(PLAIN, 12).constraint()
    for token_id in b"ok</think>and an answer of any length":
        assert len(allowed(constraint.masks())) == PLAIN.vocab_size
        assert constraint.forced() == ()
        constraint.advance([token_id])


def test_the_end_is_forced_behind_a_whole_character():
    constraint = bounded(PLAIN, 3).constraint()
    for token_id in "éé".encode():
        assert len(allowed(constraint.masks())) == PLAIN.vocab_size
        constraint.advance([token_id])
    for num, token_id in enumerate(b"</think>"):
        assert allowed(constraint.masks()) == [token_id]
        assert bytes(constraint.forced()) == b"</think>"[num:]
        assert constraint.num_valid([token_id, *b"x"]) == (2 if token_id == ord(">") else 1)
        constraint.advance([token_id])
    assert len(allowed(constraint.masks())) == PLAIN.vocab_size
    assert constraint.num_tokens == len("éé</think>".encode())


@settings(max_examples=40)
@given(most=st.integers(0, 6), said=st.binary(max_size=12), drafts=st.binary(max_size=12), is_json=st.booleans())
def test_masks_behind_drafts_are_those_of_answers_that_have_them(most, said, drafts, is_json):
    """And an answer that was cut and goes on, as after preemption, is held to the same."""
    structure = bounded(PLAIN, most, structure=COMPILER.compiled(AFTER) if is_json else None)
    constraint = structure.constraint()
    valid = said[: constraint.num_valid(said)]
    constraint.advance(valid)
    before = constraint.masks()
    masks = constraint.masks(list(drafts))
    assert len(masks) == (len(drafts) + 1) * len(before)
    num_valid = constraint.num_valid(drafts)
    for num in range(num_valid + 1):
        other = structure.after(list(valid + drafts[:num])).constraint()
        assert masks[num * len(before) : (num + 1) * len(before)] == other.masks(), num
    if num_valid < len(drafts):
        assert drafts[num_valid] not in allowed(masks[num_valid * len(before) : (num_valid + 1) * len(before)])
    assert constraint.masks() == before


COMPILER = Compiler(PLAIN, PLAIN.vocab_size, frozenset({EOS}))
AFTER = StructuredOutputs(json=JSON.json, thoughts=ThoughtRules(format="think", in_thought=True))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokenizer", [PLAIN, SPECIAL], ids=["markers as text", "markers as tokens"])
@pytest.mark.parametrize("in_thought", [True, False])
def test_a_structure_holds_behind_thoughts_that_a_budget_ends(tokenizer, in_thought, seed):
    rules = StructuredOutputs(regex="(yes|no)!", thoughts=ThoughtRules(format="think", in_thought=in_thought))
    structure = Compiler(tokenizer, tokenizer.vocab_size, frozenset({EOS})).compiled(rules)
    constraint = bounded(tokenizer, 5, in_thought=in_thought, structure=structure).constraint()
    said = b"".join(tokenizer.token_bytes[each] for each in says(tokenizer, constraint, seed))
    _, content, _ = parsed(format_named("hermes", "think"), said.decode(), in_thought=in_thought)
    assert content in ("yes!", "no!")


@pytest.mark.parametrize(
    "structured",
    [
        {"json": {"type": "integer"}},
        {"json_object": True},
        {"regex": "[0-9]+"},
        {"choice": ("1", "22")},
        {"grammar": 'start: "1" | "{}"'},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_structure_may_follow_thoughts(structured):
    rules = StructuredOutputs(**structured, thoughts=ThoughtRules(format="think", in_thought=False))
    structure = COMPILER.compiled(rules)
    goods = [b"1", b"{}"]
    assert any(accepts(structure, good) for good in goods)
    assert any(accepts(structure, b"<think>so 1 {</think>\n\n" + good) for good in goods)
    assert not any(accepts(structure, b"<think>so </think>{" + good) for good in goods)
    assert not any(accepts(structure, b"so </think>" + good) for good in goods)


@pytest.mark.parametrize("in_thought", [True, False])
def test_tags_may_follow_thoughts(in_thought):
    tag = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
    rules = ThoughtRules(format="think", in_thought=in_thought)
    structure = COMPILER.compiled(
        StructuredOutputs(structural_tag={"structures": [tag], "triggers": ["<f"]}, thoughts=rules)
    )
    thought = b"so</think>" if in_thought else b"<think>so</think>"
    assert accepts(structure, thought + b"text <f>1</f> more")
    assert not accepts(structure, thought + b"text <f>x</f> more")


def accepts(structure, said):
    constraint = structure.constraint()
    return constraint.num_valid([*said, EOS]) == len(said) + 1


def test_a_structure_is_in_the_last_message_of_harmony():
    tokenizer = byte_tokenizer((*SPECIAL_TOKENS[:1], "<|start|>", "<|message|>", "<|channel|>", "<|call|>"))
    compiler = Compiler(tokenizer, tokenizer.vocab_size, frozenset({EOS}))
    rules = StructuredOutputs(choice=("yes",), thoughts=ThoughtRules(format="openai", in_thought=False))
    structure = compiler.compiled(rules)

    def is_good(text):
        token_ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
        return structure.constraint().num_valid(token_ids) == len(token_ids)

    thought, last = "<|channel|>analysis<|message|>hm", "<|channel|>final<|message|>"
    assert is_good(f"{last}yes")
    assert not is_good(f"{last}no")
    assert not is_good("yes")
    assert not is_good(f"{thought}yes")


def test_thoughts_of_harmony_are_a_channels_messages():
    info = ModelInfo(names=("m",), root="", vocab_size=0, max_model_len=1, eos_ids=frozenset(), created_s=0)
    assert thought_markers(info) is None
    thoughts = thought_markers(FORMATS_OF_GPT_OSS)
    assert thoughts is not None
    constraint = bounded(PLAIN, 4, in_thought=False, thoughts=thoughts).constraint()
    constraint.advance(list(b"<|channel|>analysis<|message|>hmmm"))
    assert constraint.forced() == PLAIN.encode("<|end|>", add_special_tokens=False)
    constraint.advance(list(b"<|end|><|start|>assistant<|channel|>final<|message|>four and more"))
    assert constraint.forced() == ()


FORMATS_OF_GPT_OSS = ModelInfo(
    names=("m",), root="", vocab_size=0, max_model_len=1, eos_ids=frozenset(), created_s=0, thought_format="openai"
)
