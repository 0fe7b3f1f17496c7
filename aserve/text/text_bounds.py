"""How many characters one token can stand for at most, from what tokenizer.json says of the way from text to tokens.

With that, a text that is too long for a context is known by its length alone. It can be told where every step of the
way keeps each character, or turns a known number of them into one:

    normalizer       NFC, NFKC (a letter and its marks are one), NFD, NFKD, Lowercase, Prepend, ByteLevel, Replace
    pre-tokenizer    whatever splits and removes nothing
    model            BPE that has a token for every byte
    added tokens     none that takes the spaces around it with it

Elsewhere it cannot: an accent that is stripped, a space that is collapsed and an unknown word can be as long as they
like and make no token, or one. (Byte-pair merges and unigram pieces alike join what is adjacent: a token's spelling has
at least one character for each that it stands for.)
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec
import tokenizers

COMPOSED_CHARS: Final = 4
"""Characters that Unicode composes into one at most, such as a Greek letter with three marks."""
KEEPING_NORMALIZERS: Final = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
COMPOSING_NORMALIZERS: Final = frozenset({"NFC", "NFKC"})
KEEPING_PRE_TOKENIZERS: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength"})
SPLITTING_PRE_TOKENIZERS: Final = frozenset({"Split", "Punctuation"})
"""They keep what they split by, unless their behavior is "Removed"."""


class _Component(Protocol):
    def __getstate__(self) -> bytes: ...


def max_chars_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """None where there is no bound."""
    vocabulary: Mapping[str, int] = backend.get_vocab()
    steps = [*_steps(backend.normalizer, "normalizers"), *_steps(backend.pre_tokenizer, "pretokenizers")]
    if not _knows_every_byte(backend, vocabulary, steps):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    num_chars = max(map(len, vocabulary))
    for step in steps:
        shrinkage = _shrinkage(step)
        if shrinkage is None:
            return None
        num_chars *= shrinkage
    return num_chars


def _steps(component: _Component | None, members: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, those of sequences within sequences too."""
    if component is None:
        return
    stack = [msgspec.json.decode(component.__getstate__())]
    while stack:
        step = stack.pop()
        if step["type"] == "Sequence":
            stack.extend(step[members])
        else:
            yield step


def _shrinkage(step: Mapping[str, Any]) -> int | None:
    """How many characters may become one; None for any number of them."""
    kind = step["type"]
    if kind in KEEPING_NORMALIZERS or kind in KEEPING_PRE_TOKENIZERS:
        return 1
    if kind in COMPOSING_NORMALIZERS:
        return COMPOSED_CHARS
    if kind in SPLITTING_PRE_TOKENIZERS and step["behavior"] != "Removed":
        return 1
    if kind == "Replace" and step["content"] and "String" in step["pattern"]:
        return -(-len(step["pattern"]["String"]) // len(step["content"]))
    return None


def _knows_every_byte(
    backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int], steps: list[Mapping[str, Any]]
) -> bool:
    """Whether no character is unknown: unknown ones may be dropped, or any number of them be one token."""
    if not isinstance(backend.model, tokenizers.models.BPE):
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        return all(char in vocabulary for char in tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return bool(backend.model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
