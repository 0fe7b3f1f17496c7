"""What a plan says of drafts, and which of them are accepted."""

import pytest

from aserve.core.ids import Row, SeqId
from aserve.core.plan import SeqSlice, num_agreeing


def slice_of(token_ids: tuple[int, ...], num_samples: int, start: int = 10) -> SeqSlice:
    return SeqSlice(SeqId(0), Row(0), start, max(1, len(token_ids)), token_ids, (), num_samples)


@pytest.mark.parametrize(
    ("token_ids", "num_samples", "draft_ids"),
    [
        ((), 1, ()),  # the token is on the device
        ((7,), 1, ()),
        ((7, 8, 9), 0, ()),  # a chunk that more will follow
        ((7, 8, 9), 1, ()),
        ((7, 8, 9), 3, (8, 9)),
        ((5, 6, 7, 8, 9), 2, (9,)),  # the end of a prompt, and a guess
    ],
)
def test_drafts_are_the_last_tokens_of_a_slice_with_several_samples(token_ids, num_samples, draft_ids):
    assert slice_of(token_ids, num_samples).draft_ids == draft_ids


@pytest.mark.parametrize(
    ("draft_ids", "sampled_ids", "num"),
    [
        ((), (4,), 0),
        ((4, 5), (4, 5, 6), 2),
        ((4, 5), (4, 6, 5), 1),
        ((4, 5), (3, 5, 6), 0),  # what comes after the first that differs was computed on a wrong past
        ((4, 5), (-1, 5, 6), 0),  # logits that were not finite
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_was_not_sampled(draft_ids, sampled_ids, num):
    assert num_agreeing(draft_ids, sampled_ids) == num
