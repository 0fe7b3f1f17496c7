"""Mailbox: one request's way from the engine loop to its reader.

An `asyncio.Queue` of one parcel. The loop never waits: while the parcel has not been taken, what comes later is merged
into it, so that a reader who lags gets fewer and larger deltas, and a stalled one holds one delta per choice.
Knows nothing of tokens, scheduling or HTTP.
"""

import asyncio

from aserve.core.errors import AserveError
from aserve.core.ids import RequestId
from aserve.core.outputs import TextDelta


class _Parcel:
    """What waits in the queue: the merged deltas by choice, then perhaps the error that ends the request."""

    __slots__ = ("deltas", "error")

    def __init__(self) -> None:
        self.deltas: dict[int, TextDelta] = {}
        self.error: AserveError | None = None


class Mailbox:
    """An async iterator of TextDelta that ends after the terminal delta of each choice (I19), or raises the error.

    One writer (the engine loop) and one reader, on the same event loop. request_id: whose it is.
    """

    def __init__(self, num_choices: int = 1, request_id: RequestId = RequestId("")) -> None:  # noqa: B008  a constant
        self.request_id = request_id
        self._queue: asyncio.Queue[_Parcel] = asyncio.Queue(1)
        self._parcel = _Parcel()
        self._taken: list[TextDelta] = []
        self._num_open = num_choices

    def put(self, delta: TextDelta) -> None:
        """Add a delta; merges with one of the same choice that has not been taken."""
        deltas = self._parcel.deltas
        earlier = deltas.get(delta.index)
        deltas[delta.index] = delta if earlier is None else earlier.merge(delta)
        self._post()

    def fail(self, error: AserveError) -> None:
        """End the request: the reader gets what was put before, then `error` is raised."""
        self._parcel.error = error
        self._post()

    def _post(self) -> None:
        if self._queue.empty():
            self._queue.put_nowait(self._parcel)

    def __aiter__(self) -> "Mailbox":
        return self

    async def __anext__(self) -> TextDelta:
        if not self._taken:
            if self._num_open == 0:
                raise StopAsyncIteration
            self._taken = await self._take()
        delta = self._taken.pop(0)
        if delta.finish_reason is not None:
            self._num_open -= 1
        return delta

    async def _take(self) -> list[TextDelta]:
        parcel = await self._queue.get()
        self._parcel = _Parcel()
        if parcel.error is None:
            return list(parcel.deltas.values())
        if not parcel.deltas:
            raise parcel.error
        self.fail(parcel.error)
        return list(parcel.deltas.values())
