"""Texts within bounds: what is too long is refused by what can be told of it, and what fits never is."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from aserve.core.config import ModelInfo
from aserve.core.errors import ContextLengthError, InvalidRequestError
from aserve.http import create_app
from aserve.text.chat_template import ChatTemplate
from aserve.text.text_bounds import max_chars_per_token
from aserve.text.tokenizer import Tokenizer
from aserve.texts import MAX_DECODED_TOKENS, MAX_TEXT_CHARS, Texts
from aserve.workers import Workers
from tests.engines import scripted_engine
from tests.http.conftest import client_of
from tests.text import checkpoints

MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACES = " " * 10_500_000 + "a"


def modern_backend():
    """As Qwen and Llama 3: a regular expression that goes back over all spaces before a word."""
    backend = checkpoints.byte_level_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(MODERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


class Counting(Tokenizer):
    """Keeps how many characters it was given."""

    num_chars = 0

    def encode(self, text, **options):
        self.num_chars += len(text)
        return super().encode(text, **options)


@pytest.fixture
def workers():
    workers = Workers()
    yield workers
    workers.close()


def texts_of(backend, workers, max_model_len=64):
    tokenizer = Counting(backend, checkpoints.config())
    info = ModelInfo(
        names=("m",),
        root="m",
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        eos_ids=frozenset(),
        created_s=0,
    )
    return Texts(tokenizer, ChatTemplate({"default": "{{ messages[0].content }}"}, {}), info, workers), tokenizer


async def test_a_text_is_too_long_by_its_length_as_json(workers):
    texts, _ = texts_of(modern_backend(), workers)
    texts.check_json(b'"a word"', must_fit=True)
    with pytest.raises(ContextLengthError, match=r"has over \d+ characters, and no more than \d+ can fit") as caught:
        texts.check_json(SPACES.encode(), must_fit=True)
    assert caught.value.param == "prompt"


async def test_a_text_that_is_too_long_by_its_characters_is_not_tokenized(workers):
    texts, tokenizer = texts_of(modern_backend(), workers)
    with pytest.raises(ContextLengthError, match=r"has 10500001 characters, and no more than \d+ can fit"):
        await texts.encode(SPACES, must_fit=True)
    with pytest.raises(ContextLengthError, match="has over") as caught:
        await texts.encode_chat([{"role": "user", "content": "a" * 100_000}], must_fit=True)
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_TEXT_CHARS} characters"):
        await texts.encode(SPACES)
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_DECODED_TOKENS}"):
        await texts.decode(range(MAX_DECODED_TOKENS + 1))
    assert tokenizer.num_chars == 0


async def test_a_text_of_as_many_characters_as_are_tokenized_is(workers, monkeypatch):
    texts, tokenizer = texts_of(modern_backend(), workers)
    monkeypatch.setattr(texts, "_max_chars", 7)
    assert await texts.encode("the dog") == tokenizer.encode("the dog")
    with pytest.raises(InvalidRequestError, match="at most 7 characters are tokenized, got 8"):
        await texts.encode("the dogs")


@pytest.mark.parametrize("said", ["a" * 7, ["a" * 6, "a"], [{"type": "text", "text": "a" * 7}]], ids=repr)
async def test_a_conversation_of_more_characters_is_refused_before_it_is_rendered(workers, monkeypatch, said):
    texts, _ = texts_of(modern_backend(), workers)
    monkeypatch.setattr(texts, "_max_chars", 7)
    monkeypatch.setattr(ChatTemplate, "render", lambda *_args, **_options: "the dog")
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": None}]
    assert await texts.encode_chat(messages)
    with pytest.raises(ContextLengthError, match="the conversation has over 7 characters") as caught:
        await texts.encode_chat([*messages, {"role": "user", "content": "a"}])
    assert caught.value.param == "messages"
    assert await texts.encode_chat([*messages, {"role": "user", "content": "a"}], must_fit=True)


async def test_a_long_input_that_may_be_cut_is_cut_and_not_refused(workers):
    texts, _ = texts_of(modern_backend(), workers)
    text = "the dog " * 1000
    [whole] = await texts.encode_inputs(["the dog " * 2], ["input"])
    [cut] = await texts.encode_inputs([text], ["input"], truncate_prompt_tokens=len(whole.token_ids) - 1)
    assert cut.token_ids == whole.token_ids[:-1]
    with pytest.raises(ContextLengthError):
        await texts.encode_inputs([text], ["input"])


async def test_inputs_get_special_tokens_unless_none_are_asked_for(workers):
    backend = checkpoints.sentencepiece_backend()
    texts, _ = texts_of(backend, workers)
    [by_default] = await texts.encode_inputs(["the dog"], ["input"])
    [without] = await texts.encode_inputs(["the dog"], ["input"], add_special_tokens=False)
    assert list(by_default.token_ids) == [backend.token_to_id("<s>"), *without.token_ids]


async def test_where_characters_tell_nothing_it_is_tokenized_in_pieces_and_not_to_the_end(workers):
    backend = modern_backend()
    backend.normalizer = normalizers.Strip()
    texts, tokenizer = texts_of(backend, workers)
    assert tokenizer.max_chars_per_token is None
    with pytest.raises(ContextLengthError, match="tokens in the first 16384 of them"):
        await texts.encode("word " * 200_000, must_fit=True)
    assert tokenizer.num_chars < 20_000
    assert await texts.encode(" " * 300_000 + "a", must_fit=True) == tokenizer.encode("a")


async def test_a_text_on_which_the_tokenizer_gives_up_is_the_requests_error():
    backend = checkpoints.byte_level_backend()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?:a|a)*$"), behavior="isolated")
    with pytest.raises(InvalidRequestError, match="gives up on this text") as caught:
        Tokenizer(backend, checkpoints.config()).encode("a" * 60 + "b", param="messages")
    assert caught.value.param == "messages"


def test_the_longest_token_bounds_every_text():
    for backend in (checkpoints.byte_level_backend(), modern_backend()):
        bound = max_chars_per_token(backend)
        for text in [*checkpoints.SENTENCES, "the dog " * 50, " " * 100, "<|im_start|>" * 9, "<工 具>" * 9]:
            assert len(text) <= bound * len(backend.encode(text, add_special_tokens=False).ids)
    composed = checkpoints.byte_level_backend()
    plain = max_chars_per_token(composed)
    composed.normalizer = normalizers.NFC()
    assert max_chars_per_token(composed) == 4 * plain
    shrinking = checkpoints.sentencepiece_backend()
    plain = max_chars_per_token(shrinking)
    shrinking.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace("   ", "▁▁")])
    assert max_chars_per_token(shrinking) == 2 * plain


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
        lambda backend: setattr(
            backend, "normalizer", normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
        ),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace(Regex(" +"), " ")),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace("a", "")),
        lambda backend: setattr(backend, "normalizer", normalizers.BertNormalizer()),
        lambda backend: setattr(
            backend,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
        ),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda backend: setattr(backend, "model", models.WordLevel({"a": 0}, unk_token="a")),
        lambda backend: setattr(backend, "model", models.BPE({"a": 0}, [])),
        lambda backend: backend.add_tokens([AddedToken("<end>", rstrip=True)]),
    ],
)
def test_where_characters_may_vanish_there_is_no_bound(change):
    backend = tokenizers.Tokenizer.from_str(checkpoints.byte_level_backend().to_str())
    change(backend)
    assert max_chars_per_token(backend) is None


async def test_over_http_every_way_in_is_bounded():
    async with scripted_engine() as engine, client_of(create_app(engine, max_body_bytes=2**24)) as client:
        for url, body, code in [
            ("/v1/completions", {"prompt": SPACES}, "context_length_exceeded"),
            ("/v1/completions", {"prompt": ["a", "b" * 10_000]}, "context_length_exceeded"),
            ("/v1/completions", {"prompt": SPACES, "truncate_prompt_tokens": 1}, "invalid_request_error"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": SPACES}]}, "context_length_exceeded"),
            ("/tokenize", {"prompt": SPACES}, "invalid_request_error"),
            ("/detokenize", {"tokens": [1] * (MAX_DECODED_TOKENS + 1)}, "invalid_request_error"),
        ]:
            response = await client.post(url, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, code), response.text
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "a" * 100_000})).json()["count"] == 100_000


@pytest.mark.parametrize("change", [{"byte_fallback": False}, {"vocab": "<0x7F>"}])
def test_where_a_byte_is_unknown_there_is_no_bound(change):
    described = json.loads(checkpoints.sentencepiece_backend().to_str())
    assert max_chars_per_token(tokenizers.Tokenizer.from_str(json.dumps(described))) is not None
    if "vocab" in change:
        described["model"]["vocab"]["another"] = described["model"]["vocab"].pop(change["vocab"])
    else:
        described["model"] |= change
    assert max_chars_per_token(tokenizers.Tokenizer.from_str(json.dumps(described))) is None
