"""Detokenizer: tokens to text as they come, UTF-8 safe.

Bytes of tokens are concatenated and decoded by an incremental UTF-8 decoder, so that a character split over tokens is
held back until its last byte is there, no more than 3 bytes are ever held, and the cost is linear in the bytes.
Invalid bytes become U+FFFD, one for each maximal subpart (the Unicode standard, section 3.9, "U+FFFD Substitution of
Maximal Subparts"), which is what Python and Rust do.

The usual technique decodes a window of tokens twice a step and emits the difference (text-generation-inference's and
vLLM's prefix and read offsets). It needs the window because it sees text, not bytes: it cannot tell an unfinished
character from an invalid one, and forgets the leading space after a token that decodes to nothing.

Differs from decoding the whole at once in one case: after SentencePiece byte fallback, `tokenizers` turns every byte of
a run with an invalid byte in it into U+FFFD, valid characters of the run included, which no stream could foresee.
"""

from codecs import utf_8_decode
from collections.abc import Iterable

from aserve.text.token_bytes import TokenBytes


class Detokenizer:
    """The text of one sequence of tokens.

    keep_leading_space: the text goes on from another, so the space that begins a first word is part of it.
    """

    def __init__(self, token_bytes: TokenBytes, *, keep_leading_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._unfinished = b""  # the first bytes of a character: at most 3
        self._leading = "" if keep_leading_space else token_bytes.leading  # what may still be dropped

    @property
    def is_between_characters(self) -> bool:
        """Whether the next token's text is the same wherever it stands."""
        return not self._unfinished and not self._leading

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; it never ends inside a character."""
        encoded = self._unfinished + b"".join([self._token_bytes[token_id] for token_id in token_ids])
        text, num_decoded = utf_8_decode(encoded, "replace", False)
        self._unfinished = encoded[num_decoded:]
        return self._strip(text) if self._leading else text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished, or nothing."""
        text, _ = utf_8_decode(self._unfinished, "replace", True)
        self._unfinished = b""
        return self._strip(text)

    def _strip(self, text: str) -> str:
        stripped = text
        while self._leading and stripped.startswith(self._leading[0]):
            stripped, self._leading = stripped[1:], self._leading[1:]
        if stripped:
            self._leading = ""
        return stripped
