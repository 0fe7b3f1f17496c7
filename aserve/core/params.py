"""SamplingParams: how the next token is chosen and when a sequence ends. Bounds as in docs/api.md."""

import math
from typing import Final

import msgspec

from aserve.core.errors import InvalidRequestError

MAX_STOP_STRINGS: Final = 4
MAX_STOP_STRING_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
GREEDY_TEMPERATURE: Final = 1e-5
"""Below this a temperature means greedy (vLLM's rule): dividing logits by it would overflow."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled. Raises `InvalidRequestError` naming the field when a value is out of bounds.

    max_tokens: at most this many tokens are generated; None is all the room there is.
    temperature: in [0, 2]; below 1e-5 is greedy.
    top_p, top_k, min_p: nucleus, the k likeliest (0 or -1: off), and a floor relative to the likeliest token.
    seed: None draws one at random; the same seed and prompt give the same tokens in any batch.
    stop, stop_token_ids: end the text before the string, or at the token.
    ignore_eos: the model's own end-of-sequence tokens do not end the sequence.
    min_tokens: before so many, end and stop tokens are not sampled and stop strings not looked for.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("top_k", self.top_k, -1, 2**31 - 1)
        _within("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
                )
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        self._check_stops()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", "stop")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}", "stop"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
                "stop_token_ids",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE


def _within(field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    below = value <= low if low_open else value < low
    if below or value > high or not math.isfinite(value):
        bounds = f"{'(' if low_open else '['}{low}, {high}]"
        raise InvalidRequestError(f"{field} must be in {bounds}, got {value}", field)
