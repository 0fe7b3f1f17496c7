"""Where a JSON value ends, however its text is cut."""

import pytest

from aserve.text.formats.json_text import _Brackets

VALUE = '{"a\\"]": ["}\\\\", {"b": "\\u00e9\\""}]}'


@pytest.mark.parametrize("cut", range(len(VALUE)))
def test_a_value_ends_with_its_brackets_wherever_it_is_cut(cut: int):
    brackets = _Brackets()
    assert brackets.end_in(VALUE[:cut]) == 0
    assert brackets.end_in(VALUE[cut:] + '} "]') == len(VALUE) - cut
