"""What a request may ask of the engine, whichever way it comes: by HTTP, or from Python."""

from typing import Any

import pytest

from aserve.core.config import ModelInfo
from aserve.core.errors import InvalidRequestError
from aserve.core.params import MAX_SCORES, SamplingParams
from aserve.core.request import Request, Terms
from aserve.intake import new_request
from tests.engines import byte_tokenizer

INFO = ModelInfo(
    names=("m",),
    root="",
    vocab_size=260,
    max_model_len=2**18,
    eos_ids=frozenset(),
    created_s=0,
    max_logprobs=260,
)


def ask(**params: Any) -> Request:
    return new_request(INFO, byte_tokenizer(), (1,), SamplingParams(**params), Terms(arrival_s=0.0))


def test_as_many_scores_as_that_are_given_and_not_one_place_more():
    num_places = MAX_SCORES // 128
    assert ask(logprobs=128, max_tokens=num_places).params.logprobs == 128
    with pytest.raises(InvalidRequestError, match="more than 16777216 scores"):
        ask(logprobs=128, max_tokens=num_places + 1)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("stop_token_ids", [259, 260]),
        ("logit_bias", {259: 1.0, 260: 1.0}),
        ("allowed_token_ids", [259, 260]),
        ("logprob_token_ids", [259, 260]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_in_every_field(field: str, given: Any):
    others = {"logprobs": 2} if field == "logprob_token_ids" else {}
    with pytest.raises(InvalidRequestError, match=f"{field}: token id 260 is out of vocabulary") as refused:
        ask(**{field: given}, **others)
    assert refused.value.param == field
