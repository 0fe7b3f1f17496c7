"""Mailbox: one request's way from the engine loop to its reader.

An `asyncio.Queue` of one parcel. The loop never waits: while the parcel has not been taken, what comes later is merged
into it, so that a reader who lags gets fewer and larger deltas, and a stalled one holds one delta per choice.

A reader who is up to date need not be woken for each token: by `shortcut` it leaves a function with the mailbox, which
is called with each delta that comes while the reader waits, instead of ending its wait. What the reader gets is the
same, in the same order; only who calls whom differs.

    put -->  the reader waits, and has left a shortcut that takes the delta?  --> done
        '->  else the parcel --> the reader, when it comes

Knows nothing of tokens, scheduling or HTTP.
"""

import asyncio
from collections.abc import Callable

from aserve.core.ids import RequestId
from aserve.core.outputs import TextDelta

Shortcut = Callable[[TextDelta], bool]
"""Takes a delta, or returns False to have the reader take it. Must not wait."""
Parcel = dict[int, TextDelta]
"""Merged deltas by choice."""


class Mailbox:
    """An async iterator of TextDelta that ends after the terminal delta of each choice (I19), or raises the error.

    One writer (the engine loop) and one reader, on the same event loop. request_id: whose it is.
    """

    def __init__(self, num_choices: int = 1, request_id: RequestId = RequestId("")) -> None:  # noqa: B008  a constant
        self.request_id = request_id
        self._queue: asyncio.Queue[Parcel] = asyncio.Queue(1)
        self._parcel: Parcel = {}  # the one in the queue, or the next to go there
        self._error: Exception | None = None  # what comes after it
        self._taken: list[TextDelta] = []
        self._num_open = num_choices
        self._reader: asyncio.Task[object] | None = None  # while it waits
        self._shortcut: Shortcut | None = None

    def shortcut(self, take: Shortcut) -> None:
        """From now on a delta that comes while the reader waits is offered to `take`, unless it is a choice's last.

        What `take` raises ends the request: it is raised where the reader waits.
        """
        self._shortcut = take

    def put(self, delta: TextDelta) -> None:
        """Add a delta; merges with one of the same choice that has not been taken."""
        take = self._shortcut
        if take is not None and delta.finish_reason is None and self._is_awaited() and self._offer(take, delta):
            return
        earlier = self._parcel.get(delta.index)
        self._parcel[delta.index] = delta if earlier is None else earlier.merge(delta)
        self._post()

    def fail(self, error: Exception) -> None:
        """End the request: the reader gets what was put before, then `error` is raised."""
        self._error = error
        self._post()

    def _post(self) -> None:
        if self._queue.empty():
            self._queue.put_nowait(self._parcel)

    def _is_awaited(self) -> bool:
        """Whether the reader waits, and has not given up, with nothing before it untaken."""
        return self._reader is not None and self._queue.empty() and not self._reader.cancelling()

    def _offer(self, take: Shortcut, delta: TextDelta) -> bool:
        try:
            return take(delta)
        except Exception as error:  # the reader's edge: its failure is its own, and not the loop's that called it
            self.fail(error)
            return True

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
            if not parcel:
                raise self._error
            self._post()
