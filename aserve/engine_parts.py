"""What an engine is made of and what it reports of itself: the seam between it and whoever loads a model.

Knows no model, no loop and no lifetime.
"""

import asyncio
import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from aserve.adapters import Adapters
from aserve.core.config import EngineConfig, ModelInfo
from aserve.core.errors import UnavailableError
from aserve.core.ports import Runner
from aserve.scheduler.scheduler import Scheduler
from aserve.text.chat_template import ChatTemplate
from aserve.text.tokenizer import Tokenizer

CANCELLED: Final = "the engine has ended: its task was cancelled, and not by closing it"
ELSEWHERE: Final = "the engine was entered in another event loop: it takes requests in that one alone"
UNWANTED: Final = "nobody waits for this model any more"


class EngineState(enum.Enum):
    """NEW -> LOADING -> READY -> DRAINING -> CLOSED; DEAD when the loop ended by itself (a bug) or was cancelled."""

    NEW = "new"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"
    DEAD = "dead"


class Progress(msgspec.Struct, frozen=True):
    """How far loading is: a stage by name, and `done` of `total` in it (0 of 0 where it has no parts).

    unit: of these; "B" are bytes.
    """

    stage: str
    done: int = 0
    total: int = 0
    unit: str = ""


def _nothing() -> None:
    """Ends nothing."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a loader makes: everything that an engine is built of. on_close: ends what else was begun, blocking."""

    info: ModelInfo
    config: EngineConfig
    scheduler: Scheduler
    runner: Runner
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    adapters: Adapters = field(default_factory=lambda: Adapters(None))
    on_close: Callable[[], None] = _nothing

    def close_unused(self) -> None:
        """Give back what nobody has used, blocking."""
        self.runner.close()
        self.on_close()

    async def close(self, *, is_stuck: bool) -> None:
        """Give back threads and memory. is_stuck: a step may never come back, and nobody waits for it."""
        self.adapters.close()
        await asyncio.to_thread(self._close_blocking, is_stuck)

    def _close_blocking(self, is_stuck: bool) -> None:
        """All at a stroke: a thread ends what it has begun, even if who waits for it is cancelled."""
        try:
            self.on_close()
        finally:
            if is_stuck:
                threading.Thread(target=self.runner.close, name="aserve close", daemon=True).start()
            else:
                self.runner.close()


Loader = Callable[[Callable[[Progress], None]], EngineParts]
"""Makes the parts, in a worker thread, reporting progress. Raises ConfigError or CheckpointError."""


async def load_in_thread(
    load: Loader, is_wanted: Callable[[], bool], on_progress: Callable[[Progress], None]
) -> EngineParts:
    """Load in a thread. A thread cannot be cancelled: when nobody wants the parts any more, it ends at its next report.

    Raises `UnavailableError` then, or after the last report, and what was loaded is given back.
    """
    event_loop = asyncio.get_running_loop()

    def report(progress: Progress) -> None:
        if not is_wanted():
            raise UnavailableError(UNWANTED)
        event_loop.call_soon_threadsafe(on_progress, progress)

    loading = event_loop.run_in_executor(None, load, report)
    try:
        parts = await asyncio.shield(loading)
    except asyncio.CancelledError:
        loading.add_done_callback(close_unwanted)
        raise
    if not is_wanted():
        await parts.close(is_stuck=False)
        raise UnavailableError(UNWANTED)
    return parts


def close_unwanted(loading: asyncio.Future[EngineParts]) -> None:
    """Give back what was loaded for a caller who has gone."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close_unused()
