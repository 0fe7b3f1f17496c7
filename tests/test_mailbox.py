"""A mailbox never makes its writer wait, merges what a reader lags behind, and ends once."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.errors import UnavailableError
from aserve.core.ids import RequestId
from aserve.core.outputs import Completion, FinishReason, TextDelta, Transcript
from aserve.mailbox import Keeper, Mailbox


def delta(text, index=0, finish=None):
    return TextDelta(text=text, token_ids=tuple(text.encode()), finish_reason=finish, index=index)


async def test_a_prompt_reader_sees_each_delta():
    mailbox = Mailbox()
    seen = []
    for text in "abc":
        mailbox.put(delta(text))
        seen.append((await anext(mailbox)).text)
    assert seen == ["a", "b", "c"]


async def test_a_reader_who_lags_gets_one_merged_delta():
    mailbox = Mailbox()
    for text in "abc":
        mailbox.put(delta(text))
    mailbox.put(delta("d", finish=FinishReason.STOP))
    assert [d async for d in mailbox] == [delta("abcd", finish=FinishReason.STOP)]


async def test_choices_merge_apart_and_the_mailbox_ends_after_the_last():
    mailbox = Mailbox(num_choices=2)
    mailbox.put(delta("a", 0))
    mailbox.put(delta("x", 1, FinishReason.LENGTH))
    mailbox.put(delta("b", 0, FinishReason.STOP))
    assert [(d.index, d.text) async for d in mailbox] == [(0, "ab"), (1, "x")]


def test_a_mailbox_says_whose_it_is():
    assert Mailbox(2, RequestId("a")).request_id == "a"


async def test_an_error_comes_after_what_was_written_before_it():
    mailbox = Mailbox()
    mailbox.put(delta("a"))
    mailbox.fail(UnavailableError("no"))
    assert (await anext(mailbox)).text == "a"
    with pytest.raises(UnavailableError):
        await anext(mailbox)


async def test_an_error_is_raised_again_to_who_reads_on():
    """The fault: who iterated again after an error waited for ever."""
    mailbox = Mailbox()
    mailbox.put(delta("a"))
    error = UnavailableError("no")
    mailbox.fail(error)
    mailbox.leave()
    assert (await anext(mailbox)).text == "a"
    for _ in range(3):
        with pytest.raises(UnavailableError) as caught:
            await asyncio.wait_for(anext(mailbox), 1)
        assert caught.value is error


async def test_what_is_left_before_its_end_raises_after_what_is_there():
    mailbox = Mailbox(num_choices=2)
    mailbox.put(delta("a", 0, FinishReason.STOP))
    mailbox.put(delta("b", 1))
    mailbox.leave()
    assert [(await anext(mailbox)).text for _ in range(2)] == ["a", "b"]
    for _ in range(2):
        with pytest.raises(UnavailableError, match="left"):
            await asyncio.wait_for(anext(mailbox), 1)


async def test_what_is_left_after_its_end_has_ended():
    mailbox = Mailbox()
    mailbox.put(delta("a", finish=FinishReason.STOP))
    mailbox.leave()
    assert [d.text async for d in mailbox] == ["a"]
    assert [d async for d in mailbox] == []


async def test_leaving_wakes_who_waits():
    mailbox = Mailbox()
    reader = asyncio.create_task(anext(mailbox))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    mailbox.leave()
    with pytest.raises(UnavailableError, match="left"):
        await asyncio.wait_for(reader, 1)


async def test_a_waiting_reader_is_woken():
    mailbox = Mailbox()
    reader = asyncio.create_task(anext(mailbox))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    mailbox.put(delta("a"))
    mailbox.put(delta("b"))  # before the reader has run: merges
    assert (await reader).text == "ab"


async def test_nothing_follows_a_terminal_delta():
    mailbox = Mailbox()
    mailbox.put(delta("a", finish=FinishReason.STOP))
    with pytest.raises(AssertionError, match="I19"):
        mailbox.put(delta("b"))


@given(st.lists(st.one_of(st.text(max_size=3), st.none()), max_size=30))
def test_any_interleaving_of_writing_and_reading_gives_the_same_text(script):
    """None reads once, if something is there; a text is written."""

    async def run():
        mailbox, read, unread = Mailbox(), "", False
        for step in script:
            if step is not None:
                mailbox.put(delta(step))
                unread = True
            elif unread:
                read += (await anext(mailbox)).text
                unread = False
        mailbox.put(delta("", finish=FinishReason.LENGTH))
        async for last in mailbox:
            read += last.text
        return read

    assert asyncio.run(run()) == "".join(step for step in script if step is not None)


class Taker:
    """A shortcut that takes what comes while it is told to."""

    def __init__(self):
        self.taken = []
        self.willing = True

    def take(self, delta):
        if self.willing:
            self.taken.append(delta.text)
        return self.willing

    def take_token(self, index, text, token_id):
        return self.take(TextDelta(text, (token_id,), index=index))


async def waiting(mailbox):
    """A reader who waits for the next delta."""
    reader = asyncio.create_task(anext(mailbox))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return reader


async def test_a_shortcut_takes_deltas_while_the_reader_waits_and_leaves_the_last_to_him():
    mailbox, taker = Mailbox(), Taker()
    mailbox.shortcut(taker)
    mailbox.put(delta("a"))  # nobody waits yet
    assert not mailbox.offer(0, "?", 7)
    assert (await anext(mailbox)).text == "a"
    reader = await waiting(mailbox)
    mailbox.put(delta("b"))
    assert mailbox.offer(0, "c", 7)
    mailbox.put(delta("d"))
    assert taker.taken == ["b", "c", "d"]
    mailbox.put(delta("e", finish=FinishReason.STOP))
    assert not mailbox.offer(0, "?", 7)
    assert await reader == delta("e", finish=FinishReason.STOP)


async def test_what_a_shortcut_leaves_comes_to_the_reader_in_order_and_later_deltas_after_it():
    mailbox, taker = Mailbox(), Taker()
    mailbox.shortcut(taker)
    reader = await waiting(mailbox)
    mailbox.put(delta("a"))
    taker.willing = False
    assert not mailbox.offer(0, "b", ord("b"))
    mailbox.put(delta("b"))
    taker.willing = True
    assert not mailbox.offer(0, "c", ord("c"))
    mailbox.put(delta("c"))  # the reader has been woken, and has not run: it comes after b, by the same way
    assert taker.taken == ["a"]
    assert (await reader).text == "bc"


@pytest.mark.parametrize("way", ["put", "offer"])
async def test_what_a_shortcut_raises_is_raised_in_the_reader_and_not_in_the_writer(way):
    class Broken:
        def take(self, _delta):
            raise ZeroDivisionError

        def take_token(self, _index, _text, _token_id):
            raise ZeroDivisionError

    mailbox = Mailbox()
    mailbox.shortcut(Broken())
    reader = await waiting(mailbox)
    if way == "put":
        mailbox.put(delta("a"))
    else:
        assert mailbox.offer(0, "a", 7)
    mailbox.put(delta("b"))
    assert (await reader).text == "b"
    with pytest.raises(ZeroDivisionError):
        await anext(mailbox)


async def test_a_reader_who_gave_up_waiting_is_not_offered_anything():
    mailbox, taker = Mailbox(), Taker()
    mailbox.shortcut(taker)
    reader = await waiting(mailbox)
    reader.cancel()
    assert not mailbox.offer(0, "?", 7)
    mailbox.put(delta("a"))
    await asyncio.wait({reader})
    mailbox.put(delta("b"))
    assert taker.taken == []
    assert (await anext(mailbox)).text == "ab"


async def test_a_keeper_puts_choices_together():
    choices = [Transcript(), Transcript()]
    keeper = Keeper(choices)
    assert keeper.take(delta("a", 1))
    assert keeper.take_token(1, "b", ord("b"))
    assert keeper.take(delta("c", 1, FinishReason.STOP))
    assert choices[1].completion((7,), ()) == Completion((7,), "abc", tuple(b"abc"), FinishReason.STOP, index=1)


@given(st.lists(st.sampled_from(["put", "token", "read", "take", "turn"]), max_size=40))
def test_with_a_shortcut_and_without_a_reader_gets_the_same_text(script):
    """The twin of the shortcut is the mailbox without one. "read" and "take" change whether the one or other does."""

    async def run(*, with_shortcut):
        mailbox, taker, reads = Mailbox(), Taker(), asyncio.Event()
        read = taker.taken
        if with_shortcut:
            mailbox.shortcut(taker)

        async def reader():
            async for each in mailbox:
                read.append(each.text)
                await reads.wait()

        task = asyncio.create_task(reader())
        for number, step in enumerate(script):
            text = f"{number} "
            if step == "put" or (step == "token" and not mailbox.offer(0, text, 7)):
                mailbox.put(delta(text))
            elif step == "read":
                (reads.clear if reads.is_set() else reads.set)()
            elif step == "take":
                taker.willing = not taker.willing
            elif step == "turn":
                await asyncio.sleep(0)
        reads.set()
        mailbox.put(delta("end", finish=FinishReason.STOP))
        await task
        return "".join(read)

    assert asyncio.run(run(with_shortcut=True)) == asyncio.run(run(with_shortcut=False))
