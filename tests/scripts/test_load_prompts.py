"""Prompts have the length in tokens that was asked for, as ids and as text."""

import json
import random

import pytest
from bench_startup import DEMO
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from aserve.load.drive import Target
from aserve.load.prompts import Prompts


def test_text_turns_back_into_the_same_ids():
    prompts = Prompts.of_tokenizer(DEMO, as_text=True)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    rng = random.Random(0)
    for length in (1, 7, 300):
        ids = prompts.draw(rng, length)
        text = prompts.render(ids)
        assert isinstance(text, str)
        assert (len(ids), tokenizer.encode(text).ids) == (length, ids)


def test_what_a_server_puts_before_each_text_is_none_of_its_tokens(tmp_path):
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompts = Prompts.of_tokenizer(tmp_path, as_text=True)
    ids = prompts.draw(random.Random(0), 7)
    assert tokenizer.encode(prompts.render(ids)).ids == [tokenizer.token_to_id("<s>"), *ids]


def test_ids_are_sent_as_they_are_and_differ_from_prompt_to_prompt():
    prompts = Prompts.of_tokenizer(DEMO / "tokenizer.json", as_text=False)
    rng = random.Random(0)
    first, second = prompts.draw(rng, 64), prompts.draw(rng, 64)
    assert first != second
    assert prompts.render(first) == first
    assert set(first) <= set(prompts.pool)


def test_a_tokenizer_without_words_is_refused(tmp_path):
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"], tokenizer["model"]["merges"] = {"a": 0}, []
    tokenizer["added_tokens"], tokenizer["post_processor"] = [], None
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="no token that is a space and a word"):
        Prompts.of_tokenizer(tmp_path, as_text=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}),
        ({"usage": False, "extra_body": {}, "model": "m"}, {"model": "m", "stream": True}),
        ({"stream": False}, {"ignore_eos": True, "stream": False}),
    ],
)
def test_a_server_is_asked_in_its_own_way(options, expected):
    target = Target("http://host", Prompts(range(10)), **options)
    body = json.loads(target.body([1, 2, 3], 5))
    assert body == {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, **expected}
