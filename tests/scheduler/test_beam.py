"""The pure search against one that keeps whole sequences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.params import BeamParams
from aserve.core.plan import TokenScores
from aserve.scheduler.beam import BeamSearch
from tests.fakes import scores_of
from tests.scheduler.reference_beams import reference_beam_search

VOCABULARY = range(7)
PARAMS = st.builds(
    BeamParams,
    width=st.integers(1, 5),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)


def search(prompt, params, max_tokens, stop_ids, min_tokens) -> tuple[BeamSearch, int]:
    """The search run over the fake model, and how often a slot took another's past."""
    beams = BeamSearch(params, max_tokens=max_tokens, stop_ids=stop_ids, min_tokens=min_tokens)
    slots = [list(prompt)] * params.width
    num_takeovers = 0
    while not beams.is_done:
        contexts = [[(at, token, 0) for at, token in enumerate(slot)] for slot in slots]
        moves = beams.advance([scores_of(context, VOCABULARY, 0, beams.num_scores) for context in contexts])
        num_takeovers += sum(slots[parent] != slots[slot] for slot, (parent, _) in enumerate(moves))
        slots = [[*slots[parent], token] for parent, token in moves]
    return beams, num_takeovers


@given(
    st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=4),
    PARAMS,
    st.integers(1, 8),
    st.frozensets(st.sampled_from(VOCABULARY), max_size=3),
    st.integers(0, 3),
)
def test_the_search_finds_what_the_reference_finds(prompt, params, max_tokens, stop_ids, min_tokens):
    found = search(prompt, params, max_tokens, stop_ids, min_tokens)[0].best(params.width)
    expected = reference_beam_search(
        prompt,
        params,
        num_returned=params.width,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        min_tokens=min_tokens,
        vocabulary=VOCABULARY,
    )
    assert [list(hypothesis.token_ids) for hypothesis in found] == [tokens for tokens, _ in expected]
    for hypothesis, (tokens, logprob) in zip(found, expected, strict=True):
        assert hypothesis.logprob == pytest.approx(logprob)
        assert hypothesis.score == pytest.approx(logprob / len(tokens) ** params.length_penalty)
        assert hypothesis.stop_id == (tokens[-1] if tokens[-1] in stop_ids else None)


def test_a_beam_that_goes_on_keeps_its_slot():
    beams = BeamSearch(BeamParams(width=3), max_tokens=9, stop_ids=frozenset())
    start = TokenScores(0, 0.0, 1, (4, 5, 6), (-1.0, -2.0, -3.0))
    assert {token for _, token in beams.advance([start] * 3)} == {4, 5, 6}
    likely, unlikely = TokenScores(0, 0.0, 1, (1, 2), (-0.1, -0.2)), TokenScores(0, 0.0, 1, (3,), (-9.0,))
    moves = beams.advance([unlikely, likely, likely])
    assert [parent for parent, _ in moves[1:]] == [1, 2]
    assert moves[0].parent in (1, 2)


def test_a_search_that_has_ended_takes_no_step():
    beams = BeamSearch(BeamParams(width=1), max_tokens=1, stop_ids=frozenset())
    scores = TokenScores(0, 0.0, 1, (4,), (-1.0,))
    assert beams.advance([scores]) == []
    assert beams.best(1) == [(-1.0, (4,), -1.0, None)]
    with pytest.raises(AssertionError, match="I19"):
        beams.advance([scores])
