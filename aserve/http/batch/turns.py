"""Turns: when a line of a batch may begin. Lines go behind requests, and batches take turns with each other."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aserve.engine import Engine
from aserve.http.batch.lines import WAIT_S

LOOK_S: Final = 1.0
"""Who waits for a place looks so often whether his batch was stopped meanwhile."""


class Turns:
    """Of the lines of one engine's batches, half of `max_num_seqs` of which run at once, of all batches together.

    A line waits while a request does, and while its tenant has no tokens to spare: see `Account.has_room_for_line`.
    Lines that are suspected of the end of a process are run one at a time, before all others.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._places: asyncio.Semaphore | None = None
        self._gates: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._suspected: set[str] = set()
        self.alone = asyncio.Lock()
        """Held by who runs suspected lines."""

    @property
    def num_places(self) -> int:
        """Lines that may run at once. Raises `UnavailableError` before the engine is loaded."""
        return max(1, self._engine.config.max_num_seqs // 2)

    def suspect(self, batch_id: str) -> None:
        """A batch has lines that are to be run alone: until it `clear`s them, those of all wait."""
        self._suspected.add(batch_id)

    def clear(self, batch_id: str) -> None:
        """It has none any more."""
        self._suspected.discard(batch_id)

    async def take(self, batch_id: str, tenant: str | None, is_stopped: Callable[[], bool]) -> bool:
        """Wait for a place, which the caller gives back; False, and no place, where the batch was stopped before.

        tenant: None for a suspected line, which waits for requests alone.
        """
        if self._places is None:
            self._places = asyncio.Semaphore(self.num_places)
        async with self._gates[batch_id]:  # one line of a batch waits for a place: it is handed on in turn
            while not is_stopped():
                if not self._may_begin(tenant):
                    await asyncio.sleep(WAIT_S)
                elif await _taken(self._places):
                    has_begun = False
                    try:
                        has_begun = self._may_begin(tenant) and not is_stopped()
                    finally:
                        if not has_begun:
                            self._places.release()
                    if has_begun:
                        return True
        return False

    def give_back(self) -> None:
        """A place, of a line that runs no more."""
        assert self._places is not None
        self._places.release()

    def forget(self, batch_id: str) -> None:
        """A batch that has ended."""
        self._gates.pop(batch_id, None)
        self.clear(batch_id)

    def _may_begin(self, tenant: str | None) -> bool:
        if self._engine.statistics().num_waiting:
            return False
        return tenant is None or (not self._suspected and self._engine.tenants.has_room_for_line(tenant))


async def _taken(places: asyncio.Semaphore) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_S):
            return await places.acquire()
    return False
