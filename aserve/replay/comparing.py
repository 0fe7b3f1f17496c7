"""What a replay found, beside what was recorded: where the two differ first, and how much of them agrees."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from aserve.core.ids import RequestId, Row, SeqId
from aserve.core.plan import SeqSlice, StepResult
from aserve.recording.records import Init, Landed, Plan
from aserve.replay.forced import runs


class Difference(NamedTuple):
    """The first place where a replay differs. what: "token", "logprob" or "failure"; position: of the token sampled.

    recorded, found: token ids, logprobs, or whether there was a token; None where the other has none there.
    """

    what: str
    step_id: int
    row: Row
    request_id: RequestId
    choice: int
    position: int
    recorded: float | None
    found: float | None


class Comparison(msgspec.Struct):
    """Sums over the steps so far.

    num_tokens: recorded tokens that were compared, num_equal: of these, those that were found again. num_forced: tokens
    of masked answers, which are not. first: of tokens and failures, first_logprob: of logprobs, bit by bit, up to where
    the sequence's tokens differ. largest_logprob: the largest distance of two of those.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_equal: int = 0
    num_forced: int = 0
    num_logprobs: int = 0
    num_sequences: int = 0
    differing: set[SeqId] = msgspec.field(default_factory=set)
    first: Difference | None = None
    first_logprob: Difference | None = None
    largest_logprob: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.first is None and self.first_logprob is None


class Comparer:
    """Is told of plans, then of what they brought, in the order of steps."""

    def __init__(self) -> None:
        self.comparison = Comparison()
        self._inits: dict[SeqId, Init] = {}

    def planned(self, plan: Plan) -> None:
        """A plan is launched."""
        for init in plan.inits:
            self.comparison.num_sequences += init.seq_id not in self._inits
            self._inits[init.seq_id] = init

    def landed(self, plan: Plan, recorded: Landed, found: StepResult) -> None:
        """It has landed."""
        comparison = self.comparison
        comparison.num_steps += 1
        places = zip(
            runs(plan, recorded.token_ids, recorded.num_accepted),
            runs(plan, found.token_ids, found.num_accepted),
            strict=True,
        )
        for (piece, theirs), (_, ours) in places:
            failed = piece.seq_id in recorded.failed, piece.seq_id in found.failed
            if any(failed):
                if failed[0] != failed[1]:
                    self._differs("failure", plan, piece, 0, (failed[0], failed[1]))
                continue
            if self._inits[piece.seq_id].has_mask:
                comparison.num_forced += len(theirs)
                continue
            run = recorded.token_ids[theirs.start : theirs.stop]
            num_equal = self._tokens(plan, piece, run, found.token_ids[ours.start : ours.stop])
            self._logprobs(plan, piece, recorded.logprobs[theirs.start :], found, ours.start, num_equal)

    def _tokens(self, plan: Plan, piece: SeqSlice, recorded: Sequence[int], found: Sequence[int]) -> int:
        """Compare two runs; how many of their tokens agree from the first on."""
        num_equal = 0
        for one, other in zip(recorded, found, strict=False):
            if one != other:
                break
            num_equal += 1
        self.comparison.num_tokens += len(recorded)
        self.comparison.num_equal += num_equal
        if num_equal < max(len(recorded), len(found)):
            at = recorded[num_equal : num_equal + 1], found[num_equal : num_equal + 1]
            self._differs("token", plan, piece, num_equal, (at[0][0] if at[0] else None, at[1][0] if at[1] else None))
        return num_equal

    def _logprobs(
        self,
        plan: Plan,
        piece: SeqSlice,
        recorded: Sequence[float | None],
        found: StepResult,
        first: int,
        num_equal: int,
    ) -> None:
        """Compare those of tokens that agree, unless the sequence has had other tokens before."""
        comparison = self.comparison
        if not recorded or not found.scores or (piece.seq_id in comparison.differing and not num_equal):
            return
        for offset, theirs in enumerate(recorded[:num_equal]):
            score = found.scores[first + offset]
            if theirs is None or score is None:
                continue
            comparison.num_logprobs += 1
            if _bits(theirs) != _bits(score.logprob):
                comparison.largest_logprob = max(comparison.largest_logprob, abs(theirs - score.logprob))
                if comparison.first_logprob is None:
                    comparison.first_logprob = self._at("logprob", plan, piece, offset, (theirs, score.logprob))

    def _differs(
        self, what: str, plan: Plan, piece: SeqSlice, offset: int, values: tuple[float | None, float | None]
    ) -> None:
        self.comparison.differing.add(piece.seq_id)
        if self.comparison.first is None:
            self.comparison.first = self._at(what, plan, piece, offset, values)

    def _at(
        self, what: str, plan: Plan, piece: SeqSlice, offset: int, values: tuple[float | None, float | None]
    ) -> Difference:
        init = self._inits[piece.seq_id]
        position = piece.start + piece.num_tokens - piece.num_samples + 1 + offset
        return Difference(what, plan.step_id, piece.row, init.request_id, init.index, position, *values)


def _bits(value: float) -> bytes:
    """NaN is equal to itself, and 0.0 is not to -0.0."""
    return array("d", [value]).tobytes()
