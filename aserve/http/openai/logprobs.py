"""Log-probabilities as OpenAI's two APIs spell them, and vLLM's prompt_logprobs. All are of the raw model distribution.

chat         {"content": [{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}]}]}
completions  {"tokens": [], "token_logprobs": [], "top_logprobs": [{token: logprob}], "text_offset": []}
prompt       [null, {token id: {"logprob", "rank", "decoded_token"}}]
"""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from aserve.core.params import num_likeliest
from aserve.core.plan import TokenScores
from aserve.engine import Engine

MIN_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON has not."""


def check_logprobs(engine: Engine, fields: msgspec.Struct) -> None:
    """Raise `InvalidRequestError` where more of the likeliest tokens are asked for than the engine gives."""
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        wanted = getattr(fields, name, None)
        if type(wanted) is int:  # a chat's logprobs are true or false
            num_likeliest(name, wanted, engine.info.max_logprobs, engine.info.vocab_size)


class Speller:
    """What single tokens are called. as_ids: "token_id:123" instead of text."""

    def __init__(self, engine: Engine, *, as_ids: bool, skip_special_tokens: bool) -> None:
        self._engine = engine
        self._as_ids = as_ids
        self._skip_special_tokens = skip_special_tokens

    def raw(self, token_id: int) -> bytes:
        """All that the token stands for, a special one for its name."""
        return self._engine.token_bytes([token_id])[0]

    def shown(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """What each token adds to the text of the answer."""
        return self._engine.token_bytes(token_ids, skip_special_tokens=self._skip_special_tokens)

    def text(self, token_id: int) -> str:
        """The token as text, with U+FFFD for what is only a part of a character."""
        return f"token_id:{token_id}" if self._as_ids else self.raw(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        """The token as text; parts of characters are spelled byte by byte, so that no two of them are the same key."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(speller: Speller, scores: Sequence[TokenScores]) -> dict[str, Any]:
    """A choice's or chunk's "logprobs"."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(speller.raw(token_id))
        return {"token": speller.text(token_id), "logprob": _finite(logprob), "bytes": raw}

    content = [
        {
            **named(score.token_id, score.logprob),
            "top_logprobs": [named(*top) for top in zip(score.top_ids, score.top_logprobs, strict=True)],
        }
        for score in scores
    ]
    return {"content": content}


class CompletionLogprobs:
    """The "logprobs" of one choice, in as many parts as it is streamed in.

    text_offset counts the characters that the tokens before come to, whether they have been sent yet or not.
    """

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], scores: Sequence[TokenScores | None], text: str) -> dict[str, Any]:
        """The tokens of a prompt that is echoed as `text`; nothing predicts the first.

        Special tokens count where they stand in the text, but not where the tokenizer has put them around it.
        """
        spelled, starts = "", []
        for token_id in token_ids:
            starts.append(len(spelled))
            spelled += self._decoder.decode(self._speller.raw(token_id))
        start = max(spelled.find(text), 0)
        self._decoder.reset()
        self._offset = len(text)
        return self._named(token_ids, scores, [min(max(place - start, 0), len(text)) for place in starts])

    def part(self, token_ids: Sequence[int], scores: Sequence[TokenScores]) -> dict[str, Any]:
        """The next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._speller.shown([token_id])[0]))
        return self._named(token_ids, scores, offsets)

    def _named(
        self, token_ids: Sequence[int], scores: Sequence[TokenScores | None], offsets: list[int]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._speller.key(token_id) for token_id in token_ids],
            "token_logprobs": [None if score is None else _finite(score.logprob) for score in scores],
            "top_logprobs": [None if score is None else self._top(score) for score in scores],
            "text_offset": offsets,
        }

    def _top(self, score: TokenScores) -> dict[str, float]:
        """The sampled token, which is the first as in vLLM, and the likeliest."""
        pairs = [(score.token_id, score.logprob), *zip(score.top_ids, score.top_logprobs, strict=True)]
        return {self._speller.key(token_id): _finite(logprob) for token_id, logprob in pairs}


def prompt_logprobs(speller: Speller, scores: Sequence[TokenScores]) -> list[dict[str, Any] | None]:
    """The likeliest tokens at each place of a prompt, and the one that stands there; nothing predicts the first."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": speller.text(token_id)}

    found: list[dict[str, Any] | None] = [None]
    for score in scores:
        ranked = enumerate(zip(score.top_ids, score.top_logprobs, strict=True), start=1)
        at_place = {str(score.token_id): entry(score.token_id, score.logprob, score.rank)}
        at_place |= {str(token_id): entry(token_id, logprob, rank) for rank, (token_id, logprob) in ranked}
        at_place[str(score.token_id)]["rank"] = score.rank
        found.append(at_place)
    return found


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
