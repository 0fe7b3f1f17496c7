from hypothesis import example, given
from hypothesis import strategies as st

from aserve.text.stop_strings import StopMatcher
from tests.counting import lines_run

STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)
CHUNKS = st.lists(st.text("abc", max_size=6), max_size=12)


def run(stops, chunks):
    """What was shown after each chunk, the stop string, and what flushing showed."""
    matcher = StopMatcher(stops)
    shown = []
    for chunk in chunks:
        shown.append(matcher.feed(chunk))
        if matcher.stop is not None:
            return shown, matcher.stop, ""
    return shown, None, matcher.flush()


def oracle(stops, text):
    """The text before the stop string that completes first (the longest of several), and that string."""
    for end in range(1, len(text) + 1):
        if completed := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(completed, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(STOPS, CHUNKS)
@example(["b", "ab"], ["a", "b"])
@example(["ab", "b"], ["a", "b"])
@example(["aab"], ["aaa", "b"])
@example(["abaabaa"], ["abaaba", "baa", "baa"])
@example(["abab", "ba"], ["aba"])
def test_the_first_to_complete_wins_whatever_the_chunks(stops, chunks):
    shown, stop, flushed = run(stops, chunks)
    text = "".join(chunks)
    assert ("".join(shown) + flushed, stop) == oracle(stops, text)
    assert not any(stop in "".join(shown) + flushed for stop in stops)


@given(STOPS, CHUNKS)
def test_no_more_is_held_back_than_a_stop_string_could_take(stops, chunks):
    shown, stop, _ = run(stops, chunks)
    for num_chunks in range(1, len(shown) + (stop is None)):
        text = "".join(chunks[:num_chunks])
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
        assert "".join(shown[:num_chunks]) == text[: len(text) - held]


def test_cost_is_linear_in_the_text_for_the_worst_stop_string():
    """A search that begins anew at every character would run some hundred times as many lines."""

    def lines_per_char(num_chars):
        matcher = StopMatcher(["a" * 255 + "b"])
        return lines_run(lambda: matcher.feed("a" * num_chars)) / num_chars

    assert lines_per_char(4000) < 20
    assert lines_per_char(8000) < 20
