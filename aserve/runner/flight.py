"""A launched step, seen from the event loop: the only place below the engine that awaits."""

import asyncio
from concurrent.futures import Future

from aserve.core.plan import StepResult


class StepFlight:
    """Resolves when the runner's thread has the step's tokens on the host."""

    def __init__(self, landed: Future[StepResult]) -> None:
        self._landed = landed

    async def land(self) -> StepResult:
        """The step's tokens. Raises what the step raised.

        Always yields to the event loop: `wrap_future` hands even a finished result over through `call_soon`, and on a
        CPU, where a step may well be finished, the loop would otherwise starve its other tasks. Shielded, because a
        cancelled wait would cancel the future, which the runner's thread is about to resolve.
        """
        return await asyncio.shield(asyncio.wrap_future(self._landed))
