"""Names for the beginnings of prompts: equal where texts are, for as long as they are, and for whatever body."""

import itertools
import time
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from aserve.routing import NO_KEYS, PromptKeys, keys_of, session_of
from aserve.routing.keys import ENDS, FIRST_BYTES, GROWTH, MAX_TEXT_BYTES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(["messages", "prompt", "input", "tools", "system", "instructions", "model", "cache_salt"])


def chat(*texts: str, **others: Any) -> dict[str, Any]:
    """A conversation of these messages."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **others}


def num_common(one: PromptKeys, other: PromptKeys) -> int:
    """Hashes that two have in common, from the first on."""
    pairs = list(zip(one.hashes, other.hashes, strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


@given(st.dictionaries(NAMES, JSON, max_size=5), st.text(max_size=5))
def test_any_body_has_keys_or_none(fields: dict[str, Any], namespace: str):
    keys = keys_of(fields, namespace)
    assert len(keys.hashes) == sum(end <= keys.num_bytes for end in ENDS)
    assert all(0 <= key < 2**32 for key in keys.hashes)


@given(st.lists(st.text(min_size=1, max_size=900), min_size=1, max_size=6), st.data())
def test_a_conversation_that_goes_on_keeps_the_keys_of_its_turns(texts: list[str], data: st.DataObject):
    num = data.draw(st.integers(1, len(texts)))
    earlier, later = keys_of(chat(*texts[:num])), keys_of(chat(*texts))
    assert later.hashes[: len(earlier.hashes)] == earlier.hashes


@given(st.text("ab", min_size=600, max_size=3000), st.integers(0, 599))
def test_keys_end_to_be_common_where_texts_do(text: str, place: int):
    other = text[:place] + "c" + text[place + 1 :]
    common = num_common(keys_of({"prompt": text}), keys_of({"prompt": other}))
    assert ENDS[common] > place
    assert common == 0 or ENDS[common - 1] <= place


def test_what_else_decides_what_is_computed_enters_all_keys():
    body = chat("x" * 2000, model="m")
    plain = keys_of(body)
    changed = [
        keys_of(body, "a tenant"),
        keys_of({**body, "model": "an adapter"}),
        keys_of({**body, "cache_salt": "s"}),
        keys_of({**body, "tools": [{"type": "function"}]}),
        keys_of({**body, "system": "be brief"}),
        keys_of({**body, "chat_template_kwargs": {"enable_thinking": False}}),
    ]
    assert len(plain.hashes) == 7
    assert [num_common(plain, keys) for keys in changed] == [0] * len(changed)
    assert keys_of({**body, "temperature": 0.5, "max_tokens": 3, "stream": True}) == plain


def test_each_face_has_keys_and_token_ids_say_how_many_they_are():
    text = "word " * 200
    assert all(keys_of({name: text}).num_bytes == 1000 for name in ("prompt", "input"))
    assert keys_of({"prompt": [text, "another"]}) == keys_of({"prompt": text})
    ids = keys_of({"prompt": list(range(200))})
    assert (ids.num_bytes, ids.bytes_per_token, len(ids.hashes)) == (800, 4.0, 3)
    assert keys_of({"prompt": [list(range(200)), [1]]}) == ids
    assert keys_of({"prompt": [2**40]}) == keys_of({"messages": 5}) == keys_of({}) == NO_KEYS


def test_ends_grow_apart_by_a_sixteenth_at_most_and_long_texts_are_cut():
    gaps = [(start, end - start) for start, end in itertools.pairwise(ENDS)]
    assert all(gap == max(FIRST_BYTES, start // GROWTH) for start, gap in gaps)
    assert len([end for end in ENDS if end <= 800_000]) == 103
    assert keys_of({"prompt": "x" * 5_000_000}).num_bytes == MAX_TEXT_BYTES
    began = time.process_time()
    keys_of(chat(*["x" * 1000] * 4000))
    assert time.process_time() - began < 0.5, "some milliseconds"


def test_keys_travel():
    keys = keys_of({"prompt": "x" * 1000})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(keys), type=PromptKeys) == keys


def test_a_session_is_what_the_client_calls_it():
    assert session_of({"prompt_cache_key": "k"}, {"x-session-id": "s"}) == "s"
    assert session_of({"prompt_cache_key": "k", "previous_response_id": "r"}, {}) == "k"
    assert session_of({"conversation": {"id": "c"}}, {}) == "c"
    assert session_of({"conversation": 3, "previous_response_id": "r" * 999}, {}) == "r" * 256
    assert session_of({}, {}) == ""
