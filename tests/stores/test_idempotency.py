"""What is kept of answers, for how long, and who finds it."""

import asyncio

import pytest

from aserve.stores.idempotency import IdempotencyStore, KeyReusedError


def answered(store: IdempotencyStore, name: bytes, content: bytes = b"text"):
    answer = store.begin(name, b"print")
    answer.begin(200, ((b"content-type", b"text/plain"),))
    answer.add(content)
    answer.end()
    store.settle(name, answer, is_good=True)
    return answer


async def gathered(answer) -> bytes:
    return b"".join([piece async for piece in answer.pieces()])


async def test_a_finished_answer_is_found_by_its_name_and_print():
    """Catches a key that finds another request's answer."""
    store = IdempotencyStore()
    answer = answered(store, b"a")
    assert store.find(b"a", b"print") is answer
    assert store.find(b"b", b"print") is None
    with pytest.raises(KeyReusedError):
        store.find(b"a", b"other")
    assert await gathered(answer) == b"text"


async def test_a_running_answer_is_followed_from_its_beginning():
    """Catches a follower who misses what came before it, or waits for ever."""
    store = IdempotencyStore()
    answer = store.begin(b"a", b"print")
    answer.begin(200, ())
    answer.add(b"one ")
    early, late = asyncio.create_task(gathered(answer)), None
    for piece in (b"two ", b"three"):
        await asyncio.sleep(0)
        answer.add(piece)
        late = late or asyncio.create_task(gathered(store.find(b"a", b"print")))
    answer.end()
    assert await early == await late == b"one two three"


async def test_what_breaks_off_raises_behind_what_there_is():
    store = IdempotencyStore()
    answer = store.begin(b"a", b"print")
    answer.begin(200, ())
    answer.add(b"half")
    answer.end(ConnectionError("gone"))
    store.settle(b"a", answer, is_good=False)
    pieces = answer.pieces()
    assert await anext(pieces) == b"half"
    with pytest.raises(ConnectionError):
        await anext(pieces)
    assert store.find(b"a", b"print") is None
    assert (len(store), store.num_bytes) == (0, 0)


async def test_bytes_and_age_have_bounds():
    """Catches a store that grows, and one that forgets what is new."""
    now = [0.0]
    store = IdempotencyStore(max_bytes=10_000, max_age_s=60.0, clock=lambda: now[0])
    for index in range(10):
        answered(store, b"%d" % index, b"x" * 2000)
    assert store.num_bytes <= 10_000
    assert [store.find(b"%d" % index, b"print") is not None for index in range(10)] == [False] * 7 + [True] * 3
    running = store.begin(b"runs", b"print")
    now[0] = 61.0
    assert store.find(b"9", b"print") is None
    assert store.find(b"runs", b"print") is running
    assert store.num_bytes == 0


async def test_headers_take_room_too():
    store = IdempotencyStore(max_bytes=10_000)
    for index in range(10):
        answer = store.begin(b"%d" % index, b"print")
        answer.begin(200, ((b"x-" + b"a" * 998, b"b" * 1000),))
        answer.end()
        store.settle(b"%d" % index, answer, is_good=True)
    assert [store.find(b"%d" % index, b"print") is not None for index in range(10)] == [False] * 7 + [True] * 3


async def test_one_that_nobody_waits_for_is_as_if_it_were_not_there():
    store = IdempotencyStore()
    store.begin(b"a", b"print").abandoned.set()
    assert store.find(b"a", b"print") is None
    answer = answered(store, b"a")
    assert store.find(b"a", b"print") is answer
