"""SpeculativeConfig: how tokens are guessed for steps to verify, as `--speculative-config` says it. Keys are vLLM's."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from aserve.core.errors import ConfigError
from aserve.core.rules import Refused, Rules, count, one_of, optional, path, text

METHODS: Final = ("ngram", "draft_model")
MAX_DRAFTS: Final = 64
MAX_LOOKUP: Final = 64
KEYS: Final = "a JSON object with method, model, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max"
MAX_STEP_DRAFTS: Final = 256
"""Of all sequences of a step: each takes the memory of a row of logits, which start-up leaves free for as many."""
LOOKUPS: Final = ("prompt_lookup_min", "prompt_lookup_max")


class StepSeconds(NamedTuple):
    """What a step of a draft model takes: of itself, and for each token."""

    base: float
    token: float


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What proposes drafts, and how many.

    method: "ngram" looks the newest tokens up in what came before, "draft_model" has a small model go on. model: that
    one, a folder or an id. num_speculative_tokens: drafts of a sequence in a step, at most; how many there are follows
    from how many are accepted and what they cost. prompt_lookup_min, prompt_lookup_max: of "ngram", how many of the
    newest tokens have to come up again, at least, and count, at most.

    Raises `ConfigError`, naming the key, for a value of another type or out of bounds.
    """

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int = 5
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5

    def __post_init__(self) -> None:
        RULES.settle(self)
        if (self.method == "draft_model") != (self.model is not None):
            raise ConfigError(
                f"speculative_config: method {self.method!r} "
                + ("needs a model" if self.model is None else f"has no model, got {self.model!r}")
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min must be at most prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}"
            )


RULES: Final = Rules(
    lambda message, _field: ConfigError(f"speculative_config: {message}"),
    {
        "method": one_of(*METHODS),
        "model": optional(path),
        "num_speculative_tokens": count(MAX_DRAFTS),
        "prompt_lookup_min": count(MAX_LOOKUP),
        "prompt_lookup_max": count(MAX_LOOKUP),
    },
)


def speculative_config(value: object) -> SpeculativeConfig:
    """The rule: one that is made already, or its keys. Raises `Refused`, and `ConfigError` for what a key has."""
    if isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, Mapping):
        raise Refused(KEYS)
    fields: dict[str, Any] = {text(key) if isinstance(key, str) else str(key): item for key, item in value.items()}
    known = SpeculativeConfig.__struct_fields__
    if unknown := [key for key in fields if key not in known]:
        raise ConfigError(f"speculative_config: unknown key {unknown[0]!r}; the keys are {', '.join(known)}")
    if "method" not in fields and fields.get("model") is not None:
        fields["method"] = "draft_model"
    if fields.get("method") == "draft_model" and (lookups := [key for key in LOOKUPS if key in fields]):
        raise ConfigError(f"speculative_config: {lookups[0]} is for method 'ngram', not for 'draft_model'")
    # Of the two lookups, one that is given alone bounds the other's default.
    if "prompt_lookup_min" not in fields and isinstance(most := fields.get("prompt_lookup_max"), int):
        fields["prompt_lookup_min"] = min(most, SpeculativeConfig().prompt_lookup_min)
    if "prompt_lookup_max" not in fields and isinstance(least := fields.get("prompt_lookup_min"), int):
        fields["prompt_lookup_max"] = max(least, SpeculativeConfig().prompt_lookup_max)
    return SpeculativeConfig(**fields)
