"""The seams between floors, as Protocols: whoever implements one is chosen in build.py, and has a fake in tests."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from aserve.core.errors import AserveError
from aserve.core.ids import AdapterId, SeqId
from aserve.core.plan import SeqSlice, StepPlan, StepResult, TokenMask

Clock = Callable[[], float]
"""Seconds, monotonic, from an arbitrary origin (time.monotonic)."""


class Constraint(TokenMask, Protocol):
    """What one answer may say, behind the tokens that it has been told of.

    Each answer has two, that never meet: the runner's, in its row, is told what is sampled and makes masks; the
    scheduler's, where there are drafts, is told what has landed and says what is sure to come. So there is nothing to
    lock. What goes wrong raises nothing: from then on every mask is 0.
    """

    @property
    def num_tokens(self) -> int:
        """How many tokens of the answer it has been told of."""
        ...

    @property
    def failure(self) -> str | None:
        """Why one of its last masks is 0, in words for the user: a limit of the library, or a vocabulary that cannot
        say what has to come.
        """
        ...

    def forced(self) -> tuple[int, ...]:
        """Tokens that have to come next, one after the other: the masks leave no others. () where it is open."""
        ...

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow one another."""
        ...


class Structure(Protocol):
    """What answers are asked to be, compiled once. Shared by requests, and never changed."""

    def constraint(self) -> Constraint:
        """Of one answer that has no token yet."""
        ...

    def after(self, token_ids: Sequence[int]) -> "Structure":
        """What is left of it for an answer that goes on where another has come to with these tokens."""
        ...

    def going_on(self, *, ignores_end: bool) -> "Structure":
        """The same, for an answer that ends where it may, or only where nothing else may follow."""
        ...


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


@runtime_checkable
class MayBeLost(Protocol):
    """A `Runner` that other processes are part of, one of which may end while no step runs that could tell of it."""

    @property
    def lost(self) -> AserveError | None:
        """Why it computes nothing any more; None while it does."""
        ...


class AdapterStore(Protocol):
    """The weights of adapters, in host memory, for the runner to compute with."""

    def load(self, adapter: AdapterId, folder: str) -> None:
        """Read an adapter; in a thread, as it takes long. Raises `AdapterError`; then nothing is kept of it."""
        ...

    def drop(self, adapter: AdapterId) -> None:
        """No plan that is launched from now on has it: forget it, once those before have run. Does not wait."""
        ...


class Proposer(Protocol):
    """Guesses how sequences go on (drafts), for steps to verify. A wrong guess costs time and changes no token.

    most: drafts of a sequence in a step, at most. foresees: whether guesses are known at once and cost next to nothing,
    so that they are asked for and judged whether or not they are computed. Quick: it is asked while a step is planned.
    """

    most: int
    foresees: bool

    def propose(self, seq_id: SeqId, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow these, each of them perhaps TO_COME; () without a guess.

        token_ids: all of the sequence's; for the same id only ever longer than before.
        """
        ...

    def steps(self, step_id: int, slices: Sequence[SeqSlice]) -> tuple[StepPlan, ...]:
        """What a draft model has to compute so that the drafts come that are TO_COME in a plan of these slices."""
        ...

    def seconds(self, num_tokens: int) -> float:
        """What a draft model's step of so many tokens takes; a draft each for so many sequences, say."""
        ...

    def forget(self, seq_id: SeqId) -> None:
        """The sequence has ended, or a step failed. Unknown ids are no-ops."""
        ...
