"""The law of the parsers, for every format and any text, well-formed or not.

1. Any chunking gives the same events, once texts that follow each other are joined.
2. What cannot be the beginning of a marker is let out at once.
3. Nothing is lost: what is no call is content.
4. Time is linear in the text, however it is cut.
"""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.core.answer_events import Arguments, CallBegins
from aserve.text.formats.parser import parser_of
from tests.text.formats.examples import EXAMPLES, JSON, SCHEMAS
from tests.text.formats.reading import FORMATS, events_of, joined, told

FEWER = settings(max_examples=settings.default.max_examples // 2)
"""Of each format: there are many, and one parser. `make test-thorough` has half of thousands."""
COMMON = [
    "\n",
    " ",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    "a",
    "é",
    "functions.",
    "now",
    "get_weather",
    "<",
    "|",
    "to=",
]
COMMON += ["think", "city", "3", "=", "(", ")", "assistant", "analysis", "final", "json", "true", ">"]
MEMBERS = ['{"name": "now", "arguments": ', '{"name": "now"', '"arguments": {"a": [1]}', '"parameters": ', "{}"]


def pieces_of(name):
    """Texts of which nearly well-formed answers of a format are made: its markers, and what stands between them."""
    markers = [marker for marker in FORMATS[name].markers() if marker]
    text = EXAMPLES[name].text
    halves = [text[: len(text) // 2], text[len(text) // 2 :]]
    return st.one_of(
        st.sampled_from(markers),
        st.sampled_from([*COMMON, *MEMBERS, *halves]),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="«»"), max_size=3),
    )


@st.composite
def texts(draw, name):
    """Pieces, or the family's own example with some of them put in, or with some of it left out."""
    drawn = "".join(draw(st.lists(pieces_of(name), max_size=24)))
    start, end = sorted((draw(st.integers(0, 400)), draw(st.integers(0, 400))))
    own = EXAMPLES[name].text
    return draw(st.sampled_from([drawn, own[:start] + drawn + own[start:], own[:start] + own[end:] + drawn]))


def chunks_of(draw, text):
    """A text in pieces, single characters among them."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMATS)
@FEWER
@given(data=st.data(), in_thought=st.booleans())
def test_any_chunking_gives_the_same_events(name, data, in_thought):
    text = data.draw(texts(name))
    whole = joined(events_of(FORMATS[name], [text], in_thought=in_thought))
    assert joined(events_of(FORMATS[name], text, in_thought=in_thought)) == whole
    assert joined(events_of(FORMATS[name], chunks_of(data.draw, text), in_thought=in_thought)) == whole


@pytest.mark.parametrize("name", FORMATS)
@FEWER
@given(data=st.data())
def test_what_begins_no_marker_is_let_out_at_once(name, data):
    """Before any marker is whole, what is held is the longest end of the text that may begin one, and no more."""
    format = FORMATS[name]
    begins = [begin for way in format.calls for begin in way.begins if begin]
    begins += [format.thoughts.begin] if format.thoughts else []
    begins += [format.channels.start, format.channels.channel] if format.channels else []
    letters = st.sampled_from([*"".join(begins), " ", "\n", "x", *(begin[:-1] for begin in begins)])
    text = "x" + "".join(data.draw(st.lists(letters, max_size=30)))
    if any(begin in text for begin in begins):
        return
    parser = parser_of(format, SCHEMAS)
    shown = ""
    for end, char in enumerate(text, start=1):
        shown += "".join(event.text for event in parser.feed(char))
        may_begin = [begin[:n] for begin in begins for n in range(len(begin)) if text[:end].endswith(begin[:n])]
        assert shown == text[: end - max(map(len, may_begin), default=0)]


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if JSON in example.text])
def test_json_arguments_are_let_out_at_once(name):
    """Every character of arguments that are JSON already, as soon as the call has begun."""
    text = EXAMPLES[name].text
    start = text.index(JSON)
    has_name = "get_weather" in text[:start]
    ends = FORMATS[name].channels.ends if FORMATS[name].channels else ()
    parser = parser_of(FORMATS[name], SCHEMAS)
    events = parser.feed(text[:start])
    for end, char in enumerate(JSON, start=1):
        events += parser.feed(char)
        said = "".join(event.text for event in events if isinstance(event, Arguments))
        held = max((n for each in ends for n in range(len(each)) if JSON[:end].endswith(each[:n])), default=0)
        assert said == (JSON[: end - held] if has_name else "")
        assert has_name == any(isinstance(event, CallBegins) for event in events)


@pytest.mark.parametrize("name", FORMATS)
@FEWER
@given(data=st.data())
def test_nothing_is_lost(name, data):
    """Words that stand anywhere between anything are said once, in their order: as content, thoughts, arguments..."""
    pieces = data.draw(st.lists(pieces_of(name), max_size=16))
    words = [f"«{chr(ord('A') + index)}»" for index in range(len(pieces) + 1)]
    joiner = data.draw(st.sampled_from(["", " ", "\n"]))
    text = words[0] + "".join(f"{joiner}{piece}{joiner}{word}" for piece, word in zip(pieces, words[1:], strict=True))
    said = "".join(_said(event) for event in joined(events_of(FORMATS[name], [text])))
    places = [said.find(word) for word in words]
    assert all(place >= 0 for place in places), [word for word, place in zip(words, places, strict=True) if place < 0]
    assert all(said.count(word) == 1 for word in words)
    assert places == sorted(places)


def _said(event):
    if isinstance(event, CallBegins):
        return event.call_id if event.call_id and event.name in event.call_id else event.name + (event.call_id or "")
    return getattr(event, "text", "")


@given(text=st.text(), data=st.data())
def test_text_without_markers_is_itself(text, data):
    for format in FORMATS.values():
        if not any(marker in text for marker in format.markers() if marker):
            assert told(events_of(format, chunks_of(data.draw, text)))[1] == text


HOSTILE = {
    "markers that begin nothing": "<tool_call>",
    "beginnings of markers": "<tool_cal",
    "calls that never have a name": '<tool_call>{"arguments":[',
    "whole calls": '<tool_call>{"name": "now", "arguments": {"a": "\\""}}</tool_call>',
    "thoughts that are reopened": "<think></think>",
    "newlines": "\n",
    "blanks": " ",
    "backslashes": "\\",
    "quotes": '"',
    "brackets": "[",
    "parameters": "<function=now><parameter=a>{}</parameter>",
    "values without an end": "<function=now><parameter=b>",
    "names": "<tool_call>now",
    "channels": "<|channel|>analysis<|message|>",
    "headers without a message": "<|channel|>final ",
    "python": "[now(a='\\x41', b=[1,",
    "words": "now(",
}


def seconds(name, text, chunk_chars):
    """Of the processor, for a whole answer in chunks."""
    chunks = [text[start : start + chunk_chars] for start in range(0, len(text), chunk_chars)]
    parser = parser_of(FORMATS[name], SCHEMAS)
    started = time.process_time()
    for chunk in chunks:
        parser.feed(chunk)
    parser.finish()
    return time.process_time() - started


@pytest.mark.timing
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("name", FORMATS)
def test_time_is_linear(name, hostile):
    """From 128 KiB to 1 MiB in chunks of 4096, and from 32 to 128 KiB by characters, time grows with the text."""
    example = EXAMPLES[name].text
    for chunk_chars, small, large, most_s in ((4096, 2**17, 2**20, 8e-6), (1, 2**15, 2**17, 25e-6)):
        for begin in ("", example[: len(example) // 3]):
            text = (begin + HOSTILE[hostile] * (large // len(HOSTILE[hostile]) + 1))[:large]
            few = min(seconds(name, text[:small], chunk_chars) for _ in range(2))
            many = seconds(name, text, chunk_chars)
            assert many < 2 * few * (large / small) + 0.05
            assert many < most_s * large
