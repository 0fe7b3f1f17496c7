"""SamplingParams refuses what is out of bounds, by name, with the value and the bounds."""

import pytest

from aserve.core.errors import InvalidRequestError
from aserve.core.params import NOT_WITH_BEAMS, BeamParams, SamplingParams
from aserve.core.structured import StructuredOutputs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("max_tokens", 2**63),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", ("",)),
        ("stop", ("a", "b", "c", "d", "e")),
        ("stop", ("x" * 1025,)),
        ("stop_token_ids", tuple(range(129))),
    ],
)
def test_out_of_bounds_names_the_field(field, value):
    with pytest.raises(InvalidRequestError, match=field if field != "stop" else "stop") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1.0},
        {"top_k": -1},
        {"top_k": 0},
        {"min_p": 1.0},
        {"seed": -(2**63)},
        {"stop": ("a", "b", "c", "d")},
        {"min_tokens": 3, "max_tokens": 3},
    ],
)
def test_the_bounds_themselves_are_allowed(fields):
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


def test_more_min_tokens_than_max_tokens_is_refused_with_both_numbers():
    with pytest.raises(InvalidRequestError, match=r"at most max_tokens \(2\), got 3") as caught:
        SamplingParams(min_tokens=3, max_tokens=2)
    assert caught.value.param == "min_tokens"


def test_a_tiny_temperature_is_greedy():
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"width": 0}, "width"),
        ({"width": 129}, "width"),
        ({"width": 2, "length_penalty": 10.5}, "length_penalty"),
        ({"width": 2, "length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_bounds_of_a_beam_search(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        BeamParams(**fields)
    assert caught.value.param == param


def test_what_does_not_go_with_beams():
    values = {
        "logprobs": 0,
        "prompt_logprobs": 0,
        "logprob_token_ids": (5,),
        "best_of": 2,
        "logit_bias": ((5, 1.0),),
        "allowed_token_ids": (5,),
        "bad_words": ("no",),
        "structured": StructuredOutputs(json_object=True),
        "thinking_token_budget": 5,
    }
    assert set(values) == set(NOT_WITH_BEAMS)
    for field, value in values.items():
        with pytest.raises(InvalidRequestError, match=f"{field} does not work with beam search") as caught:
            SamplingParams(beam=BeamParams(width=2), **{field: value})
        assert caught.value.param == field
    with pytest.raises(InvalidRequestError, match=r"n must be at most the beam width \(2\), got 3"):
        SamplingParams(beam=BeamParams(width=2), n=3)
