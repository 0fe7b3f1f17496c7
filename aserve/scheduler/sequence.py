"""Sequence: one row of tokens on its way from prompt to answer; Group: the sequences of a request with several.

    positions   |<------- num_prefill ------->|<--------- decoded, one a step --------->|
                0            num_computed ->                                  last_position
                |<------------ on the host: token_ids ----------------->|<- in flight ->|

`num_computed` counts positions that a plan covers, whether it has landed or not. While it is below `num_prefill` the
sequence's slices carry their tokens; from there on each step computes the row's last sampled token, which may not have
come back yet. `num_prefill` is the prompt, and after a preemption the prompt and all that was generated.
Which position may be planned next is asked of `Sequence.may_advance`:

    last_position      what lies behind it yields no token that is wanted
    awaits_tokens      the next position is planned when the token that stands there has landed, not before
    drafted_until      so it is behind drafts: how many of them are accepted says where the next position is

Sequences of a group have rows, seeds and ends of their own. They have a past in common, which is computed once:

    leader     prompt ------------------> token, token ...        admitted like any sequence
    siblings   prompt[:-1] | last token -> token, token ...       forked from one that runs; else admitted like any

Knows no budget, no block and no step; changed by the scheduler alone.
"""

from array import array
from collections.abc import Callable
from typing import Final

import msgspec

from aserve.core.columns import NEUTRAL, PenaltyColumns, SamplingColumns
from aserve.core.ids import ChoiceId, RequestId, Row, SeqId
from aserve.core.outputs import FinishReason, SeqDelta
from aserve.core.plan import RowControls, RowInit, RowSampling, TokenScores
from aserve.core.ports import Constraint
from aserve.core.request import Request
from aserve.kv_cache.table import BlockTable
from aserve.scheduler.held_back import Beams, Ranking
from aserve.scheduler.states import State

SortKey = tuple[float, int]
"""Orders sequences; smaller goes first and is preempted last."""

_NO_CONTROLS: Final = RowControls()


