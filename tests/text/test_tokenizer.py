import json

import pytest
import tokenizers

from aserve.core.errors import CheckpointError, InvalidRequestError
from aserve.text.tokenizer import Tokenizer
from tests.engines import byte_tokenizer
from tests.text import checkpoints
from tests.text.checkpoints import write

CONFIG = json.dumps(checkpoints.NAMED)


def test_a_folder(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, checkpoints.byte_level_backend(), tokenizer_config__json=CONFIG))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert [tokenizer.is_special(token_id) for token_id in (2, 70)] == [True, False]
    assert tokenizer.token_strings([tokenizer.vocab_size - 1, tokenizer.vocab_size]) == ("<tool>", "")
    token_ids = tokenizer.encode("the dog 🤖")
    assert tokenizer.decode(token_ids) == "the dog 🤖"
    assert tokenizer.decode_batch([token_ids, token_ids[:1]]) == ["the dog 🤖", "t"]


def test_special_tokens_are_added_or_not():
    tokenizer = checkpoints.sentencepiece()
    with_bos = tokenizer.encode("the dog")
    assert with_bos == (tokenizer.bos_id, *tokenizer.encode("the dog", add_special_tokens=False))
    assert tokenizer.count("the dog") == len(with_bos) - 1
    assert tokenizer.decode(with_bos) == "<s> the dog"
    assert tokenizer.decode(with_bos, skip_special_tokens=True) == "the dog"
    assert tokenizer.decode_batch([with_bos]) == ["<s> the dog"]


def test_a_prompt_is_never_shortened_or_padded(tmp_path):
    backend = checkpoints.byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


def test_tokens_that_only_the_config_knows_are_added(tmp_path):
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "<end>", "lstrip": False},
        "image_token": "<image>",
        "model_max_length": 10**30,
        "added_tokens_decoder": {"9001": {"content": "<b>", "special": False}, "9000": {"content": "<a>"}},
    }
    backend = checkpoints.byte_level_backend()
    first = backend.get_vocab_size()
    tokenizer = Tokenizer.load(write(tmp_path, backend, tokenizer_config__json=json.dumps(config)))
    assert tokenizer.encode("<a><b><end><image>") == (first, first + 1, first + 2, first + 3)
    assert tokenizer.eos_id == first + 2
    assert [tokenizer.is_special(first + n) for n in range(4)] == [False, False, True, True]
    assert tokenizer.vocab_size == first + 4


def test_a_named_token_of_the_vocabulary_becomes_special(tmp_path):
    backend = checkpoints.byte_level_backend()
    tool_id = backend.token_to_id("<tool>")
    config = json.dumps({"eos_token": "<tool>"})
    tokenizer = Tokenizer.load(write(tmp_path, backend, tokenizer_config__json=config))
    assert tokenizer.eos_id == tool_id
    assert tokenizer.is_special(tool_id)


def test_special_tokens_map_of_older_checkpoints(tmp_path):
    backend = checkpoints.byte_level_backend()
    older = {"eos_token": {"content": "<|im_end|>"}, "additional_special_tokens": ["<tool>"]}
    folder = write(tmp_path, backend, tokenizer_config__json=CONFIG, special_tokens_map__json=json.dumps(older))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_id == backend.token_to_id("<|im_end|>")
    assert tokenizer.is_special(backend.token_to_id("<tool>"))


def test_a_folder_without_tokenizer_json_says_what_is_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_json_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\udcff" * 3])
def test_a_lone_surrogate_is_the_requests_error(text):
    with pytest.raises(InvalidRequestError, match="lone surrogate") as caught:
        checkpoints.byte_level().encode(text, param="input")
    assert caught.value.param == "input"


def test_ids_that_are_no_tokens():
    tokenizer = checkpoints.byte_level()
    assert tokenizer.decode([70, 10**6]) == tokenizer.decode([70])
    for token_id in (-1, 2**32):
        with pytest.raises(InvalidRequestError, match="token id"):
            tokenizer.decode([token_id])


def test_the_empty_text():
    tokenizer = checkpoints.byte_level()
    assert tokenizer.encode("") == ()
    assert tokenizer.decode([]) == ""


def test_a_tokenizer_without_added_tokens(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (2, frozenset())


def test_special_tokens_of_markers_are_shown_and_no_others():
    tokenizer = byte_tokenizer()
    shown = tokenizer.bytes_showing(frozenset({"<|user|>hi", "nothing"}))
    assert (shown[258], shown[257], shown[65]) == (b"<|user|>", b"", b"A")
    assert tokenizer.bytes_showing(frozenset({"user"})) is tokenizer.text_bytes


def test_how_answers_are_read_is_found_in_the_config(tmp_path):
    said = {"version": 1, "fields": {"content": {}}}
    config = json.dumps({**checkpoints.NAMED, "response_template": said})
    tokenizer = Tokenizer.load(write(tmp_path, checkpoints.byte_level_backend(), tokenizer_config__json=config))
    assert tokenizer.response_template == said
    assert byte_tokenizer().response_template is None


@pytest.mark.parametrize("texts", [["a", "b\ud800"], ["a", ("b", "\udfff")], [("a", "b"), ("\ud800", "c")]])
def test_of_several_texts_the_one_with_a_lone_surrogate_is_named(texts):
    with pytest.raises(InvalidRequestError, match="lone surrogate") as caught:
        checkpoints.byte_level().encode_all(texts, ["input[0]", "input[1]"], add_special_tokens=False)
    assert caught.value.param == "input[1]"


class Failing:
    """In the place of the tokenizers library."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def encode_batch_fast(self, texts, *, add_special_tokens):
        raise self._error


class PanicError(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), SystemExit()], ids=repr)
def test_what_is_not_the_texts_fault_is_not_put_on_them(monkeypatch, error):
    """Catches memory that is short, or a wish to end, told as an invalid request."""
    tokenizer = checkpoints.byte_level()
    monkeypatch.setattr(tokenizer, "_backend", Failing(error))
    with pytest.raises(type(error)) as caught:
        tokenizer.encode_all(["a"], ["input[0]"], add_special_tokens=False)
    assert caught.value is error


def test_texts_on_which_the_library_gives_up_are_the_requests_error(monkeypatch):
    tokenizer = checkpoints.byte_level()
    monkeypatch.setattr(tokenizer, "_backend", Failing(PanicError("attempt to add with overflow")))
    with pytest.raises(InvalidRequestError, match="gives up") as caught:
        tokenizer.encode_all(["a", "b"], ["input[0]", "input[1]"], add_special_tokens=False)
    assert caught.value.param == "input[0]"
