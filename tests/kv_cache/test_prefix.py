"""The longest prefix on which groups agree. Hashes are letters: span 0 is "a", and so on; spans of two positions."""

import random

import pytest

from aserve.core.ids import BlockHash
from aserve.core.layout import first_visible_span
from aserve.kv_cache.prefix import block_name, longest_prefix

SPANS = [BlockHash(letter.encode()) for letter in "abcdefgh"]
P = 2


def matched(windows: tuple[int | None, ...], *cached: str) -> int:
    """cached: the spans that each group has."""
    names = {block_name(BlockHash(letter.encode()), group) for group, spans in enumerate(cached) for letter in spans}
    return longest_prefix(SPANS, windows, P, names.__contains__)


def test_full_groups_need_every_span():
    assert matched((None,), "abcd") == 4
    assert matched((None,), "abdefgh") == 2
    assert matched((None, None), "abcdef", "abc") == 3


def test_a_window_needs_only_what_the_next_position_sees():
    assert matched((3,), "h") == 8  # position 16 sees 14 to 16
    assert matched((4,), "h") == 0  # and 13 too, which nobody has
    assert matched((4,), "gh") == 8
    assert matched((5,), "abdegh") == 8
    assert matched((5,), "abdeh") == 5
    assert matched((100,), "abcdefgh") == 8
    assert matched((100,), "bcdefgh") == 0
    assert matched((1,), "") == 8  # it sees itself alone


def test_groups_agree_on_one_prefix():
    assert matched((None, 5), "abcdef", "abcdgh") == 4
    assert matched((5, None), "abcdgh", "abcdef") == 4
    assert matched((3, 5, None), "cg", "bcfg", "abcdefg") == 7
    assert matched((3, 5, None), "cg", "bcfg", "abcdef") == 3


def test_groups_have_names_of_their_own():
    assert len({block_name(SPANS[0], group) for group in range(8)}) == 8


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_longest_of_all_that_qualify(seed):
    rng = random.Random(seed)
    windows = tuple(rng.choice((None, 1, 3, 4, 9)) for _ in range(rng.randint(1, 3)))
    cached = ["".join(rng.sample("abcdefgh", rng.randint(5, 8))) for _ in windows]

    def qualifies(num_spans: int) -> bool:
        firsts = [0 if window is None else first_visible_span(num_spans * P, window, P) for window in windows]
        return all(set("abcdefgh"[f:num_spans]) <= set(spans) for f, spans in zip(firsts, cached, strict=True))

    assert matched(windows, *cached) == max(filter(qualifies, range(9)))
