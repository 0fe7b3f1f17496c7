"""Mailbox: one request's way from the engine loop to its reader.

An `asyncio.Queue` of one parcel. The loop never waits: while the parcel has not been taken, what comes later is merged
into it, so that a reader who lags gets fewer and larger deltas, and a stalled one holds one delta per choice.

A reader who is up to date need not be woken for each token: by `shortcut` it leaves a taker with the mailbox, which is
called with what comes while the reader waits, instead of ending its wait. What the reader gets is the same, in the same
order; only who calls whom differs.

    offer, put -->  the reader waits, and has left a taker that takes it?  --> done
           put '->  else the parcel --> the reader, when it comes

Knows nothing of scheduling or HTTP.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from aserve.core.errors import UnavailableError
from aserve.core.faults import WISHES
from aserve.core.ids import RequestId
from aserve.core.outputs import TextDelta

Parcel = dict[int, TextDelta]
"""Merged deltas by choice."""


class Taker(Protocol):
    """Takes what comes in its reader's place, or returns False to have the reader take it. Must not wait."""

    def take(self, delta: TextDelta) -> bool:
        """A delta that is not its choice's last."""
        ...

    def take_token(self, index: int, text: str, token_id: int) -> bool:
        """A token of choice `index` that is not its first and not its last, and has no scores."""
        ...


class Kept(Protocol):
    """What a choice is put together in."""

    def add(self, delta: TextDelta) -> None:
        """The next delta."""
        ...

    def add_token(self, text: str, token_id: int) -> None:
        """The next token."""
        ...


class Keeper:
    """A taker for who wants whole answers. choices: by index, what each is put together in."""

    def __init__(self, choices: Mapping[int, Kept] | Sequence[Kept]) -> None:
        self._choices = choices

    def take(self, delta: TextDelta) -> bool:
        """Always."""
        self._choices[delta.index].add(delta)
        return True

    def take_token(self, index: int, text: str, token_id: int) -> bool:
        """Always."""
        self._choices[index].add_token(text, token_id)
        return True


class Mailbox:
    """An async iterator of TextDelta that ends after the terminal delta of each choice (I19), or raises the error.

    Who iterates again after that gets the same end. Where its block was left before, `UnavailableError` is raised.

    One writer (the engine loop) and one reader, on the same event loop. request_id, prompt_token_ids: whose it is, and
    what it was asked.
    """

    def __init__(
        self,
        num_choices: int = 1,
        request_id: RequestId = RequestId(""),  # noqa: B008  a constant
        prompt_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._queue: asyncio.Queue[Parcel] = asyncio.Queue(1)
        self._parcel: Parcel = {}  # the one in the queue, or the next to go there
        self._error: BaseException | None = None  # what comes after it
        self._taken: list[TextDelta] = []
        self._num_open = num_choices
        self._reader: asyncio.Task[object] | None = None  # while it waits, with nothing before it untaken
        self._taker: Taker | None = None

    def shortcut(self, taker: Taker) -> None:
        """From now on what comes while the reader waits is offered to `taker`, unless it is a choice's last.

        What `taker` raises ends the request: it is raised where the reader waits.
        """
        self._taker = taker

    def offer(self, index: int, text: str, token_id: int) -> bool:
        """A choice's next token, as in `Taker.take_token`, for the shortcut alone; False if it has to be `put`."""
        if self._taker is None or self._reader is None or self._reader.cancelling():
            return False
        try:
            return self._taker.take_token(index, text, token_id)
        except WISHES:
            raise
        except BaseException as error:  # the reader's edge: its failure is its own, and not the loop's that called it
            self.fail(error)
            return True

    def put(self, delta: TextDelta) -> None:
        """Add a delta; merges with one of the same choice that has not been taken."""
        if delta.finish_reason is None and self._offer(delta):
            return
        earlier = self._parcel.get(delta.index)
        self._parcel[delta.index] = delta if earlier is None else earlier.merge(delta)
        self._post()

    def fail(self, error: BaseException) -> None:
        """End the request: the reader gets what was put before, then `error` is raised."""
        self._error = error
        self._post()

    def leave(self) -> None:
        """Nothing more comes: who reads on gets what is there, then the error that ended it, or `UnavailableError`."""
        if self._error is None:
            self.fail(UnavailableError("the request is over: its block has been left"))

    def _post(self) -> None:
        if self._queue.empty():
            self._queue.put_nowait(self._parcel)
            self._reader = None

    def _offer(self, delta: TextDelta) -> bool:
        if self._taker is None or self._reader is None or self._reader.cancelling():
            return False
        try:
            return self._taker.take(delta)
        except WISHES:
            raise
        except BaseException as error:  # as in `offer`
            self.fail(error)
            return True

    def __repr__(self) -> str:
        return f"<Mailbox {self.request_id!r} choices open: {self._num_open}>"

    def __aiter__(self) -> "Mailbox":
        return self

    async def __anext__(self) -> TextDelta:
        if not self._taken:
            if self._num_open == 0:
                raise StopAsyncIteration
            await self._take()
        delta = self._taken.pop(0)
        if delta.finish_reason is not None:
            self._num_open -= 1
        return delta

    async def _take(self) -> None:
        self._reader = asyncio.current_task()
        try:
            parcel = await self._queue.get()
        finally:
            self._reader = None
        self._parcel = {}
        self._taken = list(parcel.values())
        if self._error is not None:
            self._post()  # whoever reads on is told again
            if not parcel:
                raise self._error
