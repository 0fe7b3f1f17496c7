"""TokenBytes: the bytes that each token stands for, from what tokenizer.json says of its decoder.

Every decoder of a language model in use is a function of one token at a time: concatenating the tokens' bytes, and
dropping at most a leading space of the whole, is decoding. Knowing the bytes makes incremental decoding exact and free
of any look-back (see detokenizer.py). Knows nothing of sequences of tokens.

    decoder                                       bytes of a token                              leading run dropped
    ByteLevel (GPT-2, Llama 3, Qwen)              each character stands for one byte            nothing
    Replace, ByteFallback, Fuse, Strip (Llama 2)  "▁" is a space, "<0xE4>" is a byte            a space, by Strip
    Metaspace                                     "▁" is a space                                a space
    none                                          a space, then the token                       a space
"""

import re
from collections.abc import Callable, Mapping, Set
from functools import cache
from typing import Any, Final, cast

import msgspec
import tokenizers

from aserve.core.errors import CheckpointError

Piece = str | bytes
"""A token on its way to bytes: text that later steps may still change, or bytes that none touches."""
Step = Callable[[Piece], Piece]

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Maps a token id to its bytes, computed on first use. An id without a token, or in `skip`, has none.

    leading: the decoder drops the longest common prefix of this and the whole text.
    Raises `CheckpointError` when the decoder is not one of the module docstring's.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skip: Set[int] = frozenset()) -> None:
        self._id_to_token = backend.id_to_token
        self._skip = skip
        self._steps, self.leading = _decoder_steps(_decoder_spec(backend))

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skip else self._id_to_token(token_id)
        piece: Piece = b""
        if token is not None:
            piece = token
            for step in self._steps:
                piece = step(piece)
        self[token_id] = found = piece.encode() if isinstance(piece, str) else piece
        return found


class TokenTexts(dict[int, str | None]):
    """Maps a token id to its text, computed on first use; None where its bytes are not whole characters."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._token_bytes[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def _decoder_spec(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    if backend.decoder is None:
        return None
    return cast("Mapping[str, Any]", msgspec.json.decode(backend.decoder.__getstate__()))


def _decoder_steps(spec: Mapping[str, Any] | None) -> tuple[list[Step], str]:
    """The steps to a token's bytes, and the leading run to drop from the whole."""
    if spec is None:
        return [lambda piece: " " + cast("str", piece)], " "
    specs: list[Mapping[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    steps: list[Step] = []
    leading = ""
    is_fused = False  # after Fuse and ByteLevel a step sees the whole text as one token
    for each in specs:
        match each["type"]:
            case "Replace" if not is_fused and "String" in each["pattern"]:
                steps.append(_replacing(each["pattern"]["String"], each["content"]))
            case "ByteFallback" if not is_fused:
                steps.append(_byte_fallback)
            case "Metaspace" if not is_fused:
                steps.append(_replacing(each["replacement"], " "))
                leading = "" if each["prepend_scheme"] == "never" else " "
            case "ByteLevel" if not is_fused:
                steps.append(_byte_level)
                is_fused = True
            case "Fuse":
                is_fused = True
            case "Strip" if is_fused and each["stop"] == 0:
                leading = each["content"] * each["start"]
            case unsupported:
                raise CheckpointError(
                    f"tokenizer.json: the decoder {unsupported} is not supported here; supported are ByteLevel, "
                    "Metaspace, and sequences of Replace, ByteFallback, Fuse and Strip"
                )
    return steps, leading


def _replacing(old: str, new: str) -> Step:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


def _byte_fallback(piece: Piece) -> Piece:
    if isinstance(piece, str) and (match := BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece


def _byte_level(piece: Piece) -> Piece:
    """A token with a character outside the byte alphabet is an added one, and stands for itself."""
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[char] for char in piece]) if isinstance(piece, str) else piece
    except KeyError:
        return piece


@cache
def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's stand-ins for bytes: a visible Latin-1 character is itself, the others are counted on from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}
