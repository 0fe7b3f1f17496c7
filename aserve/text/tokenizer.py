"""Tokenizer: text to token ids and back, by the `tokenizers` library from a checkpoint's tokenizer.json.

Gives the ids that transformers' AutoTokenizer gives for the same folder, without importing transformers. Whether a
beginning-of-sequence token is put before a text is tokenizer.json's post-processor's to say: transformers 5 ignores
add_bos_token where there is a tokenizer.json. Does not know sequences that grow: see detokenizer.py and stream.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import tokenizers

from aserve.core.errors import CheckpointError, InvalidRequestError
from aserve.core.faults import WISHES
from aserve.text.text_bounds import max_chars_per_token
from aserve.text.token_bytes import TokenBytes, TokenTexts
from aserve.text.tokenizer_config import TokenizerConfig, read_tokenizer_config

TOKENIZER_FILE: Final = "tokenizer.json"


def tokenizer_file(folder: str | Path) -> Path:
    """Of a checkpoint folder. Raises `CheckpointError` where it is missing."""
    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {TOKENIZER_FILE}, the one tokenizer format that is read here; "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it where transformers can"
        )
    return path


class Tokenizer:
    """Stateless once made, and safe to use from several threads; encoding and decoding release the GIL.

    vocab_size: how many tokens there are (a model's may be larger, padded); num_base_tokens: without added ones.
    special_ids: tokens that are not text.
    bos_id, eos_id: None where the checkpoint names none. text_bytes: the bytes of each token, special ones skipped;
    token_bytes: those of special tokens too. token_texts: as text_bytes, as text; None where that is not whole
    characters. max_chars_per_token: of the text that a token can stand for; None where there is no bound.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
        """backend is changed: the config's tokens are added to it. Raises `CheckpointError` as TokenBytes does."""
        self._backend = backend
        self._config = config
        backend.no_truncation()  # a prompt is never shortened in silence
        backend.no_padding()
        self.num_base_tokens: Final = backend.get_vocab_size(with_added_tokens=False)
        _add_tokens(backend, config)
        added = backend.get_added_tokens_decoder()
        self.special_ids: Final = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: Final = backend.get_vocab_size()
        self.bos_id: Final = self._id_of(config.named_tokens.get("bos_token"))
        self.eos_id: Final = self._id_of(config.named_tokens.get("eos_token"))
        self.text_bytes: Final = TokenBytes(backend, skip=self.special_ids)
        self.token_bytes: Final = TokenBytes(backend)
        self.token_texts: Final = TokenTexts(self.text_bytes)
        self.response_template: Final = config.response_template
        self._showing: dict[frozenset[str], TokenBytes] = {}
        self.max_chars_per_token: Final = max_chars_per_token(backend)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a checkpoint folder. Raises `CheckpointError` when tokenizer.json is missing or unusable."""
        path = tokenizer_file(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path}: {error}") from error
        return cls(backend, read_tokenizer_config(Path(folder)))

    def info(self) -> dict[str, Any]:
        """Its named tokens, and those that were added to the vocabulary, by id."""
        flags = ("content", "special", "normalized", "single_word", "lstrip", "rstrip")
        added = sorted(self._backend.get_added_tokens_decoder().items())
        return {
            **self._config.named_tokens,
            "additional_special_tokens": self._config.special_tokens,
            "added_tokens_decoder": {
                str(token_id): {flag: getattr(token, flag) for flag in flags} for token_id, token in added
            },
        }

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str | None = "prompt") -> tuple[int, ...]:
        """Token ids of a text. A rendered chat has its special tokens already: add none to it.

        Raises `InvalidRequestError` naming `param` for text that UTF-8 cannot express (a lone surrogate), and for text
        on which the library gives up: a regular expression that goes back too often is a panic there, no Exception.
        """
        _check_unicode(text, param)
        try:  # the batch call releases the GIL, which `encode` does not
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (MemoryError, *WISHES):
            raise
        except BaseException as error:
            raise InvalidRequestError(
                f"the tokenizer gives up on this text of {len(text)} characters", param
            ) from error
        return tuple(encoding.ids)

    def encode_all(
        self, texts: Sequence[str | tuple[str, str]], params: Sequence[str], *, add_special_tokens: bool
    ) -> list[tuple[list[int], list[int | None], list[int]]]:
        """Of each text or pair of texts the token ids, of which text each is (None: special), and their type ids.

        params: what each is called in errors. Raises as `encode`.
        """
        for text, param in zip(texts, params, strict=True):
            for part in (text,) if isinstance(text, str) else text:
                _check_unicode(part, param)
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (MemoryError, *WISHES):
            raise
        except BaseException as error:
            raise InvalidRequestError("the tokenizer gives up on one of these texts", params[0]) from error
        return [(encoding.ids, encoding.sequence_ids, encoding.type_ids) for encoding in encodings]

    def count(self, text: str, *, param: str | None = "prompt") -> int:
        """How many tokens a text has. Raises as `encode`."""
        return len(self.encode(text, add_special_tokens=False, param=param))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; an id without a token has none. Raises `InvalidRequestError` for ids outside 32 bits."""
        return self.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def decode_batch(self, batch: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """`decode` of each."""
        try:
            return self._backend.decode_batch(
                [list(token_ids) for token_ids in batch], skip_special_tokens=skip_special_tokens
            )
        except OverflowError as error:
            raise InvalidRequestError("a token id is negative or over 2**32 - 1", "tokens") from error

    def token_strings(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Each token as the vocabulary spells it ("Ġhello", "▁hello"); an id without a token is ""."""
        return tuple(self._backend.id_to_token(token_id) or "" for token_id in token_ids)

    def bytes_showing(self, markers: frozenset[str]) -> TokenBytes:
        """As text_bytes, but special tokens that are a part of one of these texts are not skipped.

        It is text_bytes itself where there are none.
        """
        if markers not in self._showing:
            names = {token_id: self._backend.id_to_token(token_id) or "" for token_id in self.special_ids}
            shown = {token_id for token_id, name in names.items() if any(name in marker for marker in markers)}
            skip = self.special_ids - shown
            self._showing[markers] = TokenBytes(self._backend, skip=skip) if shown else self.text_bytes
        return self._showing[markers]

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token, which is not part of any text."""
        return token_id in self.special_ids

    def token_id(self, token: str) -> int | None:
        """Of a token as the vocabulary spells it; None where it has none."""
        return self._backend.token_to_id(token)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


def _check_unicode(text: str, param: str | None) -> None:
    """Raise `InvalidRequestError` for what UTF-8 cannot express."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text has a lone surrogate at character {error.start}, which is not Unicode text", param
        ) from error


def _add_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Add what the config names and tokenizer.json lacks, in transformers' order, and mark special what it names."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens(
        [
            tokenizers.AddedToken(
                token.content,
                special=token.special,
                normalized=token.normalized,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
            )
            for token in config.added_tokens
            if token.content not in known
        ]
    )
    named = dict.fromkeys((*config.named_tokens.values(), *config.special_tokens))
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in named])
