"""The sweep over transformers' decoders: that it tells right, refused and wrong apart, and what it says of all."""

import re
from pathlib import Path

import pytest
import sweep_architectures
from sweep_architectures import REFUSED, RIGHT, TRACEBACK, UNTRIED, WRONG, Verdict

pytestmark = pytest.mark.torch


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers, about what its own code does
@pytest.mark.parametrize(
    ("model_type", "outcome", "reason"),
    [
        ("phi3", RIGHT, ""),
        ("phimoe", RIGHT, ""),
        ("gemma2", RIGHT, ""),
        ("modernbert-decoder", RIGHT, ""),  # what it names decoder is its head
        ("moshi", REFUSED, "neither its mask nor its call has the window|not handed forward's keyword"),  # in 5.17
        ("bloom", REFUSED, "transformers does not attend by interface in it"),
    ],
)
def test_a_type_and_what_comes_of_it(tmp_path: Path, model_type, outcome, reason):
    verdict = sweep_architectures.judge(model_type, tmp_path)
    assert verdict.outcome == outcome, verdict
    assert re.search(reason, verdict.reason)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tokens_that_differ_are_wrong_and_what_is_no_refusal_is_a_traceback(tmp_path: Path, monkeypatch):
    answers = [[0] * sweep_architectures.NUM_NEW for _ in sweep_architectures.PROMPT_LENS]
    monkeypatch.setattr(sweep_architectures, "our_answers", lambda folder: answers)
    assert sweep_architectures.judge("phi3", tmp_path) == Verdict(
        "phi3", WRONG, "after prompts of 3, 23, 40, 100 tokens"
    )
    monkeypatch.setattr(sweep_architectures, "our_answers", lambda folder: answers[1000])
    verdict = sweep_architectures.judge("phi3", tmp_path)
    assert verdict.outcome == TRACEBACK
    assert verdict.reason.startswith("IndexError at ")


def test_the_table_goes_by_outcome_and_counts():
    verdicts = [Verdict("b", WRONG, "after"), Verdict("a", UNTRIED, "why"), Verdict("long", RIGHT, "")]
    first, second, third, counts = sweep_architectures.table(verdicts).splitlines()
    assert (first, second, third) == ("right      long", "untried    a     why", "wrong      b     after")
    assert counts.endswith(": 1 right, 0 refused, 1 untried, 1 wrong, 0 traceback")


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_no_decoder_of_transformers_is_served_wrongly_or_fails_without_a_reason():
    verdicts = list(sweep_architectures.sweep(sweep_architectures.model_types()))
    print(sweep_architectures.table(verdicts))
    assert [verdict for verdict in verdicts if verdict.outcome in sweep_architectures.BAD] == []
