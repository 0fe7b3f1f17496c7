"""The rules of a struct's fields: which of its values they look at, and as what they keep them."""

from enum import Enum

import msgspec
import pytest

from aserve.core.config import Options
from aserve.core.errors import InvalidRequestError
from aserve.core.params import BeamParams, SamplingParams
from aserve.core.request import Terms
from aserve.core.rules import Refused, Rules
from aserve.core.structured import StructuredOutputs


class Word(str, Enum):  # noqa: UP042  a StrEnum says its value
    """Its members are equal to their value, and say their name."""

    FLOAT32 = "float32"
    NEVER = "never"
    MODULE = "a=b"
    METHOD = "method"
    NGRAM = "ngram"
    JSON = "{}"


class Whole(int, Enum):
    THREE = 3


class Part(float, Enum):
    HALF = 0.5


def test_a_default_that_is_kept_as_it_is_is_looked_at_once_and_any_other_value_each_time():
    """Catches a default that its rule changes and that is kept as it was, and the defaults of another struct."""
    asked = []

    def small(value):
        asked.append(value)
        if value > 9:
            raise Refused("at most 9")
        return value

    rules = Rules(InvalidRequestError, {"needed": small, "size": small, "items": tuple})

    class One(msgspec.Struct):
        needed: int
        size: int = 3
        items: object = []

        def __post_init__(self):
            rules.settle(self)

    class Other(One):
        size: int = 4

    assert [(one.size, one.items) for one in (One(1), One(2), Other(5), Other(6))] == [
        (3, ()),
        (3, ()),
        (4, ()),
        (4, ()),
    ]
    assert asked == [3, 1, 2, 4, 5, 6]
    assert Other(7, size=3, items=[1]).items == (1,)
    assert asked[6:] == [7, 3]
    with pytest.raises(InvalidRequestError, match="size must be at most 9, got 10"):
        One(1, size=10)


@pytest.mark.parametrize(
    ("struct", "field", "given", "kept"),
    [
        (Options, "dtype", Word.FLOAT32, "float32"),
        (Options, "tokenizer", Word.NEVER, "never"),
        (Options, "metrics_prefix", Enum("Prefix", {"OURS": "ours_"}, type=str).OURS, "ours_"),
        (Options, "served_model_name", Word.NEVER, ("never",)),
        (Options, "served_model_name", [Word.NEVER], ("never",)),
        (Options, "hf_overrides", {Word.METHOD: 1}, {"method": 1}),
        (Options, "max_num_seqs", Whole.THREE, 3),
        (Options, "gpu_memory_utilization", Part.HALF, 0.5),
        (SamplingParams, "stop", Word.NEVER, ("never",)),
        (SamplingParams, "bad_words", [Word.NEVER], ("never",)),
        (SamplingParams, "stop_token_ids", [Whole.THREE], (3,)),
        (SamplingParams, "logit_bias", {Whole.THREE: Part.HALF}, ((3, 0.5),)),
        (SamplingParams, "temperature", Part.HALF, 0.5),
        (BeamParams, "early_stopping", Word.NEVER, "never"),
        (StructuredOutputs, "choice", [Word.NEVER], ("never",)),
        (StructuredOutputs, "regex", Word.NEVER, "never"),
        (StructuredOutputs, "json", Word.JSON, "{}"),
        (Terms, "request_id", Word.NEVER, "never"),
        (Terms, "cache_salt", Word.NEVER, "never"),
        (Terms, "lora", Word.NEVER, "never"),
    ],
)
def test_a_member_of_an_enum_is_kept_as_its_value(struct, field, given, kept):
    """Catches a member that is checked by its value, and kept by its name."""
    needed = {BeamParams: {"width": 2}, Terms: {"arrival_s": 0.0}}.get(struct, {})
    found = getattr(struct(**needed, **{field: given}), field)
    assert found == kept
    plain = [*found, *found.values()] if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
    assert not any(isinstance(item, Enum) for part in plain for item in (part if isinstance(part, tuple) else (part,)))


def test_a_member_of_an_enum_names_adapters_and_drafts_by_its_value():
    """Catches what is taken apart by its name."""
    options = Options(enable_lora=True, lora_modules=[Word.MODULE], speculative_config={Word.METHOD: Word.NGRAM})
    assert options.lora_modules == (("a", "b"),)
    assert options.speculative_config is not None
    assert options.speculative_config.method == "ngram"
    assert Options(enable_lora=True, lora_modules={Word.NEVER: "b"}).lora_modules[0][0].encode() == b"never"
    assert not isinstance(Options(enable_lora=True, lora_modules={Word.NEVER: "b"}).lora_modules[0][0], Enum)