class Sequence:
    """Read and written on the hot path, hence plain attributes.

    token_ids: prompt and what has landed; not a list, as the garbage collector would walk through those of all who run.
    index: which choice of its request; choice_id has both.
    group: those that share the prompt with it; None for one that is alone.
    origin: the sequence that it continues, while that runs; its prompt is then the other's past.
    max_len: tokens at which it ends with reason "length", prompt included.
    last_position: the position that yields the last token, which brings max_len: with 3 prompt tokens and max_tokens
        4 that is position 5. Behind it nothing is computed.
    awaits_tokens: whether a position is planned only when its token is on the host: for a beam, or any other whose next
        step depends on which token it was. Their neighbours are planned ahead as ever.
    may_have_drafts: whether tokens may be guessed for it, see drafting.py. drafted_until: the end of its newest slice
        with drafts; -1 where it has had none.
    free_until: up to this position it may advance without `may_advance` being asked; -1 where that is always asked.
    constraint: what its answer may say, as its row was told; None where that is anything, or it has had no row.
    quiet_until: a token that lands with at most so many positions computed is passed on as it is, if it ends nothing;
        all others take the slow way, as the first does. -1 where all do (scores, ranked choices).
    settled_in: id of the step that was planned when it took its row.
    row: its place in the runner's tables while RUNNING.
    num_bound: blocks that its next RowInit brings; None when the runner knows the row.
    num_cached: prompt tokens found in the prefix cache at first admission.
    num_charged: positions that its tenant has been charged for, under the fair policy.
    queued_s: from arrival to first admission.
    num_scored: prompt tokens that need no (more) scores, the first included. prompt_scores: those to go out next.
    resume_after: id of the newest step in flight when it was preempted. Until that has landed it may not come back,
        as a token of its may still be in the air.
    swap_id: while SWAPPED, says who went together.
    torn_at: how many tokens it had when the bookkeeping was torn at it; -1 where it never was.
    """

    __slots__ = (
        "awaits_tokens",
        "choice_id",
        "constraint",
        "drafted_until",
        "free_until",
        "group",
        "id",
        "index",
        "last_position",
        "max_len",
        "may_have_drafts",
        "num_bound",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_preemptions",
        "num_prefill",
        "num_scored",
        "origin",
        "prompt_scores",
        "queued_s",
        "quiet_until",
        "request",
        "request_id",
        "resume_after",
        "row",
        "sampling",
        "settled_in",
        "sort_key",
        "state",
        "stop_ids",
        "swap_id",
        "table",
        "token_ids",
        "torn_at",
    )

    def __init__(
        self,
        seq_id: SeqId,
        request: Request,
        table: BlockTable,
        sort_key: SortKey,
        context_len: int,
        index: int = 0,
    ) -> None:
        num_prompt = len(request.prompt_token_ids)
        self.id = seq_id
        self.index = index
        self.request = request
        self.request_id: RequestId = request.id
        self.choice_id: ChoiceId = (request.id, index)
        self.group: Group | None = None
        self.origin: Sequence | None = None
        self.sort_key = sort_key
        self.state = State.WAITING
        self.token_ids = array("I", request.prompt_token_ids)
        self.stop_ids = request.stop_ids
        self.sampling = row_sampling(request, index)
        self.max_len = min(num_prompt + request.max_tokens, context_len)
        self.last_position = self.free_until = self.max_len - 2
        self.awaits_tokens = self.may_have_drafts = False
        self.drafted_until = -1
        self.constraint: Constraint | None = None
        scores_prompt = self.sampling.num_prompt_logprobs is not None
        self.quiet_until = -1
        self.num_prefill = num_prompt
        self.num_computed = 0
        self.num_cached = 0
        self.num_charged = 0
        self.queued_s = 0.0
        self.num_scored = 1 if scores_prompt else num_prompt
        self.prompt_scores: tuple[TokenScores, ...] = ()
        self.num_preemptions = 0
        self.resume_after: int | None = None
        self.settled_in = -1
        self.swap_id: int | None = None
        self.torn_at = -1
        self.table = table
        self.row: Row | None = None
        self.num_bound: int | None = None

    def may_advance(self) -> bool:
        """Whether its next position may be planned now; to be asked where that is behind `free_until`."""
        position = self.num_computed
        may_run_ahead = not self.awaits_tokens and position != self.drafted_until
        return position <= self.last_position and (may_run_ahead or position < len(self.token_ids))

    def await_tokens(self, *, awaits: bool = True) -> None:
        """From now on plan a position only when its token has landed; or, with False, as soon as one may be planned."""
        self.awaits_tokens = awaits
        self.free_until = -1 if awaits or self.may_have_drafts else self.last_position

    def allow_drafts(self) -> None:
        """From now on tokens may be guessed for it."""
        self.may_have_drafts, self.free_until = True, -1

    def rest_from_drafts(self, num_positions: int) -> None:
        """The next positions are planned without asking whether tokens are to be guessed behind them."""
        self.free_until = min(self.num_computed + num_positions, self.last_position)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def is_held_back(self) -> bool:
        """Whether nothing is told of it before its request ends: of a ranked choice, or a beam."""
        return self.group is not None and self.group.is_held_back

    def delta(
        self, token_id: int, reason: FinishReason | None, stop_reason: int | None, score: TokenScores | None
    ) -> SeqDelta:
        """What is told of its newest token, with the prompt's scores that have not been told."""
        prompt_scores, self.prompt_scores = self.prompt_scores, ()
        return SeqDelta(
            self.request_id,
            (token_id,),
            reason,
            stop_reason,
            self.index,
            self.num_cached,
            () if score is None else (score,),
            prompt_scores,
            queued_s=self.queued_s,
        )

    def pooled(self, vector: "array[float]") -> SeqDelta:
        """What is told of it where a vector is made of the prompt."""
        end = FinishReason.STOP
        return SeqDelta(
            self.request_id, (), end, num_cached_tokens=self.num_cached, queued_s=self.queued_s, vector=vector
        )

    def row_init(self, row: Row, num_bound: int) -> RowInit:
        """What sets its row up: the first `num_bound` blocks, and its history where sampling looks at that."""
        sampling, structure = self.sampling, self.request.structure
        if structure is not None:
            self.constraint = structure.after(self.token_ids[self.num_prompt :]).constraint()
        if sampling.controls is not None:
            output_ids = tuple(self.token_ids[self.num_prompt :])
            controls = msgspec.structs.replace(
                sampling.controls, prompt_ids=self.request.prompt_token_ids, output_ids=output_ids
            )
            sampling = msgspec.structs.replace(sampling, controls=controls)
        blocks, request = tuple(self.table.block_ids[:num_bound]), self.request
        of_input = request.second_at, request.per_token
        return RowInit(row, self.id, sampling, blocks, request.adapter, self.constraint, *of_input)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.state.value} {self.num_computed}/{len(self.token_ids)} "
            f"row={self.row} blocks={self.table.block_ids}>"
        )


