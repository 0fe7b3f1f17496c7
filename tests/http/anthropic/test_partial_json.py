"""partial_object: what there is of an object, as clients that accumulate a stream have it; and in linear time."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.http.anthropic.partial_json import partial_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1, "b": "x"}', {"a": 1, "b": "x"}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a": 1, "b"', {"a": 1}),
        ('{"a": 1, "b":', {"a": 1}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": [1, {"b": tr', {"a": [1, {}]}),
        ('{"a": [1, 2', {"a": [1]}),
        ('{"a": "\\"}', {}),
        ('{"a": 1, "b": 2}}', {"a": 1, "b": 2}),
        ("{", {}),
        ("", {}),
        ("[1", {}),
        ("weather in Rome", {}),
    ],
)
def test_what_there_is(text, found):
    assert partial_object(text) == found


@settings(max_examples=200)
@given(value=st.dictionaries(st.text(max_size=3), VALUES, max_size=3), cut=st.floats(0, 1))
def test_a_cut_object_has_a_beginning_of_the_whole(value, cut):
    text = json.dumps(value)
    assert partial_object(text) == value
    found = partial_object(text[: int(len(text) * cut)])
    assert is_beginning(found, value), (found, value)


def is_beginning(found, whole) -> bool:
    if isinstance(found, dict) and isinstance(whole, dict):
        pairs = zip(found.items(), whole.items(), strict=False)
        *before, last = [*pairs] or [((0, 0), (0, 0))]
        return len(found) <= len(whole) and all(a == b for a, b in before) and is_beginning(last[0][1], last[1][1])
    if isinstance(found, list) and isinstance(whole, list):
        *before, last = [*zip(found, whole, strict=False)] or [(0, 0)]
        return len(found) <= len(whole) and all(a == b for a, b in before) and is_beginning(*last)
    return found == whole


@pytest.mark.parametrize("text", ['{"a": "' + '\\"' * 200_000, '{"a":[' * 100_000, '"' * 400_000, "{" + ' "' * 200_000])
def test_hostile_texts_take_linear_time(text):
    """Catches a scan to the end from every quote: that would be hours."""
    start = time.process_time()
    partial_object(text)
    assert time.process_time() - start < 5
