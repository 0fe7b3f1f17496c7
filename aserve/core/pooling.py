"""Pooling: what a model makes of a whole sequence in place of a next token: an embedding, or a score for each label.

Knows the options, what is known of a model that pools, and what comes out. Where it is computed: runner/pooling.py for
decoders, runner/encoder.py for encoders.
"""

from array import array
from collections.abc import Callable, Mapping
from math import exp, sqrt
from typing import Any, Final, Literal, TypedDict, cast, get_args

import msgspec

from aserve.core.errors import InvalidRequestError
from aserve.core.outputs import RequestTimings
from aserve.core.recording import RecordingFields, RecordingOptions
from aserve.core.rules import MAX_INT, Refused, Rule, Rules, count, flag, integer, one_of, optional, text

RunnerKind = Literal["auto", "generate", "pooling"]
ConvertKind = Literal["auto", "none", "embed", "classify", "reward"]
PoolingTask = Literal["embed", "classify", "reward"]
PoolingMethod = Literal["last", "mean", "cls"]
Activation = Literal["none", "normalize", "sigmoid", "softmax"]
RUNNER_KINDS: Final = get_args(RunnerKind)
CONVERT_KINDS: Final = get_args(ConvertKind)


class PoolingOptions(RecordingOptions, frozen=True, kw_only=True):
    """The fields of `Options` that say what is made of a model, as vLLM names them.

    runner: generate text, or pool; auto is what the architecture and the folder say. convert: of which kind the pooling
    is, for a model that is not made for it. hf_overrides: fields that replace those of config.json.
    """

    runner: RunnerKind = "auto"
    convert: ConvertKind = "auto"
    hf_overrides: dict[str, Any] | None = None


class PoolingFields(RecordingFields, total=False):
    """The fields of `PoolingOptions` as keyword arguments."""

    runner: RunnerKind
    convert: ConvertKind
    hf_overrides: Mapping[str, Any] | None


def overrides(value: object) -> dict[str, Any]:
    """The rule: fields of config.json by name."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise Refused("an object of config.json's fields")
    return {text(name): field for name, field in value.items()}


POOLING_RULES: Final[Mapping[str, Rule]] = {
    "runner": one_of(*RUNNER_KINDS),
    "convert": one_of(*CONVERT_KINDS),
    "hf_overrides": optional(overrides),
}


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model that pools.

    task: embed gives a vector; classify a score for each label; reward scores that no activation is put on.
    method: which hidden states are pooled: that of the last token, of the first (cls), or the mean of all.
    size: numbers in what comes out. activation: what they go through, unless a request does without.
    dimensions: how many of a vector's first numbers a request may ask for (matryoshka): any up to `size` where it is
    empty, and None where it may not. labels: their names, by index; empty where there are none.
    is_causal: computed by a decoder, over the paged cache; else by an encoder, whole sequences at once.
    takes_templates: a chat template was given, by which pairs of texts are written.
    """

    task: PoolingTask
    method: PoolingMethod
    size: int
    activation: Activation
    dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    is_causal: bool = True
    takes_templates: bool = False

    @property
    def reads_all(self) -> bool:
        """Whether the hidden states of all positions are needed, so that none may come from the prefix cache."""
        return self.method != "last" or not self.is_causal


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants of a model that pools.

    dimensions: of an embedding: its first so many numbers, normalised anew; None is all. use_activation: whether an
    embedding is normalised, and scores are probabilities; None is as the model says. per_token: a vector for each token
    of the input, in place of one for all.

    Raises `InvalidRequestError`, naming the field, for what is of another type or out of bounds.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    per_token: bool = False

    def __post_init__(self) -> None:
        PARAM_RULES.settle(self)


PARAM_RULES: Final = Rules(
    InvalidRequestError, {"dimensions": optional(count(MAX_INT)), "use_activation": optional(flag), "per_token": flag}
)


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """What came out for one input. values: float32; `numpy.asarray(pooled.values)` copies nothing.

    num_vectors: 1; where each token has one, as many as these, whose values are one behind the other.
    num_cached_tokens: of the input, found in the prefix cache. timings: how long it waited, and took.
    """

    prompt_token_ids: tuple[int, ...]
    values: "array[float]"
    num_vectors: int = 1
    num_cached_tokens: int = 0
    timings: RequestTimings | None = None


