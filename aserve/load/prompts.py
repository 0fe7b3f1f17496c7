"""Prompts of an exact length in tokens, as token ids or as text that a tokenizer turns into the same number of ids.

Ids are drawn at random, so that no two prompts share a beginning unless it is asked for.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

Prompt = list[int] | str


class Prompts:
    """Draws ids from a pool, and renders them as a server takes them.

    to_text: for servers that refuse token ids; None sends the ids themselves.
    """

    def __init__(self, pool: Sequence[int], to_text: Callable[[list[int]], str] | None = None) -> None:
        self.pool = pool
        self._to_text = to_text

    @classmethod
    def of_tokenizer(cls, path: Path, *, as_text: bool) -> "Prompts":
        """From the tokens of a tokenizer.json that are a space and a word: those stay apart when they are joined.

        path: the file, or the folder that holds it. Raises ValueError where it has no such tokens.
        """
        from tokenizers import Tokenizer  # needed by nobody who sends ids of a range

        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
        pool = []
        for token, token_id in tokenizer.get_vocab().items():
            word = " " + token[1:]
            plain = word.isascii() and word[1:].isalpha() and word.islower()
            if plain and tokenizer.encode(word, add_special_tokens=False).ids == [token_id]:
                pool.append(token_id)
        if not pool:
            raise ValueError(
                f"{path} has no token that is a space and a word: prompts as text would have no exact length"
            )

        def to_text(ids: list[int]) -> str:
            text: str = tokenizer.decode(ids, skip_special_tokens=False)
            if tokenizer.encode(text, add_special_tokens=False).ids != ids:
                raise ValueError(f"the text of {len(ids)} tokens is not those tokens again: {text[:80]!r}")
            return text

        return cls(sorted(pool), to_text if as_text else None)

    def draw(self, rng: random.Random, num_tokens: int) -> list[int]:
        """So many ids."""
        return rng.choices(self.pool, k=num_tokens)

    def render(self, ids: list[int]) -> Prompt:
        """The ids as the field `prompt`."""
        return self._to_text(ids) if self._to_text else ids
