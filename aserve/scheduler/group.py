"""Group: the sequences of one request that answer one prompt, n or best_of or beams, and what comes out of them.

They are sequences like any: each has its row, its seed and its end. What a group adds is their common past, which is
computed once, and the decision what is told of them: choices stream as they come; ranked ones (best_of > n) are held
back until all have ended, and beams until the search has.

    leader     prompt ------------------> token, token ...        admitted like anybody
    siblings   prompt[:-1] | last token -> token, token ...       forked from whoever runs; else admitted like anybody

Knows no block and no step.
"""

from collections.abc import Callable, Iterable

from aserve.core.outputs import DEADLINE, FinishReason, SeqDelta
from aserve.core.plan import TokenScores
from aserve.core.request import Request
from aserve.scheduler.beam import BeamSearch
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.states import State


class Group:
    """members: those that have not ended, by index. num_common: leading positions that all of them share."""

    def __init__(self, request: Request, members: list[Sequence]) -> None:
        self.request = request
        self.members = members
        self.num_common = len(request.prompt_token_ids) - 1
        self.ranking: Ranking | None = None
        self.beams: Beams | None = None
        params = request.params
        if params.beam is not None:
            self.beams = Beams(request, members)
        elif params.num_sequences > params.n:
            self.ranking = Ranking(params.n, params.num_sequences, shows_scores=params.logprobs is not None)
        for member in members:
            member.group = self

    @property
    def is_held_back(self) -> bool:
        """Whether nothing is told before the end."""
        return self.ranking is not None or self.beams is not None

    def running(self) -> list[Sequence]:
        """Members that run."""
        return [member for member in self.members if member.state is State.RUNNING]

    def advance_beams(self, take_over: Callable[[Sequence, Sequence], None]) -> tuple[SeqDelta, ...]:
        """Every beam has reported: let the search choose, and the slots do as it says; its outcome, once it is done.

        take_over: has a member go on as another, whose past is not its own.
        """
        beams, members = self.beams, self.members
        assert beams is not None, "the group is one of beams"
        moves = beams.search.advance(beams.take_reports())
        if beams.search.is_done:
            return tuple(beams.outcome(members[0]))
        for member, (parent, _) in zip(members, moves, strict=True):
            if parent != member.index:
                take_over(member, members[parent])
        for member, (_, token_id) in zip(members, moves, strict=True):
            member.token_ids.append(token_id)
            member.num_prefill = len(member.token_ids)
            member.last_position = member.num_prefill - 1
        return ()


def fork_source(sequence: Sequence) -> tuple[Sequence, int] | None:
    """A running sequence with whom a waiting one has a past in common, and how many positions of it."""
    if sequence.group is not None:
        running = sequence.group.running()
        if running:
            return max(running, key=lambda member: member.num_computed), sequence.group.num_common
    origin = sequence.origin
    if origin is not None and origin.state is State.RUNNING:
        return origin, sequence.num_prompt - 1
    return None


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
        self._deltas[index] = delta if earlier is None else _joined(earlier, delta)
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
    """The members as the slots of a beam search. A slot reports what may follow it, and waits for the others.

    A beam's next token is known on the host alone, so that it is not planned one step ahead: its `last_position` is
    that of its newest token until the search has moved on.
    """

    def __init__(self, request: Request, members: list[Sequence]) -> None:
        params = request.params
        assert params.beam is not None, "the request asks for a beam search"
        self._request = request
        self._reports: dict[int, TokenScores] = {}
        self.search = BeamSearch(
            params.beam,
            max_tokens=members[0].max_len - members[0].num_prompt,
            stop_ids=request.stop_ids,
            min_tokens=params.min_tokens,
        )
        for member in members:
            member.last_position = member.num_prompt - 1

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

    def cut_short(self, leader: Sequence) -> Iterable[SeqDelta]:
        """The outcome, were the search to end now."""
        self.search.cut_short()
        return self.outcome(leader, DEADLINE)

    def outcome(self, leader: Sequence, cut_by: str | None = None) -> Iterable[SeqDelta]:
        """The best n hypotheses, as choices that come and end at once. leader: the member that came first.

        cut_by: the stop_reason of those without an end.
        """
        request = self._request
        for place, hypothesis in enumerate(self.search.best(request.params.n)):
            stop_id = hypothesis.stop_id
            yield SeqDelta(
                request.id,
                hypothesis.token_ids,
                FinishReason.LENGTH if stop_id is None else FinishReason.STOP,
                cut_by if stop_id is None else None if stop_id in request.eos_ids else stop_id,
                place,
                leader.num_cached,
                cumulative_logprob=hypothesis.logprob,
                queued_s=leader.queued_s,
            )


def _joined(earlier: SeqDelta, later: SeqDelta) -> SeqDelta:
    return SeqDelta(
        earlier.request_id,
        earlier.token_ids + later.token_ids,
        later.finish_reason,
        later.stop_reason,
        earlier.index,
        earlier.num_cached_tokens,
        earlier.scores + later.scores,
        earlier.prompt_scores + later.prompt_scores,
        queued_s=earlier.queued_s,
    )
