"""Chunks put together from bytes are the JSON that they are meant to be, whatever the text and the names."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.outputs import FinishReason, TextDelta
from aserve.http.anthropic.messages import MessagesFields, MessagesWire
from aserve.http.openai.chat import ChatFields, ChatWire
from aserve.http.openai.completions import CompletionFields, TextWire
from aserve.http.openai.schema import Message
from aserve.http.reading import CONTENT, Reading
from aserve.text.formats.parser import parser_of
from tests.engines import scripted_engine
from tests.http.events import events_of
from tests.text.formats.reading import FORMATS

DELTAS = st.builds(
    TextDelta,
    text=st.text(),
    token_ids=st.lists(st.integers(0, 2**31)).map(tuple),
    finish_reason=st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]),
    stop_reason=st.none() | st.integers(0, 2**31) | st.text(),
    index=st.integers(0, 1023),
)


def ending(delta):
    """What the last chunk has and the others have not."""
    if delta.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": delta.finish_reason.value, "stop_reason": delta.stop_reason}


def make_wire(wire, model, fields):
    """A wire that spells no token, and so needs no engine."""
    engine = scripted_engine()
    if wire is ChatWire:
        messages = [Message(role="user", content="hi")]
        return ChatWire(engine, "some-id", model, ChatFields(messages=messages, **fields))
    fields = CompletionFields(prompt="hi", **fields)
    return TextWire(engine, "some-id", model, fields, num_choices=1, echoed=None)


@pytest.mark.parametrize("wire", [ChatWire, TextWire])
@given(delta=DELTAS, model=st.text())
def test_a_frame_around_a_text_is_its_delta(wire, delta, model):
    """The fast way to a chunk and the slow one; where chunks have more than the text, there is no fast one."""
    made = make_wire(wire, model, {})
    head, tail = made.frame(delta.index)
    plain = TextDelta(delta.text or "x", (7,), index=delta.index)
    assert head + msgspec.json.encode(plain.text) + tail == made.delta(plain, None)
    for fields in ({"return_token_ids": True}, {"logprobs": True if wire is ChatWire else 1}):
        assert make_wire(wire, model, fields).frame(0) is None


@pytest.mark.parametrize("wire", [ChatWire, TextWire])
@given(delta=DELTAS, model=st.text(), with_token_ids=st.booleans(), usage=st.none() | st.just({"total_tokens": 3}))
def test_a_delta(wire, delta, model, with_token_ids, usage):
    fields = {"return_token_ids": with_token_ids}
    events = make_wire(wire, model, fields).delta(delta, usage)
    if not delta.text and delta.finish_reason is None and not with_token_ids:
        assert events == b""
        return
    [chunk] = events_of(events.decode() + "data: [DONE]\n\n")
    assert (chunk.pop("id"), chunk.pop("model")) == ("some-id", model)
    chunk.pop("created")
    text = {"delta": {"content": delta.text}} if wire is ChatWire else {"text": delta.text}
    kind = "chat.completion.chunk" if wire is ChatWire else "text_completion"
    token_ids = {"token_ids": list(delta.token_ids)} if with_token_ids else {}
    choice = {"index": delta.index, **text, "logprobs": None, **ending(delta), **token_ids}
    assert chunk == {"object": kind, "choices": [choice], **({} if usage is None else {"usage": usage})}


@given(text=st.text(min_size=1))
def test_a_frame_around_a_messages_text_is_its_delta(text):
    fields = MessagesFields(messages=[], max_tokens=8)
    made = MessagesWire("some-id", "tiny", fields, CONTENT)
    made.opening(0, (), (), None)
    head, tail = made.frame(0)
    assert head + msgspec.json.encode(text) + tail == made.delta(TextDelta(text, (7,)), None)
    parsed = Reading(new_parser=lambda: parser_of(FORMATS["hermes"], {}, in_thought=False), has_thoughts=True)
    assert MessagesWire("some-id", "tiny", fields, parsed).frame(0) is None
