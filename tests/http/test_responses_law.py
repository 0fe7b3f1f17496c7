"""The law of /v1/responses: however an answer comes, its items are those of the whole, and its events come to them.

Answers are those of the parsers' own law, well-formed or not, in formats with markers, with channels, and in none.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.core.outputs import Completion, FinishReason, TextDelta
from aserve.core.plan import TokenScores
from aserve.http.openai.responses.output import Output
from aserve.http.openai.responses.wire import ResponseWire
from aserve.http.openai.tokens import Tokens
from aserve.http.reading import CONTENT, Reading
from aserve.http.tally import Tally, usage_of
from aserve.text.formats.parser import parser_of
from tests.http.responses import events_of, put_together, without_ids
from tests.text.formats.examples import SCHEMAS
from tests.text.formats.reading import FORMATS
from tests.text.formats.test_law import chunks_of, texts

ENDS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])


def wire_of(name):
    """Of a response whose tokens are bytes, with their logprobs."""
    reading = CONTENT
    if name is not None:
        reading = Reading(new_parser=lambda: parser_of(FORMATS[name], SCHEMAS, in_thought=False), has_thoughts=True)
    tokens = None if name is None else Tokens(lambda ids: [bytes([token_id]) for token_id in ids])
    spell = lambda scores: [{"token": score.token_id} for score in scores]  # noqa: E731
    output = Output(reading, tokens, response_id="resp_1", spell=spell)
    return ResponseWire({"id": "resp_1", "status": "in_progress", "output": []}, output)


def scored(token_ids):
    return tuple(TokenScores(token_id, -1.0, 1) for token_id in token_ids)


def deltas_of(draw, text, end):
    """The answer in pieces. Tokens may come before their text, which is held back."""
    pieces = [*chunks_of(draw, text), ""]
    ids = [tuple(piece.encode()) for piece in pieces]
    if draw(st.booleans()):
        ids = [ids[0] + ids[1], *ids[2:], ()]
    last = len(pieces) - 1
    return [
        TextDelta(piece, ids[i], end if i == last else None, scores=scored(ids[i])) for i, piece in enumerate(pieces)
    ]


@pytest.mark.parametrize("name", [None, "hermes", "openai", "qwen3_coder"])
@settings(max_examples=40)
@given(data=st.data(), end=ENDS)
def test_a_streams_items_are_those_of_the_whole(name, data, end):
    text = data.draw(texts(name or "hermes"))
    tally = Tally((1, 2))
    streamed, whole = wire_of(name), wire_of(name)
    told = streamed.opening(0, (), (), None)
    for delta in deltas_of(data.draw, text, end):
        tally.add(delta)
        told += streamed.delta(delta, None)
    usage = usage_of([tally], 1)
    told += streamed.end(usage)
    token_ids = tuple(text.encode())
    completion = Completion((1, 2), text, token_ids, end, scores=scored(token_ids))
    answer = whole.whole([completion], usage)
    events = events_of(told.decode())
    assert put_together(events) == streamed.response["output"] == events[-1]["response"]["output"]
    assert without_ids(streamed.response) == without_ids(answer)
    for item in answer["output"]:
        for part in item.get("content", ()):
            logprobs = part.get("logprobs", ())
            assert bytes(entry["token"] for entry in logprobs).decode() == (part["text"] if logprobs else "")


def test_it_sees_a_part_that_is_told_wrongly():
    """The check itself: a stream one of whose deltas is lost is found out."""
    wire = wire_of(None)
    told = wire.opening(0, (), (), None)
    told += wire.delta(TextDelta("ab", (97, 98)), None)
    lost = wire.delta(TextDelta("c", (99,)), None)
    told += wire.delta(TextDelta("", (), FinishReason.STOP), None) + wire.end(None)
    assert lost
    blocks = [block for block in told.decode().split("\n\n") if block]
    events = [json_of(block) for block in blocks]
    with pytest.raises(AssertionError):
        put_together(events)


def json_of(block):
    (event,) = events_of(f"{block}\n\n")
    return event


def test_a_part_is_found_from_the_first_byte_on():
    tokens = Tokens(lambda ids: [bytes([token_id]) for token_id in ids])
    tokens.add(b"aba", scored(b"aba"))
    assert [tokens.take(part) for part in "aba"] == [(1, [each]) for each in scored(b"aba")]
    assert tokens.take("b") == tokens.take("") == (0, []), "no text of the tokens"
