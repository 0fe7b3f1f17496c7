"""Layer groups of the models that there are, and the blocks that they need."""

import pytest

from aserve.core.layout import Footprint, block_bytes, first_visible_span, lay_out, one_group


def every(num_layers: int, period: int, window: int) -> list[int | None]:
    """Windows in all layers but every `period`-th."""
    return [None if layer % period == period - 1 else window for layer in range(num_layers)]


def test_a_model_of_one_kind_has_one_group():
    assert lay_out([None] * 4, 100) == one_group(4)
    layout = lay_out([32] * 4, 100)
    assert (layout.windows, layout.num_groups, layout.layers_per_group) == ((32,), 1, 4)


def test_a_window_as_long_as_the_context_is_none():
    assert lay_out([100, None, 100], 100) == one_group(3)
    assert lay_out([99, None, 99], 100).num_groups == 3


def test_alternating_layers_make_two_groups():
    layout = lay_out(every(26, 2, 4096), 8192)  # Gemma 2
    assert layout.windows == (4096, None)
    assert layout.layers_per_group == 13
    assert layout.places[:4] == ((0, 0), (1, 0), (0, 1), (1, 1))


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "layers_per_group"),
    [(26, 7, 4), (34, 7, 5), (48, 6, 8), (62, 6, 11)],  # Gemma 3
)
def test_one_full_layer_in_six(num_layers, num_groups, layers_per_group):
    layout = lay_out(every(num_layers, 6, 1024), 32768)
    assert (layout.num_groups, layout.layers_per_group) == (num_groups, layers_per_group)
    assert layout.windows.count(None) == 1
    assert len(set(layout.places)) == num_layers


def test_groups_are_few_even_where_that_wastes_some():
    layout = lay_out(every(28, 28, 64), 1000)
    assert (layout.num_groups, layout.layers_per_group) == (8, 4)


def test_a_single_window_among_many_full_layers_is_not_worth_groups():
    assert lay_out([64] + [None] * 27, 1000) == one_group(28)


@pytest.mark.parametrize(
    ("position", "window", "span"), [(0, 4, 0), (3, 4, 0), (4, 4, 0), (5, 4, 1), (7, 1, 3), (8, 1, 4)]
)
def test_the_first_visible_span(position, window, span):
    assert first_visible_span(position, window, 2) == span


def test_full_attention_holds_every_block():
    footprint = Footprint((None,), 16, 512)
    assert footprint.peak(100) == 7
    assert footprint.longest(7, 1000) == 112
    assert footprint.longest(100, 1000) == 1000


def test_a_window_holds_what_it_sees_and_what_is_in_flight():
    footprint = Footprint((32,), 16, 16)
    assert footprint.peak(32) == 2
    assert footprint.peak(10**6) == (32 + 2 * 16) // 16 + 2
    assert footprint.longest(6, 10**6) == 10**6
    assert footprint.longest(5, 10**6) == 80  # shorter than its peak: as without a window


def test_groups_add_up():
    footprint = Footprint((32, None, 32), 16, 16)
    assert footprint.peak(160) == 6 + 10 + 6
    assert footprint.longest(22, 1000) == 160
    assert footprint.longest(21, 1000) == 144


def test_sequences_share_what_they_have_in_common():
    footprint = Footprint((None,), 2, 8)
    assert footprint.peak(10, width=3, num_common=2) == 2 + 3 * 3
    assert footprint.longest(11, 1000, width=3, num_common=2) == 10
    footprint = Footprint((2, None), 2, 1)
    assert footprint.peak(20, width=3, num_common=2) == 3 * 4 + 2 + 3 * 8


def test_a_block_costs_what_the_draft_model_keeps_of_its_positions_too():
    """Catches a plan that gives the draft model's memory away, or counts it for each layer group."""
    assert block_bytes(10, 0, 16, 1) == 160
    assert block_bytes(10, 4, 16, 1) == 160 + 64
    assert block_bytes(10, 4, 16, 3) == 160 + 22
