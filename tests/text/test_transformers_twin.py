"""The same folders read by transformers: the same ids, the same special tokens, the same prompts."""

import json

import pytest

from aserve.text.chat_template import ChatTemplate
from aserve.text.tokenizer import Tokenizer
from tests.text import checkpoints, templates

pytestmark = [pytest.mark.torch, pytest.mark.slow]

KINDS = {"byte-level": checkpoints.byte_level_backend, "sentencepiece": checkpoints.sentencepiece_backend}
CONFIGS = {
    "plain": checkpoints.NAMED,
    "add_bos_token": checkpoints.NAMED | {"add_bos_token": True, "add_eos_token": True},
    "no_bos": checkpoints.NAMED | {"add_bos_token": False},
    "added": checkpoints.NAMED
    | {
        "pad_token": "<pad>",
        "additional_special_tokens": ["<|im_start|>", "<new>"],
        "added_tokens_decoder": {
            "5000": {"content": "<added>", "special": False, "normalized": False, "lstrip": True},
            "1": {"content": "<s>", "special": True, "normalized": False},
        },
    },
}
TEXTS = [*checkpoints.SENTENCES, "", " ", "<s>the <|im_start|> dog</s>", "a <added> b<new><pad><tool>x"]


def twins(folder, backend, config):
    from transformers import AutoTokenizer

    settings = config | {"tokenizer_class": "PreTrainedTokenizerFast"}
    checkpoints.write(folder, backend, tokenizer_config__json=json.dumps(settings))
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS)
def test_tokenizers_agree(tmp_path, kind, config):
    ours, theirs = twins(tmp_path, KINDS[kind](), CONFIGS[config])
    for text in TEXTS:
        for special in (True, False):
            token_ids = ours.encode(text, add_special_tokens=special)
            assert list(token_ids) == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(token_ids, skip_special_tokens=special) == theirs.decode(
                token_ids, skip_special_tokens=special
            )
        assert list(ours.token_strings(token_ids)) == theirs.convert_ids_to_tokens(token_ids)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids >= set(theirs.all_special_ids)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("family", templates.FAMILIES)
def test_prompts_agree(tmp_path, family):
    config = checkpoints.NAMED | {"chat_template": templates.FAMILIES[family]}
    _, theirs = twins(tmp_path, checkpoints.byte_level_backend(), config)
    ours = ChatTemplate.load(tmp_path)
    conversations = [templates.ASK, templates.TALK] + ([] if family == "mistral" else [templates.SYSTEM])
    for messages in conversations:
        for options in ({}, {"add_generation_prompt": False}, {"tools": templates.TOOLS}):
            expected = theirs.apply_chat_template(
                messages, tokenize=False, **({"add_generation_prompt": True} | options)
            )
            assert ours.render(messages, **options) == expected
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = theirs.apply_chat_template(templates.UNFINISHED, tokenize=False, **options)
    assert ours.render(templates.UNFINISHED, **options) == expected


def test_template_variables_agree(tmp_path):
    config = checkpoints.NAMED | {"chat_template": templates.CHATML}
    _, theirs = twins(tmp_path, checkpoints.byte_level_backend(), config)
    variables = {"enable_thinking": False}
    expected = theirs.apply_chat_template(templates.ASK, tokenize=False, add_generation_prompt=True, **variables)
    assert ChatTemplate.load(tmp_path).render(templates.ASK, variables=variables) == expected


def test_a_template_file_wins_for_both(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    _, theirs = twins(tmp_path, checkpoints.byte_level_backend(), checkpoints.NAMED | {"chat_template": "config"})
    expected = theirs.apply_chat_template(templates.ASK, tokenize=False)
    assert ChatTemplate.load(tmp_path).render(templates.ASK) == expected
