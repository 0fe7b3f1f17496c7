"""Choices that are told when all of a request have ended: the best of several (best_of), and beams.

    Ranking    tokens of every choice come as they are sampled; the likeliest choices are told at the end
    Beams      what may follow each beam comes every step; the search says how they go on, and what is told

Both are told of choices by index and of what they gained, and know no sequence, block or step.
"""

from collections.abc import Iterable

from aserve.core.outputs import FinishReason, SeqDelta
from aserve.core.plan import TokenScores
from aserve.core.request import Request
from aserve.scheduler.beam import BeamSearch


class Ranking:
    """best_of: adds up log-probabilities, and gives the best `num_shown` of `num_run` choices when all have ended."""

    def __init__(self, num_shown: int, num_run: int, *, shows_scores: bool) -> None:
        self._num_shown = num_shown
        self._shows_scores = shows_scores
        self._deltas: list[SeqDelta | None] = [None] * num_run
        self._logprobs = [0.0] * num_run
        self._num_open = num_run
        self._prompt_scores: tuple[TokenScores, ...] = ()

    def add(self, delta: SeqDelta, logprob: float) -> list[SeqDelta]:
        """Take a delta and what its token adds in. Returns the chosen ones, best first, once the last has ended."""
        index = delta.index
        self._logprobs[index] += logprob
        self._prompt_scores += delta.prompt_scores
        earlier = self._deltas[index]
        self._deltas[index] = delta if earlier is None else earlier.merge(delta)
        self._num_open -= delta.finish_reason is not None
        return self._chosen() if self._num_open == 0 else []

    def _chosen(self) -> list[SeqDelta]:
        order = sorted(range(len(self._deltas)), key=self._rank)
        return [self._shown(place, index) for place, index in enumerate(order[: self._num_shown])]

    def _rank(self, index: int) -> tuple[bool, float]:
        """The likeliest first; last those without a token, whose time was up before they had one."""
        delta = self._deltas[index]
        return (delta is None or not delta.token_ids, -self._logprobs[index])

    def _shown(self, place: int, index: int) -> SeqDelta:
        delta = self._deltas[index]
        assert delta is not None, "a choice ends with a token, or with its time"
        return SeqDelta(
            delta.request_id,
            delta.token_ids,
            delta.finish_reason,
            delta.stop_reason,
            place,
            delta.num_cached_tokens,
            delta.scores if self._shows_scores else (),
            self._prompt_scores if place == 0 else (),
            self._logprobs[index],
            delta.queued_s,
        )


class Beams:
    """The slots of a beam search: each reports what may follow it, and waits until all have reported.

    max_tokens: tokens of a beam at most.
    """

    def __init__(self, request: Request, max_tokens: int) -> None:
        params = request.params
        assert params.beam is not None, "the request asks for a beam search"
        self._request = request
        self._reports: dict[int, TokenScores] = {}
        self.search = BeamSearch(
            params.beam, max_tokens=max_tokens, stop_ids=request.stop_ids, min_tokens=params.min_tokens
        )

    def report(self, slot: int, scores: TokenScores) -> bool:
        """A slot's step has landed; whether all have reported."""
        self._reports[slot] = scores
        return len(self._reports) == self.search.width

    def retract(self, slot: int) -> None:
        """The slot is preempted, and will report again."""
        self._reports.pop(slot, None)

    def take_reports(self) -> list[TokenScores]:
        """The reports of all slots, in order; the next round begins."""
        scores = [self._reports[slot] for slot in range(self.search.width)]
        self._reports.clear()
        return scores

    def cut_short(
        self, num_cached: int, queued_s: float, reason: FinishReason, stop_reason: str | None
    ) -> Iterable[SeqDelta]:
        """The outcome, were the search to end now. reason, stop_reason: of those without an end. Else as `outcome`."""
        self.search.cut_short()
        return self.outcome(num_cached, queued_s, reason, stop_reason)

    def outcome(
        self,
        num_cached: int,
        queued_s: float,
        reason: FinishReason = FinishReason.LENGTH,
        stop_reason: str | None = None,
    ) -> Iterable[SeqDelta]:
        """The best n hypotheses, as choices that come and end at once.

        num_cached, queued_s: of the request's first sequence, as in `SeqDelta`.
        """
        request = self._request
        for place, hypothesis in enumerate(self.search.best(request.params.n)):
            stop_id = hypothesis.stop_id
            yield SeqDelta(
                request.id,
                hypothesis.token_ids,
                reason if stop_id is None else FinishReason.STOP,
                stop_reason if stop_id is None else None if stop_id in request.eos_ids else stop_id,
                place,
                num_cached,
                cumulative_logprob=hypothesis.logprob,
                queued_s=queued_s,
            )
