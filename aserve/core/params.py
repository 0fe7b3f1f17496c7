"""SamplingParams: how the next token is chosen and when a sequence ends. Bounds as in docs/api.md."""

import math
from typing import Final, Literal

import msgspec

from aserve.core.errors import InvalidRequestError

MAX_STOP_STRINGS: Final = 4
MAX_STOP_STRING_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
MAX_CHOICES: Final = 128
"""Of n, best_of and the beam width: each is a sequence of its own (CVE-2026-34756: n = 10^6)."""
MAX_LOGPROBS: Final = 20
MAX_BIASED_TOKENS: Final = 1024
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARS: Final = 256
NOT_WITH_BEAMS: Final = ("logprobs", "prompt_logprobs", "best_of", "logit_bias", "allowed_token_ids", "bad_words")
"""Fields that cannot be given together with `beam`."""
GREEDY_TEMPERATURE: Final = 1e-5
"""Below this a temperature means greedy (vLLM's rule): dividing logits by it would overflow."""


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """Beam search instead of sampling. Semantics as transformers' (Vaswani et al. 2017, Wu et al. 2016).

    width: beams kept, and the number of hypotheses returned at most.
    length_penalty: a hypothesis scores its summed log-probability over its number of generated tokens to this power.
    early_stopping: True ends with `width` finished hypotheses; False when no running beam can beat the worst of them
        by its present score; "never" when none can beat it at any length.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        _within("beam_width", self.width, 1, MAX_CHOICES)
        _within("length_penalty", self.length_penalty, -10.0, 10.0)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled. Raises `InvalidRequestError` naming the field when a value is out of bounds.

    max_tokens: at most this many tokens are generated; None is all the room there is.
    temperature: in [0, 2]; below 1e-5 is greedy.
    top_p, top_k, min_p: nucleus, the k likeliest (0 or -1: off), and a floor relative to the likeliest token.
    seed: None draws one at random; the same seed and prompt give the same tokens in any batch.
    stop, stop_token_ids: end the text before the string, or at the token.
    ignore_eos: the model's own end-of-sequence tokens do not end the sequence.
    min_tokens: before so many, end and stop tokens are not sampled and stop strings not looked for.
    n: choices returned. best_of: sequences run, of which the n of highest cumulative log-probability are returned.
    presence_penalty, frequency_penalty: in [-2, 2], on generated tokens. repetition_penalty: in (0, 100], on all.
    logit_bias: (token id, bias) pairs; biases are clamped to [-100, 100]. allowed_token_ids: None allows all.
    bad_words: strings that are not generated.
    logprobs: score each token, with as many of the likeliest beside it; prompt_logprobs: the prompt's tokens too.
    include_stop_str_in_output: a stop string, or stop token, stays at the end of the text.
    skip_special_tokens: special tokens are not shown in the text.
    beam: beam search; temperature, top_p, top_k, min_p and penalties do not apply then.

    Ranked answers (best_of > n, beam) come when all have ended. A stop string cuts their text only then, and plays no
    part in the ranking.
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
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    beam: BeamParams | None = None

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
        self._check_choices()
        self._check_logits()

    def _check_choices(self) -> None:
        _within("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None:
            _within("best_of", self.best_of, self.n, MAX_CHOICES)
        if self.beam is not None:
            self._check_beam(self.beam)

    def _check_beam(self, beam: BeamParams) -> None:
        if self.n > beam.width:
            raise InvalidRequestError(f"n must be at most the beam width ({beam.width}), got {self.n}", "n")
        for field in NOT_WITH_BEAMS:
            if getattr(self, field) not in (None, ()):
                raise InvalidRequestError(f"{field} does not work with beam search", field)

    def _check_logits(self) -> None:
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        for field in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, field)) is not None:
                _within(field, value, 0, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequestError(
                f"logit_bias takes at most {MAX_BIASED_TOKENS} tokens, got {len(self.logit_bias)}", "logit_bias"
            )
        for _, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise InvalidRequestError(f"logit_bias must be finite, got {bias}", "logit_bias")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must name at least one token", "allowed_token_ids")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words takes at most {MAX_BAD_WORDS} words, got {len(self.bad_words)}", "bad_words"
            )
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
                raise InvalidRequestError(
                    f"a bad word has 1 to {MAX_BAD_WORD_CHARS} characters, got {len(word)}", "bad_words"
                )

    @property
    def num_sequences(self) -> int:
        """Sequences that are run for the request; beams are made on the way."""
        return self.best_of or self.n

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
