"""Which graph a step with prompts has, and how many tokens of prompts fill one."""

import pytest

from aserve.core.graph_sizes import GraphSizes

SIZES = GraphSizes((0, 8, 32, 64, 96, 128, 192, 256), (64, 128, 192, 256, 384, 512), num_prompts=16, cheap_tokens=256)


@pytest.mark.parametrize(
    ("num_decoding", "num_tokens", "num_padded"),
    [
        (0, 1, 64),
        (0, 49, 64),
        (0, 50, 128),
        (3, 220, 264),
        (32, 32, 96),
        (33, 49, 128),
        (33, 50, 192),
        (50, 260, None),
        (50, 309, 448),
        (50, 308, None),
        (120, 100, 256),
        (180, 110, 320),
        (140, 60, None),
        (200, 120, None),
        (257, 60, None),
        (0, 498, None),
    ],
)
def test_padding_costs_nothing_or_little(num_decoding: int, num_tokens: int, num_padded: int | None) -> None:
    """A prompt beside rows that decode: up to 256 tokens in all it is rounded up, beyond by a quarter at most."""
    size = SIZES.choose(num_decoding, 1, num_tokens)
    assert (None if size is None else sum(size)) == num_padded


@pytest.mark.parametrize(("num_prompts", "num_padded"), [(0, None), (1, 64), (15, 64), (16, None)])
def test_so_many_prompts_have_a_place(num_prompts: int, num_padded: int | None) -> None:
    size = GraphSizes((8,), (64, 128), num_prompts=16, cheap_tokens=256).choose(1, num_prompts, 2 * num_prompts)
    assert (None if size is None else size[1]) == num_padded


@pytest.mark.parametrize(
    ("num_tokens", "limit", "filled"),
    [
        (100, 600, 100),  # padded up to 128 and 64, which is cheap
        (177, 600, 177),
        (200, 600, 177),  # 64 and 256 are too much padding for 242
        (241, 600, 241),
        (300, 600, 241),
        (320, 600, 320),
        (400, 600, 369),
        (512, 600, 497),
        (512, 533, 369),  # 576 tokens would be more than may be computed
        (512, 534, 497),
        (512, 622, 512),  # more may come, of which the graph would hold a part: launched one by one
        (20, 5, 20),  # 128 are computed, which are cheap
    ],
)
def test_prompts_fill_a_graph_rather_than_exceed_it_by_a_little(num_tokens: int, limit: float, filled: int) -> None:
    """Beside 42 sequences that decode."""
    assert SIZES.fill(42, 1, num_tokens, limit, is_all=limit <= 600) == filled


def test_while_more_may_come_a_step_is_cut_only_where_it_is_full() -> None:
    assert [SIZES.fill(42, 2, num_tokens, 600, is_all=False) for num_tokens in (200, 300, 498, 499)] == [
        200,
        300,
        498,
        498,
    ]


def test_all_that_is_left_is_computed_where_no_graph_holds_it() -> None:
    assert SIZES.fill(42, 16, 400, 600, is_all=True) == 400  # no place for so many prompts
    assert SIZES.fill(300, 1, 100, 600, is_all=True) == 100  # nor for so many who decode
    assert SIZES.fill(42, 1, 700, 700, is_all=True) == 700  # the device is busy for longer than launches take
    assert GraphSizes((8,), (), num_prompts=16, cheap_tokens=256).fill(4, 1, 10, 600, is_all=True) == 10
