"""SamplingParams: how the next token is chosen and when a sequence ends. Bounds as in docs/api.md.

Whoever makes them, HTTP or a program, has them checked here, once, by the same rules.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from aserve.core.errors import InvalidRequestError
from aserve.core.rules import (
    MAX_INT,
    Refused,
    Rules,
    biases,
    flag,
    instance,
    integer,
    integers,
    number,
    optional,
    several,
    text,
    text_or_texts,
    texts,
)
from aserve.core.structured import StructuredOutputs

MAX_STOP_STRINGS: Final = 4
MAX_STOP_STRING_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
MAX_CHOICES: Final = 128
"""Of n, best_of and the beam width: each is a sequence of its own (CVE-2026-34756: n = 10^6)."""
DEFAULT_MAX_LOGPROBS: Final = 20
"""Of the likeliest tokens beside each, unless an operator allows more (`max_logprobs`)."""
ALL_TOKENS: Final = -1
"""As a number of the likeliest tokens: the whole vocabulary, as in vLLM."""
MAX_LOGPROB_TOKEN_IDS: Final = 128
MAX_SCORES: Final = 2**24
"""Of a request that has more than DEFAULT_MAX_LOGPROBS beside a token: each takes some 70 bytes on the host."""
MAX_BIASED_TOKENS: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_ALLOWED_TOKENS: Final = 2**18
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARS: Final = 256
NOT_WITH_BEAMS: Final = (
    *("logprob_token_ids", "logprobs", "prompt_logprobs", "best_of", "logit_bias", "allowed_token_ids", "bad_words"),
    *("structured", "thinking_token_budget"),
)
"""Fields that cannot be given together with `beam`."""
GREEDY_TEMPERATURE: Final = 1e-5
"""Below this a temperature means greedy (vLLM's rule): dividing logits by it would overflow."""
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
"""Logits are multiplied and divided by it: within these a finite logit stays finite (kernels/reference.py)."""


class BeamParams(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
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
        BEAM_RULES.settle(self)


def _early_stopping(value: object) -> object:
    if value is True or value is False:
        return value
    if isinstance(value, str) and value == "never":
        return text(value)
    raise Refused('True, False or "never"')


BEAM_RULES: Final = Rules(
    InvalidRequestError,
    {
        "width": integer(1, MAX_CHOICES),
        "length_penalty": number(-10.0, 10.0),
        "early_stopping": _early_stopping,
    },
)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """How one request is sampled. Raises `InvalidRequestError`, naming the field, for a value of another type or out of
    bounds. Lists are taken for tuples, and numpy's numbers for Python's.

    max_tokens: at most this many tokens are generated; None is all the room there is.
    temperature: in [0, 2]; below 1e-5 is greedy.
    top_p, top_k, min_p: nucleus, the k likeliest (0 or -1: off), and a floor relative to the likeliest token.
    seed: None draws one at random; the same seed and prompt give the same tokens in any batch.
    stop, stop_token_ids: end the text before the string (one, or up to four), or at the token.
    ignore_eos: the model's own end-of-sequence tokens do not end the sequence.
    min_tokens: before so many, end and stop tokens are not sampled and stop strings not looked for.
    n: choices returned. best_of: sequences run, of which the n of highest cumulative log-probability are returned.
    presence_penalty, frequency_penalty: in [-2, 2], on generated tokens. repetition_penalty: in [0.01, 100], on all.
    logit_bias: a mapping of token id to bias, or such pairs, as which it is kept; biases are clamped to [-100, 100].
    allowed_token_ids: None allows all. bad_words: strings that are not generated.
    logprobs: score each token, with as many of the likeliest beside it; -1 is the whole vocabulary. At most the
        engine's `max_logprobs`. prompt_logprobs: the prompt's tokens too.
    logprob_token_ids: score these tokens beside each, in their order, in place of the likeliest; `logprobs` is their
        number.
    include_stop_str_in_output: a stop string, or stop token, stays at the end of the text.
    skip_special_tokens: special tokens are not shown in the text.
    structured: what the answer must be: JSON by a schema, text by a regular expression, one of some choices, and more.
    thinking_token_budget: after so many tokens of thoughts, their end is forced; for models whose thoughts are known.
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
    logprob_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    beam: BeamParams | None = None

    if TYPE_CHECKING:  # what is taken is more than what is kept

        def __init__(  # noqa: PLR0913  they are its fields
            self,
            *,
            max_tokens: int | None = None,
            temperature: float = 1.0,
            top_p: float = 1.0,
            top_k: int = 0,
            min_p: float = 0.0,
            seed: int | None = None,
            stop: str | Sequence[str] | None = (),
            stop_token_ids: Sequence[int] | None = (),
            ignore_eos: bool = False,
            min_tokens: int = 0,
            n: int = 1,
            best_of: int | None = None,
            presence_penalty: float = 0.0,
            frequency_penalty: float = 0.0,
            repetition_penalty: float = 1.0,
            logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]] | None = (),
            allowed_token_ids: Sequence[int] | None = None,
            bad_words: Sequence[str] | None = (),
            logprobs: int | None = None,
            prompt_logprobs: int | None = None,
            logprob_token_ids: Sequence[int] | None = (),
            include_stop_str_in_output: bool = False,
            skip_special_tokens: bool = True,
            structured: StructuredOutputs | None = None,
            thinking_token_budget: int | None = None,
            beam: BeamParams | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        SAMPLING_RULES.settle(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"best_of must be at least n ({self.n}), got {self.best_of}", "best_of")
        if self.allowed_token_ids == ():
            raise InvalidRequestError("allowed_token_ids must name at least one token, got none", "allowed_token_ids")
        if num_named := len(self.logprob_token_ids):
            if self.logprobs not in (None, num_named):
                raise InvalidRequestError(
                    f"logprobs must be the number of logprob_token_ids ({num_named}), got {self.logprobs}", "logprobs"
                )
            msgspec.structs.force_setattr(self, "logprobs", num_named)
        if self.beam is not None:
            self._check_beam(self.beam)

    def _check_beam(self, beam: BeamParams) -> None:
        if self.n > beam.width:
            raise InvalidRequestError(f"n must be at most the beam width ({beam.width}), got {self.n}", "n")
        for field in NOT_WITH_BEAMS:
            if getattr(self, field) not in (None, ()):
                raise InvalidRequestError(f"{field} does not work with beam search", field)

    @property
    def num_sequences(self) -> int:
        """Sequences that are run for the request; beams are made on the way."""
        return self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Whether the likeliest of several sequences are returned, once all have ended."""
        return self.beam is not None or self.num_sequences > self.n

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE


SAMPLING_RULES: Final = Rules(
    InvalidRequestError,
    {
        "max_tokens": optional(integer(1, MAX_INT)),
        "temperature": number(0.0, 2.0),
        "top_p": number(0.0, 1.0, low_open=True),
        "top_k": integer(-1, MAX_INT),
        "min_p": number(0.0, 1.0),
        "seed": optional(integer(-(2**63), 2**63 - 1)),
        "stop": several(text_or_texts(at_most=MAX_STOP_STRINGS, chars=MAX_STOP_STRING_CHARS)),
        "stop_token_ids": several(integers(at_most=MAX_STOP_TOKEN_IDS)),
        "ignore_eos": flag,
        "min_tokens": integer(0, MAX_INT),
        "n": integer(1, MAX_CHOICES),
        "best_of": optional(integer(1, MAX_CHOICES)),
        "presence_penalty": number(-2.0, 2.0),
        "frequency_penalty": number(-2.0, 2.0),
        "repetition_penalty": number(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "logit_bias": several(biases(at_most=MAX_BIASED_TOKENS, largest=MAX_LOGIT_BIAS)),
        "allowed_token_ids": optional(integers(at_most=MAX_ALLOWED_TOKENS)),
        "bad_words": several(texts(at_most=MAX_BAD_WORDS, chars=MAX_BAD_WORD_CHARS)),
        "logprobs": optional(integer(ALL_TOKENS, MAX_INT)),
        "prompt_logprobs": optional(integer(ALL_TOKENS, MAX_INT)),
        "logprob_token_ids": several(integers(at_most=MAX_LOGPROB_TOKEN_IDS)),
        "include_stop_str_in_output": flag,
        "skip_special_tokens": flag,
        "structured": optional(instance(StructuredOutputs)),
        "thinking_token_budget": optional(integer(0, MAX_INT)),
        "beam": optional(instance(BeamParams)),
    },
)


def num_likeliest(field: str, wanted: int, at_most: int, vocab_size: int) -> int:
    """How many of the likeliest tokens a field comes to. Raises `InvalidRequestError` for more than `at_most`."""
    num = vocab_size if wanted == ALL_TOKENS else wanted
    if num > at_most:
        told = f"{wanted}, all {vocab_size} tokens" if wanted == ALL_TOKENS else wanted
        raise InvalidRequestError(f"{field} must be at most {at_most}, got {told}", field)
    return min(num, vocab_size)