class TokenizedInput(msgspec.Struct, frozen=True):
    """An input of a model that pools. second_at: where the second of two texts begins, if the tokenizer tells."""

    token_ids: tuple[int, ...]
    second_at: int | None = None


class InputTerms(TypedDict, total=False):
    """How an input becomes tokens, as keyword arguments.

    add_special_tokens: those that the tokenizer puts around a text; True if not given. truncate_prompt_tokens: an input
    of more tokens is cut to so many, -1 to as many as the model takes; None refuses what the model does not take.
    truncation_side: "right" keeps the first, "left" the last tokens.
    """

    add_special_tokens: bool
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"]


def checked_terms(terms: InputTerms) -> InputTerms:
    """The same as they are kept. Raises `InvalidRequestError`, naming the field, for another type or out of bounds."""
    checked: Any = {field: INPUT_RULES.check(field, value) for field, value in terms.items()}
    return cast("InputTerms", checked)


def _truncation(value: object) -> int:
    limit: int = _LIMIT(value)
    if limit:
        return limit
    raise Refused("-1, or at least 1")


_LIMIT: Final = integer(-1, MAX_INT)
INPUT_RULES: Final = Rules(
    InvalidRequestError,
    {
        "add_special_tokens": flag,
        "truncate_prompt_tokens": optional(_truncation),
        "truncation_side": one_of("left", "right"),
    },
)


def check_params(pooling: Pooling, params: PoolingParams) -> None:
    """Raise `InvalidRequestError` for what the model cannot give."""
    if params.per_token and pooling.task != "embed" and not pooling.is_causal:
        raise InvalidRequestError(
            "this classifier reads an input as a whole, and gives no scores of its tokens", "task"
        )
    wanted = params.dimensions
    if wanted is None:
        return
    if pooling.dimensions is None:
        raise InvalidRequestError(
            "dimensions: this model's config does not say that its embeddings may be shortened"
            " (is_matryoshka or matryoshka_dimensions)"
            if pooling.task == "embed"
            else "dimensions are of embeddings, and this model classifies",
            "dimensions",
        )
    if pooling.dimensions and wanted not in pooling.dimensions:
        allowed = ", ".join(map(str, pooling.dimensions))
        raise InvalidRequestError(f"dimensions must be one of {allowed}, got {wanted}", "dimensions")
    if wanted > pooling.size:
        raise InvalidRequestError(f"dimensions must be in [1, {pooling.size}], got {wanted}", "dimensions")


def activated(pooling: Pooling, params: PoolingParams, values: "array[float]") -> "array[float]":
    """What a request gets of what the model made: one vector, or several, one behind the other."""
    found = array("f")
    for start in range(0, len(values), pooling.size):
        found += _activated(pooling, params, values[start : start + pooling.size])
    return found


def _activated(pooling: Pooling, params: PoolingParams, values: "array[float]") -> "array[float]":
    if params.dimensions is not None:
        values = values[: params.dimensions]
    if params.use_activation is False:
        return values
    return ACTIVATIONS[pooling.activation](values)


def _normalized(values: "array[float]") -> "array[float]":
    norm = max(sqrt(sum(value * value for value in values)), 1e-12)
    return array("f", [value / norm for value in values])


def _sigmoid(values: "array[float]") -> "array[float]":
    return array(
        "f", [1.0 / (1.0 + exp(-value)) if value >= 0 else exp(value) / (1.0 + exp(value)) for value in values]
    )


def _softmax(values: "array[float]") -> "array[float]":
    largest = max(values)
    powers = [exp(value - largest) for value in values]
    total = sum(powers)
    return array("f", [power / total for power in powers])


ACTIVATIONS: Final[Mapping[Activation, Callable[["array[float]"], "array[float]"]]] = {
    "none": lambda values: values,
    "normalize": _normalized,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}


def cosine(one: "array[float]", other: "array[float]") -> float:
    """Of the angle between two vectors."""
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / max(sqrt(sum(a * a for a in one)) * sqrt(sum(b * b for b in other)), 1e-12)
