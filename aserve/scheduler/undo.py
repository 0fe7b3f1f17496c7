"""After a step that failed: who may be to blame, and how much the next steps may compute. Pure: outcome in, trial out.

Nothing of a step is committed before it lands, so one that fails is taken back (`Residents.rewind`), and its requests
run again. Until one of them is found that fails alone, only some of them run, one step at a time:

    suspects   a b c d e f g h      trial   a b c d    lands: it was none of these
                       e f g h              e f        fails: one of them; g and h go free, untried
                       e f                  e          lands
                         f                  f          fails alone, and once more: f is the culprit

So a culprit is found in at most log2(suspects) + 2 trials, and those that land are steps like any other; failures by
chance blame hardly anybody. Where nobody fails alone, it was the company: the budget of a step is halved, as it is when
memory runs out, and grows back.
Knows requests by name and steps by their size; not what was raised, and not how a step is made.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from aserve.core.ids import RequestId
from aserve.core.outputs import StepTokens

CALM_STEPS: Final = 8
"""After so many steps that landed, a budget that was halved is doubled."""


class Restart(NamedTuple):
    """What bookkeeping that was made anew leaves to be told.

    taken_in: what the commit that was interrupted had taken in. lost: requests that are no longer known, or to blame.
    """

    taken_in: StepTokens
    lost: tuple[RequestId, ...]


class Inquest:
    """The search for the request that makes a step fail. suspects: those of the failed step, in the order of trial."""

    def __init__(self, suspects: Iterable[RequestId]) -> None:
        self._suspects = list(suspects)
        self._failed_alone = False

    @property
    def is_over(self) -> bool:
        """Whether nobody is left to be tried."""
        return not self._suspects

    @property
    def trial(self) -> Sequence[RequestId]:
        """Who runs in the next step: half of the suspects, or the last one alone."""
        return self._suspects[: (len(self._suspects) + 1) // 2]

    def keep(self, open_requests: Collection[RequestId]) -> None:
        """Suspects that have ended meanwhile are none."""
        self._suspects = [request_id for request_id in self._suspects if request_id in open_requests]

    def landed(self) -> None:
        """The trial's step has landed."""
        self._suspects = self._suspects[len(self.trial) :]
        self._failed_alone = False

    def failed(self) -> RequestId | None:
        """The trial's step has failed. Returns the culprit, if that was one request alone, for the second time."""
        self._suspects = list(self.trial)
        if len(self._suspects) > 1:
            return None
        if self._failed_alone:
            return self._suspects.pop()
        self._failed_alone = True
        return None


class StepBudget:
    """Tokens that a step computes at most: `most`, less for a while after memory ran out."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._num_calm = 0
        self.num_tokens = most

    @property
    def is_cut(self) -> bool:
        """Whether it is less than it could be."""
        return self.num_tokens < self.most

    def cut(self, num_tokens: int) -> bool:
        """A step of so many tokens was too much: from now on half of it. False if that cannot be halved."""
        self._num_calm = 0
        self.num_tokens = max(1, min(num_tokens, self.num_tokens) // 2)
        return num_tokens > 1

    def landed(self) -> None:
        """A step has landed: after `CALM_STEPS` of them try twice as much."""
        self._num_calm += 1
        if self._num_calm == CALM_STEPS:
            self._num_calm = 0
            self.num_tokens = min(2 * self.num_tokens, self.most)


class Aftermath:
    """What follows from failed steps for those to come. Steps that land cost one look at `is_on`."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.budget = StepBudget(max_num_batched_tokens)
        self.is_on = False
        """Whether the next steps are other than they would be."""
        self._inquest: Inquest | None = None
        self._failed_tokens = 0
        self._ran_out = False

    @property
    def is_inquest(self) -> bool:
        """Whether the next step is a trial, and nothing may be launched behind it."""
        return self._inquest is not None

    def trial(self, open_requests: Collection[RequestId]) -> Collection[RequestId] | None:
        """Who alone may run in the next step; None where all may."""
        if self._inquest is not None:
            self._inquest.keep(open_requests)
            self._close_if_over()
        return None if self._inquest is None else frozenset(self._inquest.trial)

    def dismiss(self) -> None:
        """Those on trial cannot run now, but behind others: let all run."""
        self._inquest = None

    def landed(self) -> None:
        """A step has landed."""
        self._ran_out = False
        if self.budget.is_cut:
            self.budget.landed()
        if self._inquest is not None:
            self._inquest.landed()
            self._close_if_over(fruitless=True)
        self.is_on = self.budget.is_cut or self._inquest is not None

    def failed(self, requests: Sequence[RequestId], num_tokens: int, *, out_of_memory: bool) -> RequestId | None:
        """A step has failed; all is taken back. Returns the culprit, if it is known now.

        requests: those of the step, in the order of trial. out_of_memory: whether half a step may do where it did not.
        """
        self.is_on = True
        if out_of_memory and (len(requests) == 1 or not self._ran_out) and self.budget.cut(num_tokens):
            self._ran_out = True
            return None
        if self._inquest is not None:
            culprit = self._inquest.failed()
            self._close_if_over()
            return culprit
        self._failed_tokens = num_tokens
        self._inquest = Inquest(requests)
        return None

    def _close_if_over(self, *, fruitless: bool = False) -> None:
        """fruitless: everybody landed, in smaller steps than the one that failed."""
        if self._inquest is not None and self._inquest.is_over:
            self._inquest = None
            if fruitless:
                self.budget.cut(self._failed_tokens)
