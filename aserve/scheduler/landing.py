"""Landing: what a step has brought is taken in: tokens appended, full blocks sealed, what has ended is ended.

Knows no budget and no queue; who holds what is known to residents.py, what is told of groups to held_back.py.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from typing import Final

from aserve.core.ids import RequestId, SeqId
from aserve.core.outputs import SeqDelta, StepTokens
from aserve.core.plan import SeqSlice, StepPlan, StepResult, TokenScores
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.residents import Residents
from aserve.scheduler.scores import take_scores
from aserve.scheduler.sequence import Group, Sequence
from aserve.scheduler.states import State
from aserve.scheduler.stopping import reason_to_stop

NOTHING: Final = StepTokens([], [], [])
"""What is taken in between two steps."""


class Landing:
    """sequences: those that have not ended. end, end_request: to be called for those that do."""

    def __init__(
        self,
        sequences: Mapping[SeqId, Sequence],
        cache: PagedCache,
        residents: Residents,
        *,
        end: Callable[[Sequence], None],
        end_request: Callable[[RequestId], None],
    ) -> None:
        self._sequences = sequences
        self._cache = cache
        self._residents = residents
        self._end = end
        self._end_request = end_request
        self._taken_in = NOTHING
        self._at: tuple[Sequence, int] | None = None

    def interrupted(self) -> tuple[StepTokens, Sequence | None]:
        """If `take_in` raised: what it had taken in, which is to be told, and at whose token, which is forgotten."""
        taken_in, at = self._taken_in, self._at
        self._taken_in, self._at = NOTHING, None
        if at is None:
            return taken_in, None
        sequence, num_landed = at
        del sequence.token_ids[num_landed:]
        return taken_in, sequence

    def take_in(self, plan: StepPlan, result: StepResult) -> StepTokens:
        """What readers learn from a step. See `Scheduler.commit`."""
        scores = take_scores(self._sequences, plan, result) if result.scores or result.prompt_scores else {}
        slices = plan.slices
        if len(result.token_ids) != len(slices):
            slices = self._seal_chunks(slices)
            assert len(slices) == len(result.token_ids), "each slice that samples has a token"
        sequences = self._sequences
        self._taken_in = step = StepTokens([], [], [])
        choices, quiet_ids, deltas = step.choices, step.token_ids, step.deltas
        for piece, token_id in zip(slices, result.token_ids):  # noqa: B905  as long as each other
            sequence = sequences.get(piece.seq_id)
            if sequence is None:  # it has ended
                continue
            num_landed = piece.start + piece.num_tokens
            if num_landed >= sequence.table.seal_at:  # never true of a preempted sequence: it has no blocks
                self._at = sequence, num_landed
                self._cache.seal(sequence.table, sequence.token_ids, num_landed)
                self._at = None
            if token_id in sequence.stop_ids or num_landed > sequence.quiet_until:
                self._at = sequence, num_landed
                deltas.extend(self._landed(sequence, token_id, num_landed, scores.get(sequence.id)))
                self._at = None
                continue
            sequence.token_ids.append(token_id)
            choices.append(sequence.choice_id)
            quiet_ids.append(token_id)
        self._taken_in = NOTHING
        return step

    def _seal_chunks(self, slices: Several[SeqSlice]) -> tuple[SeqSlice, ...]:
        """Seal what unfinished chunks have filled up. Returns the slices that sample."""
        for piece in slices:
            sequence = None if piece.samples else self._sequences.get(piece.seq_id)
            num_landed = piece.start + piece.num_tokens
            if sequence is not None and num_landed >= sequence.table.seal_at:
                self._cache.seal(sequence.table, sequence.token_ids, num_landed)
        return tuple(piece for piece in slices if piece.samples)

    def _landed(
        self, sequence: Sequence, token_id: int, num_landed: int, score: TokenScores | None
    ) -> Iterable[SeqDelta]:
        """Take in a token that is not passed on as it is: a first or last one, one with scores, one that is held back.

        Returns what readers learn from it: nothing yet where the choice is held back.
        """
        group = sequence.group
        if group is not None and group.beams is not None:
            assert score is not None, "beams are scored"
            is_round = sequence.state is State.RUNNING and group.beams.report(sequence.index, score)
            return self._advance_beams(group) if is_round else ()
        sequence.token_ids.append(token_id)
        reason, stop_reason = None, None
        if token_id in sequence.stop_ids or num_landed > sequence.last_position:
            reason, stop_reason = reason_to_stop(sequence, token_id)
            self._end(sequence)
        elif sequence.sampling.num_logprobs is None:
            sequence.quiet_until = sequence.last_position
        delta = sequence.delta(token_id, reason, stop_reason, score)
        if group is None or group.ranking is None:
            return (delta,)
        assert score is not None, "ranked choices are scored"
        return group.ranking.add(delta, score.logprob)

    def _advance_beams(self, group: Group) -> Iterable[SeqDelta]:
        """Every beam has reported what may follow it."""
        outcome = group.advance_beams(self._residents.take_over)
        if outcome:
            self._end_request(group.request.id)
        return outcome
