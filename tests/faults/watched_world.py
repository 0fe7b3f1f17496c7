"""A world at which somebody looks all the time, and somebody else for a while, by the inspector's feed."""

import asyncio
from contextlib import ExitStack

import pytest

from aserve.http.inspector import PATH
from aserve.observe import observer
from tests.faults.small_world import SmallWorld
from tests.faults.world import WHOSE, Answer

WATCHER = "watcher"


class WatchedWorld(SmallWorld):
    """Memory is short, so that there is something to see. The one who looks all the time never reads. Looks come
    whatever telling takes: by this world's clock, which stands still, no rest would end.
    """

    def __init__(self, *, failing_steps: tuple[int, ...] = ()) -> None:
        super().__init__(failing_steps=failing_steps)
        self._looking = ExitStack()

    async def __aenter__(self) -> "WatchedWorld":
        await super().__aenter__()
        self._looking.enter_context(pytest.MonkeyPatch.context()).setattr(observer, "MAX_REST_S", 0.0)
        self._looking.enter_context(self.engine.observer.viewer())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._looking.close()
        await super().__aexit__(*exc)

    async def answers(self) -> dict[str, Answer]:
        """Of all clients, while the watcher is there."""
        watching = asyncio.create_task(self._watch())
        answers = await super().answers()
        return answers | {WATCHER: await watching}

    async def _watch(self) -> Answer:
        """It leaves after some records. What it is told until then is its own business, or why it is told nothing."""
        WHOSE.set(WATCHER)
        answer = await self.ask(WATCHER, PATH, b"", method="GET", leaves_after=4)
        if answer.status not in (0, 200):
            return answer
        return Answer(escaped=answer.escaped, broken=answer.broken)