class Group:
    """Sequences of one request that answer one prompt: n, best_of or beams.

    members: those that have not ended, by index. num_common: leading positions that all of them share.
    ranking, beams: who tells what comes out, where that is held back until the end; else choices stream as they come.
    """

    def __init__(self, request: Request, members: list[Sequence]) -> None:
        self.request = request
        self.members = members
        self.num_common = len(request.prompt_token_ids) - 1
        self.ranking: Ranking | None = None
        self.beams: Beams | None = None
        params = request.params
        if params.beam is not None:
            self.beams = Beams(request, members[0].max_len - members[0].num_prompt)
        elif params.num_sequences > params.n:
            self.ranking = Ranking(params.n, params.num_sequences, shows_scores=params.logprobs is not None)
        for member in members:
            member.group = self
            if self.beams is not None:
                member.await_tokens()

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
            return tuple(beams.outcome(members[0].num_cached, members[0].queued_s))
        for member, (parent, _) in zip(members, moves, strict=True):
            if parent != member.index:
                take_over(member, members[parent])
        for member, (_, token_id) in zip(members, moves, strict=True):
            member.token_ids.append(token_id)
            member.num_prefill = len(member.token_ids)
        return ()


def row_sampling(request: Request, index: int = 0) -> RowSampling:
    """What the runner needs of a request's parameters; ending tokens are banned until min_tokens are generated.

    Where the answer has a structure, bans go the way of controls, by which they are void where they leave nothing of a
    mask: it may be complete before min_tokens, and ends then.

    index: which sequence of the request it is; each has a seed of its own, and the first alone scores the prompt.
    Choices to be ranked are scored; beams are scored and not sampled. Its history comes with `Sequence.row_init`.
    """
    params = request.params
    if params.beam is not None:
        num_scores = params.beam.width + len(request.stop_ids)
        return RowSampling(NEUTRAL._replace(seed=request.seed), num_logprobs=num_scores)
    is_ranked = params.num_sequences > params.n
    banned_ids = tuple(sorted(request.stop_ids)) if params.min_tokens else ()
    is_masked = request.structure is not None
    controls = RowControls(
        penalties=PenaltyColumns(*(getattr(params, name) for name in PenaltyColumns._fields)),
        logit_bias=params.logit_bias,
        allowed_ids=params.allowed_token_ids or (),
        bad_words=request.bad_word_ids,
    )
    columns = SamplingColumns[float](*(getattr(params, name) for name in SamplingColumns._fields))
    return RowSampling(
        columns._replace(
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=max(params.top_k, 0),
            seed=(request.seed + index + 2**63) % 2**64 - 2**63,  # int64, which wraps
        ),
        banned_ids=banned_ids,
        banned_before=len(request.prompt_token_ids) + params.min_tokens if banned_ids else 0,
        num_logprobs=0 if is_ranked and params.logprobs is None else params.logprobs,
        named_ids=params.logprob_token_ids,
        num_prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        controls=None if controls == _NO_CONTROLS and not (is_masked and banned_ids) else controls,
    )
