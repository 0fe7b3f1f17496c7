"""Landing: what a step has brought is taken in: tokens appended, full blocks sealed, what has ended is ended.

    slice without samples    a chunk of a prompt: full blocks are sealed
    slice of one sample      the common kind: its token goes to the reader as it is, if there is nothing else to tell
    slice with drafts        accepted tokens are taken in one by one, as if each had been a step, and told together
    slice of a model that pools    its vector is told, and its sequence has ended

A token is sampled from the position before its own. So a sequence has landed up to where its tokens on the host end:
when one comes, `len(token_ids)` positions are computed for good. Blocks are sealed, sequences ended and positions
counted by that alone. A rejected draft is never among the tokens, so it is in no block that is sealed, and in no hash
(I22).

Knows no budget and no queue; who holds what is known to residents.py, what is told of groups to held_back.py.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from typing import Final

from aserve.core.ids import ChoiceId, RequestId, SeqId
from aserve.core.outputs import SeqDelta, StepTokens
from aserve.core.plan import SeqSlice, StepPlan, StepResult, TokenScores
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.drafting import Drafter
from aserve.scheduler.residents import Residents
from aserve.scheduler.scores import take_prompt_scores
from aserve.scheduler.sequence import Group, Sequence
from aserve.scheduler.states import State
from aserve.scheduler.stopping import reason_to_stop

NOTHING: Final = StepTokens([], [], [])
"""What is taken in between two steps."""
_NO_SCORES: Final[Mapping[SeqId, TokenScores | None]] = {}


class Landing:
    """sequences: those that have not ended. drafter: is told of drafts. end, end_request: to be called for who ends."""

    def __init__(
        self,
        sequences: Mapping[SeqId, Sequence],
        cache: PagedCache,
        residents: Residents,
        drafter: Drafter,
        *,
        end: Callable[[Sequence], None],
        end_request: Callable[[RequestId], None],
    ) -> None:
        self._sequences = sequences
        self._cache = cache
        self._residents = residents
        self._drafter = drafter
        self._end = end
        self._end_request = end_request
        self._taken_in = NOTHING
        self._at: tuple[Sequence, int, bool] | None = None

    def interrupted(self) -> tuple[StepTokens, Sequence | None, bool]:
        """If `take_in` raised: what it had taken in, which is to be told, and at whose token, which is forgotten.

        And whether the token may be with the choice's group already, which cannot forget it. It is not yet where it was
        the blocks before it that could not be sealed.
        """
        taken_in, at = self._taken_in, self._at
        self._taken_in, self._at = NOTHING, None
        if at is None:
            return taken_in, None, False
        sequence, num_landed, may_be_told = at
        del sequence.token_ids[num_landed:]
        return taken_in, sequence, may_be_told

    def take_in(self, plan: StepPlan, result: StepResult) -> StepTokens:
        """What readers learn from a step. See `Scheduler.commit`."""
        if result.prompt_scores:
            take_prompt_scores(self._sequences, plan, result)
        choices: list[ChoiceId] = []
        quiet_ids: list[int] = []
        deltas: list[SeqDelta] = []
        self._taken_in = step = StepTokens(choices, quiet_ids, deltas)
        slices: Several[SeqSlice] = plan.slices
        token_ids: Several[int] = result.token_ids
        scores: Several[TokenScores | None] = result.scores
        if len(token_ids) != len(slices) or result.num_accepted or result.vectors:
            slices = self._seal_chunks(slices)
            if result.vectors:
                self._take_in_vectors(slices, result.vectors)
                slices = token_ids = ()
            elif result.num_accepted:
                slices, token_ids, scores = self._take_in_runs(slices, result)
            assert len(slices) == len(token_ids), "each slice that samples has a token"
        scores_of = dict(zip((piece.seq_id for piece in slices), scores, strict=True)) if scores else _NO_SCORES
        sequences = self._sequences
        for piece, token_id in zip(slices, token_ids):  # noqa: B905  as long as each other
            sequence = sequences.get(piece.seq_id)
            if sequence is None:  # it has ended
                continue
            tokens = sequence.token_ids
            num_landed = len(tokens)
            if num_landed >= sequence.table.seal_at:  # never true of a preempted sequence: it has no blocks
                self._at = sequence, num_landed, False
                self._cache.seal(sequence.table, tokens, num_landed)
                self._at = None
            if token_id in sequence.stop_ids or num_landed > sequence.quiet_until:
                self._at = sequence, num_landed, True
                deltas.extend(self._landed(sequence, token_id, scores_of.get(sequence.id)))
                self._at = None
                continue
            tokens.append(token_id)
            choices.append(sequence.choice_id)
            quiet_ids.append(token_id)
        self._taken_in = NOTHING
        return step

    def _seal_chunks(self, slices: Several[SeqSlice]) -> tuple[SeqSlice, ...]:
        """Seal what unfinished chunks, whose tokens are all known, have filled up. Returns the slices that sample."""
        for piece in slices:
            sequence = None if piece.num_samples else self._sequences.get(piece.seq_id)
            num_landed = piece.start + piece.num_tokens
            if sequence is not None and num_landed >= sequence.table.seal_at:
                self._cache.seal(sequence.table, sequence.token_ids, num_landed)
        return tuple(piece for piece in slices if piece.num_samples)

    def _take_in_vectors(self, slices: Several[SeqSlice], vectors: Several["array[float]"]) -> None:
        """What was made of whole prompts, which ends their sequences."""
        for piece, vector in zip(slices, vectors, strict=True):
            sequence = self._sequences.get(piece.seq_id)
            if sequence is None:
                continue
            num_landed = len(sequence.token_ids)
            self._at = sequence, num_landed, True
            if num_landed >= sequence.table.seal_at:
                self._cache.seal(sequence.table, sequence.token_ids, num_landed)
            self._end(sequence)
            self._taken_in.deltas.append(sequence.pooled(vector))
            self._at = None

    def _take_in_runs(
        self, slices: Several[SeqSlice], result: StepResult
    ) -> tuple[list[SeqSlice], list[int], list[TokenScores | None]]:
        """Take in what slices with drafts have brought. Returns the other slices, their tokens and their scores."""
        rest: list[SeqSlice] = []
        rest_ids: list[int] = []
        rest_scores: list[TokenScores | None] = []
        first = 0
        for piece, num_accepted in zip(slices, result.num_accepted, strict=True):
            last = first + num_accepted + 1
            token_ids, scores = result.token_ids[first:last], result.scores[first:last]
            first = last
            if piece.num_samples > 1:
                self._take_in_run(piece, token_ids, scores or (None,) * len(token_ids))
            else:
                rest.append(piece)
                rest_ids += token_ids
                rest_scores += scores
        return rest, rest_ids, rest_scores

    def _take_in_run(self, piece: SeqSlice, token_ids: Several[int], scores: Several[TokenScores | None]) -> None:
        """Take in the accepted drafts of a slice and the token after them.

        Positions behind those are to be computed again, and nothing is known of what was written there (I22).
        """
        sequence = self._sequences.get(piece.seq_id)
        if sequence is None:
            return
        self._drafter.verified(piece, len(token_ids) - 1)
        tokens = sequence.token_ids
        self._at = sequence, len(tokens), True
        told: dict[ChoiceId, SeqDelta] = {}
        for token_id, score in zip(token_ids, scores, strict=True):
            if len(tokens) >= sequence.table.seal_at:
                self._cache.seal(sequence.table, tokens, len(tokens))
            for delta in self._landed(sequence, token_id, score):
                choice = delta.request_id, delta.index
                told[choice] = told[choice].merge(delta) if choice in told else delta
            if sequence.state is State.FINISHED:
                break
        if sequence.state in (State.RUNNING, State.SWAPPED):  # else it computes from the beginning, or no more
            assert sequence.num_computed == piece.start + piece.num_tokens, f"I22: {sequence!r} ran ahead of its drafts"
            sequence.num_computed = len(tokens) - 1
        self._taken_in.deltas.extend(told.values())
        self._at = None

    def _landed(self, sequence: Sequence, token_id: int, score: TokenScores | None) -> Iterable[SeqDelta]:
        """Take in a token that is not passed on as it is: a first or last one, one with scores, one that is held back.

        Returns what readers learn from it: nothing yet where the choice is held back.
        """
        group = sequence.group
        if group is not None and group.beams is not None:
            assert score is not None, "beams are scored"
            is_round = sequence.state is State.RUNNING and group.beams.report(sequence.index, score)
            return self._advance_beams(group) if is_round else ()
        num_landed = len(sequence.token_ids)
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
