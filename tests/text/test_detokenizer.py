import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from aserve.core.errors import CheckpointError
from aserve.text import token_bytes
from aserve.text.detokenizer import Detokenizer
from aserve.text.token_bytes import TokenBytes
from tests.text import checkpoints

BYTE_LEVEL = checkpoints.byte_level()
SENTENCEPIECE = checkpoints.sentencepiece()
BOTH = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}
CUTS = st.lists(st.integers(1, 4), max_size=40)


def chunks(token_ids, sizes):
    """token_ids cut at the running sums of sizes, the rest in one."""
    start = 0
    for size in sizes:
        yield token_ids[start : start + size]
        start += size
    yield token_ids[start:]


def read(tokenizer, pieces, **options):
    detokenizer = Detokenizer(tokenizer.text_bytes, **options)
    return [detokenizer.feed(piece) for piece in pieces] + [detokenizer.flush()]


def id_of(token):
    return SENTENCEPIECE.token_strings(range(SENTENCEPIECE.vocab_size)).index(token)


@given(token_ids=st.lists(st.integers(0, 440), max_size=40), cuts=CUTS)
def test_byte_level_text_is_that_of_decoding_the_whole_whatever_the_tokens(token_ids, cuts):
    text = "".join(read(BYTE_LEVEL, chunks(token_ids, cuts)))
    assert text == BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", BOTH)
@given(text=st.text(max_size=30) | st.sampled_from(checkpoints.SENTENCES), cuts=CUTS)
def test_text_survives_the_way_through_tokens(kind, text, cuts):
    tokenizer = BOTH[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    read_text = "".join(read(tokenizer, chunks(token_ids, cuts)))
    assert read_text == tokenizer.decode(token_ids, skip_special_tokens=True)
    if not any(token in text for token in checkpoints.SPECIAL) and not (kind == "sentencepiece" and "▁" in text):
        assert read_text == text.removeprefix(" " if kind == "sentencepiece" else "")


@given(token_ids=st.lists(st.integers(0, 310), max_size=40), cuts=CUTS)
def test_byte_fallback_text_does_not_depend_on_the_chunks(token_ids, cuts):
    whole = "".join(read(SENTENCEPIECE, [token_ids]))
    assert "".join(read(SENTENCEPIECE, chunks(token_ids, cuts))) == whole
    raw = b"".join(SENTENCEPIECE.text_bytes[token_id] for token_id in token_ids)
    assert whole == raw.decode(errors="replace").removeprefix(" ")
    if "\ufffd" not in whole:
        assert whole == SENTENCEPIECE.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", BOTH)
def test_a_character_is_shown_when_its_last_byte_is_there(kind):
    tokenizer = BOTH[kind]
    ids_of_bytes = [
        next(i for i in range(5, 261) if tokenizer.text_bytes[i] == bytes([byte])) for byte in "🤖".encode()
    ]
    assert read(tokenizer, [[token_id] for token_id in ids_of_bytes]) == ["", "", "", "🤖", ""]
    assert read(tokenizer, [[token_id] for token_id in ids_of_bytes[:2]]) == ["", "", "\ufffd"]


def test_special_tokens_do_not_eat_the_space_after_them():
    the, im_end, dog = map(id_of, ("▁the", "<|im_end|>", "▁dog"))
    assert read(SENTENCEPIECE, [[im_end], [the], [im_end], [dog]]) == ["", "the", "", " dog", ""]


def test_only_the_first_space_is_dropped():
    og, dog = map(id_of, ("og", "▁dog"))
    assert read(SENTENCEPIECE, [[og], [dog]]) == ["og", " dog", ""]
    assert read(SENTENCEPIECE, [[dog], [dog]]) == ["dog", " dog", ""]


def test_a_text_that_continues_keeps_its_leading_space():
    assert read(SENTENCEPIECE, [[id_of("▁the")]], keep_leading_space=True) == [" the", ""]


def test_an_added_token_outside_the_byte_alphabet_stands_for_itself():
    text = "a <工 具>b"
    token_ids = BYTE_LEVEL.encode(text)
    assert "<工 具>" in BYTE_LEVEL.token_strings(token_ids)
    assert "".join(read(BYTE_LEVEL, [[token_id] for token_id in token_ids])) == text


def test_invalid_bytes_are_shown_at_once_and_not_held():
    """To hold them would make the cost of a stream of them quadratic."""
    continuation = next(i for i in range(5, 261) if BYTE_LEVEL.text_bytes[i] == b"\x80")
    detokenizer = Detokenizer(BYTE_LEVEL.text_bytes)
    assert all(detokenizer.feed((continuation,)) == "\ufffd" for _ in range(1000))
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("decoder", "tokens", "text"),
    [
        (None, ["a", "b"], "a b"),
        (decoders.Metaspace(), ["▁a", "▁b"], "a b"),
        (decoders.Metaspace(prepend_scheme="never"), ["▁a", "▁b"], " a b"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), ["▁a"], " a"),
    ],
)
def test_other_decoders(decoder, tokens, text):
    backend = tokenizers.Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    detokenizer = Detokenizer(TokenBytes(backend))
    token_ids = range(len(tokens))
    assert "".join(detokenizer.feed((token_id,)) for token_id in token_ids) == text == backend.decode(list(token_ids))


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
    ids=repr,
)
def test_a_decoder_that_is_not_known_is_refused(decoder):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match="is not supported"):
        TokenBytes(backend)


def test_what_was_flushed_is_not_told_again():
    detokenizer = Detokenizer(BYTE_LEVEL.text_bytes)
    detokenizer.feed(BYTE_LEVEL.encode("🤖", add_special_tokens=False)[:1])
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""]


def test_a_byte_is_what_the_tokenizers_library_spells_it_as():
    """The library shows each byte as a character of its own."""
    token_bytes._byte_alphabet.cache_clear()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    backend.decoder = decoders.ByteLevel()
    found = TokenBytes(backend, skip=frozenset())
    assert sorted(found[n] for n in range(256)) == [bytes([byte]) for byte in range(256)]
