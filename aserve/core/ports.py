"""The seams between floors, as Protocols: whoever implements one is chosen in build.py, and has a fake in tests."""

from collections.abc import Callable, Sequence
from typing import Protocol

from aserve.core.ids import SeqId
from aserve.core.plan import StepPlan, StepResult

Clock = Callable[[], float]
"""Seconds, monotonic, from an arbitrary origin (time.monotonic)."""


class Flight(Protocol):
    """A launched step."""

    async def land(self) -> StepResult:
        """Wait for the step's tokens; yields to the event loop at least once. Raises what the step raised."""
        ...


class Runner(Protocol):
    """Computes plans in launch order. Owns the weights, the KV memory, its device stream and its threads."""

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step and return at once. Steps run in launch order.

        Once one has failed, those launched behind it fail too, and touch nothing, until `recover`. What `land` raises
        is an Exception; where memory ran out, an `InsufficientMemoryError`.
        """
        ...

    def recover(self) -> Flight:
        """After a failed step, when all that were launched have landed: free what is cached, and compute again.

        The flight is that of a step of nobody's; if it raises, the device is lost.
        """
        ...

    def close(self) -> None:
        """Wait for launched steps, then give back threads and memory. Idempotent."""
        ...


class Proposer(Protocol):
    """Guesses how sequences go on (drafts), for steps to verify. A wrong guess costs time and changes no token.

    most: drafts of a sequence in a step, at most. Pure in what it is given, and quick: it is asked while a step is
    planned, for every sequence that may have drafts.
    """

    most: int

    def propose(self, seq_id: SeqId, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow these; () without a guess.

        token_ids: all of the sequence's; for the same id only ever longer than before.
        """
        ...

    def forget(self, seq_id: SeqId) -> None:
        """The sequence has ended. Unknown ids are no-ops."""
        ...
