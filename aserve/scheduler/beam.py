"""Beam search: which beams go on with which tokens, and which hypotheses are kept. Pure: scores in, choices out.

Each step takes the likeliest continuations of `width` beams. Those that end become hypotheses if they are among the
best `width` of all; the best `width` that do not end are the beams of the next step. Equal to transformers' beam search
(generation/utils.py, 5.x) without its logits processors:

    score of a hypothesis = sum of log-probabilities / (number of generated tokens, the ending one included) ** penalty

Knows no sequence, block or row: a beam is a slot, 0 to width - 1. A beam that goes on stays in its slot where it can,
so that only a slot that was pruned has to take another's past.
"""

from collections.abc import Sequence
from heapq import nlargest
from math import inf
from typing import NamedTuple

from aserve.core.params import BeamParams
from aserve.core.plan import TokenScores


class Hypothesis(NamedTuple):
    """A finished beam. stop_id: the token that ended it, the last of token_ids; None where its length did."""

    score: float
    token_ids: tuple[int, ...]
    logprob: float
    stop_id: int | None


class Move(NamedTuple):
    """What a slot does next: it goes on from the slot `parent`, with this token."""

    parent: int
    token_id: int


class _Candidate(NamedTuple):
    logprob: float
    parent: int
    token_id: int


class BeamSearch:
    """One search. max_tokens: tokens generated at most. No ending token is taken before min_tokens.

    `advance` wants the `num_scores` likeliest tokens of each slot: as many as may matter, endings included.
    """

    def __init__(self, params: BeamParams, *, max_tokens: int, stop_ids: frozenset[int], min_tokens: int = 0) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        # At first all slots are the same, and all but one are out of the race.
        self._logprobs = [0.0] + [-inf] * (params.width - 1)
        self._token_ids: list[tuple[int, ...]] = [()] * params.width
        self._hypotheses: list[Hypothesis] = []
        self.num_tokens = 0
        """Tokens of each beam."""
        self.is_done = False

    @property
    def width(self) -> int:
        """Slots."""
        return self._params.width

    @property
    def num_scores(self) -> int:
        """Of a slot's continuations at most `width` can go on, besides all that can end."""
        return self.width + len(self._stop_ids)

    def best(self, num: int) -> list[Hypothesis]:
        """The best hypotheses, best first. Where fewer exist, as in a tiny vocabulary, the last one is repeated."""
        assert self._hypotheses, "some token could follow the prompt"
        missing = num - len(self._hypotheses)
        return self._hypotheses[:num] + self._hypotheses[-1:] * missing

    def advance(self, scores: Sequence[TokenScores]) -> list[Move]:
        """Take a step from what follows each slot; the move of each slot, or nothing if the search is done."""
        assert not self.is_done, "I19: the search has ended"
        candidates = self._candidates(scores)
        self.num_tokens += 1
        at_length = self.num_tokens == self._max_tokens
        for candidate in candidates[: self.width]:
            if at_length or candidate.token_id in self._stop_ids:
                self._finish(candidate)
        self._hypotheses = nlargest(self.width, self._hypotheses, key=lambda hypothesis: hypothesis.score)
        running = [candidate for candidate in candidates if candidate.token_id not in self._stop_ids][: self.width]
        self.is_done = at_length or len(running) < self.width or not self._can_improve(running[0].logprob)
        return [] if self.is_done else self._place(running)

    def cut_short(self) -> None:
        """End the search: the beams are hypotheses as they stand."""
        self.is_done = True
        for logprob, token_ids in zip(self._logprobs, self._token_ids, strict=True):
            if logprob > -inf:
                score = logprob / max(self.num_tokens, 1) ** self._params.length_penalty
                self._hypotheses.append(Hypothesis(score, token_ids, logprob, None))
        self._hypotheses = nlargest(self.width, self._hypotheses, key=lambda hypothesis: hypothesis.score)

    def _candidates(self, scores: Sequence[TokenScores]) -> list[_Candidate]:
        """Continuations, the likeliest first: all that end or go on are among them."""
        bars_ending = self.num_tokens < self._min_tokens
        found = [
            _Candidate(before + logprob, slot, token_id)
            for slot, (before, after) in enumerate(zip(self._logprobs, scores, strict=True))
            for token_id, logprob in zip(after.top_ids, after.top_logprobs, strict=True)
            if not (bars_ending and token_id in self._stop_ids)
        ]
        found.sort(key=lambda candidate: -candidate.logprob)
        return found

    def _finish(self, candidate: _Candidate) -> None:
        if candidate.logprob == -inf:
            return  # of a slot that is not in the race yet
        token_id = candidate.token_id
        score = candidate.logprob / self.num_tokens**self._params.length_penalty
        token_ids = (*self._token_ids[candidate.parent], token_id)
        stop_id = token_id if token_id in self._stop_ids else None
        self._hypotheses.append(Hypothesis(score, token_ids, candidate.logprob, stop_id))

    def _can_improve(self, best_logprob: float) -> bool:
        """Whether a running beam may still beat the worst hypothesis, by the rule of early_stopping."""
        if len(self._hypotheses) < self.width:
            return True
        if self._params.early_stopping is True:
            return False
        penalty = self._params.length_penalty
        num_tokens = self.num_tokens
        if self._params.early_stopping == "never" and penalty > 0.0:
            num_tokens = self._max_tokens
        return bool(best_logprob / num_tokens**penalty > self._hypotheses[-1].score)

    def _place(self, running: list[_Candidate]) -> list[Move]:
        """Give each beam a slot: the first child of a parent its parent's, the others those that were pruned."""
        placed: list[_Candidate | None] = [None] * self.width
        others = []
        for candidate in running:
            if placed[candidate.parent] is None:
                placed[candidate.parent] = candidate
            else:
                others.append(candidate)
        beams = [candidate or others.pop() for candidate in placed]
        self._token_ids = [(*self._token_ids[beam.parent], beam.token_id) for beam in beams]
        self._logprobs = [beam.logprob for beam in beams]
        return [Move(beam.parent, beam.token_id) for beam in beams]
