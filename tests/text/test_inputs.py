"""What is cut off inputs of models that pool: text, down to the token, and of a pair never the whole second text."""

import pytest

from aserve.core.errors import ContextLengthError
from aserve.text.inputs import Cut, cut_ids, tokenized
from tests.text import checkpoints

TOKENIZER = checkpoints.byte_level()


def ids(*texts, cut=None):
    """Token ids of a text, or of a pair."""
    given = texts[0] if len(texts) == 1 else texts
    [found] = tokenized(TOKENIZER, [given], ["input"], special=False, cut=cut)
    return found.token_ids


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [1, 3, 5, 6])
def test_a_text_is_cut_to_the_limit_at_its_side(side, limit):
    whole = ids("0 1 2")
    assert len(whole) == 5
    kept = whole[:limit] if side == "right" else whole[-limit:]
    assert ids("0 1 2", cut=Cut(limit, side)) == kept
    assert cut_ids(whole, Cut(limit, side)) == kept
    assert cut_ids(whole, None) == whole


@pytest.mark.parametrize(("side", "kept"), [("right", "01234"), ("left", "01256")])
def test_of_a_pair_the_second_text_is_cut(side, kept):
    assert ids("012", "3456", cut=Cut(5, side)) == ids(kept)


def test_something_of_the_second_text_has_to_be_left():
    assert ids("012", "3456", cut=Cut(4)) == ids("0123")
    with pytest.raises(ContextLengthError, match="input: 7 tokens cannot be cut to 3: only 4 of them may go") as caught:
        ids("012", "3456", cut=Cut(3))
    assert caught.value.param == "input"
