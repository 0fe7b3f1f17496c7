"""A launched step, seen from the event loop: the only place below the engine that awaits.

What a step raised comes over as a value: as a future's exception, asyncio would refuse it (StopIteration), take it for
the cancellation of whoever waits (CancelledError), or end the event loop (SystemExit).
"""

import asyncio
from concurrent.futures import Future

from aserve.core.plan import StepResult


class BrokenStepError(RuntimeError):
    """A step raised what is no Exception; it is the cause of this one."""


Landed = Future[StepResult | BaseException]
"""How a step ended."""


class LateLanding:
    """Tells how the last step ended, when the next one's kernels begin. Used by the runner's thread alone.

    Whoever is told takes Python's lock at once, to send tokens and to plan. Where the host computes, and the next step
    is there already, that one cannot be made ready meanwhile, and cores have nothing to do. Its kernels do without the
    lock, so they are the time in which to tell:

        told at its end      kernels t | lock: sending, planning | make ready | kernels t+1
        told late            kernels t | make ready | kernels t+1
                                                    | lock: sending, planning
    """

    def __init__(self) -> None:
        self._untold: tuple[Landed, StepResult] | None = None

    def keep(self, landed: Landed, result: StepResult) -> None:
        """Have this told later, behind what was kept before."""
        self.tell()
        self._untold = landed, result

    def tell(self) -> None:
        """Tell what is kept, if anything is."""
        if self._untold is not None:
            landed, result = self._untold
            self._untold = None
            landed.set_result(result)


class StepFlight:
    """Resolves when the runner's thread has the step's tokens on the host."""

    def __init__(self, landed: Landed) -> None:
        self._landed = landed

    async def land(self) -> StepResult:
        """The step's tokens. Raises what the step raised.

        Always yields to the event loop: `wrap_future` hands even a finished result over through `call_soon`, and on a
        CPU, where a step may well be finished, the loop would otherwise starve its other tasks. Shielded, because a
        cancelled wait would cancel the future, which the runner's thread is about to resolve.
        """
        return result_of(await asyncio.shield(asyncio.wrap_future(self._landed)))


def result_of(outcome: StepResult | BaseException) -> StepResult:
    """The result; raises what was raised in its place."""
    if isinstance(outcome, StepResult):
        return outcome
    if isinstance(outcome, Exception) and not isinstance(outcome, StopIteration | StopAsyncIteration):
        raise outcome
    raise BrokenStepError(type(outcome).__name__) from outcome
