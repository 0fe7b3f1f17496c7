"""Viewer: what waits for somebody who looks on, and how much of it he has lost. See observer.py."""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from aserve.core.errors import UnavailableError
from aserve.observe.records import Record, Run, Snapshot


class News(msgspec.Struct, frozen=True):
    """What a viewer has not seen. num_lost: records that are gone; then, and at first, all begins with a snapshot."""

    num_lost: int
    snapshot: Snapshot | None
    records: tuple[Record | Run, ...]


class Viewer:
    """Somebody who looks on. Ends, for `news`, when the engine does.

    snapshot: makes one of what has been told. catch_up: has records offered that are still to be made. spend: to be
    told how much processor time went into telling him. max_records: that wait for him.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        catch_up: Callable[[], None],
        spend: Callable[[float], None],
        max_records: int,
    ) -> None:
        self._snapshot = snapshot
        self._catch_up = catch_up
        self.spend = spend
        self._records: deque[Record | Run] = deque()
        self._num_records = 0
        """Those of runs, too."""
        self._max_records = max_records
        self._num_lost = 0
        self._needs_snapshot = True
        self._has_ended = False
        self._bell = asyncio.Event()
        self._bell.set()
        self._look = asyncio.Event()

    async def news(self) -> News:
        """What has come since the last call; waits for something. Raises `UnavailableError` at the engine's end."""
        await self._bell.wait()
        if self._has_ended:
            raise UnavailableError("the engine has stopped")
        self._catch_up()
        self._bell.clear()
        num_lost, self._num_lost = self._num_lost, 0
        snapshot = self._snapshot() if self._needs_snapshot else None
        self._needs_snapshot = False
        records = tuple(self._records)
        self._clear()
        return News(num_lost, snapshot, records)

    async def next_look(self) -> None:
        """Wait until the engine looks after itself again, as it does ten times a second, or less often where that would
        take too much of its time, steps or none; or until it has ended.

        Who asks for news behind that wakes up when the event loop is awake, and takes nothing from a step.
        """
        if not self._has_ended:
            self._look.clear()
        await self._look.wait()

    def looked(self) -> None:
        """It does now."""
        self._look.set()

    def ring(self) -> None:
        """Something happened, of which there will be a record when somebody asks for it."""
        self._bell.set()

    def offer(self, told: Record | Run) -> None:
        """Something happened."""
        num_records = len(told.steps) if isinstance(told, Run) else 1
        if self._needs_snapshot:
            self._num_lost += num_records * (self._num_lost > 0)  # from the first that was lost to the next snapshot
        elif self._num_records + num_records <= self._max_records:
            self._records.append(told)
            self._num_records += num_records
        else:
            self.begin_anew(self._num_records + num_records)
        self._bell.set()

    def begin_anew(self, num_lost: int) -> None:
        """What waits is of no use any more."""
        self._num_lost += num_lost
        self._clear()
        self._needs_snapshot = True
        self._bell.set()

    def _clear(self) -> None:
        self._records.clear()
        self._num_records = 0

    def end(self) -> None:
        """Nothing will come."""
        self._has_ended = True
        self._bell.set()
        self._look.set()
