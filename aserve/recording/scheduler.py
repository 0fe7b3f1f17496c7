"""RecordedScheduler: a Scheduler that tells what it was asked, what it planned and what came of it.

Its decisions are those of a Scheduler. So nothing is paid where nothing is recorded, and nobody else knows of it: which
of the two there is, is chosen where an engine is built.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from aserve.core.faults import WISHES
from aserve.core.ids import RequestId, SeqId
from aserve.core.outputs import StepTokens
from aserve.core.plan import StepPlan, StepResult
from aserve.core.ports import Clock
from aserve.core.request import Request
from aserve.recording.plans import NOBODY, Owner, Told
from aserve.recording.records import Arrived, CacheForgotten, Ended, TakenBack
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.undo import Restart


class RecordedScheduler(Scheduler):
    """tell: takes what happened. clock: the engine's. numbers: those of a Scheduler.

    give_up: is called where something cannot be told, with the reason: a recording that misses something is none.
    scores_all: each sampled token has its logprob recorded, for which rows are scored that nobody asked to; the
    scheduler itself does not see that.
    """

    def __init__(
        self,
        tell: Callable[[Told], None],
        give_up: Callable[[BaseException], None],
        *,
        clock: Clock = time.monotonic,
        scores_all: bool = False,
        **numbers: Any,
    ) -> None:
        super().__init__(**numbers)
        self._tell = tell
        self._give_up = give_up
        self._clock = clock
        self._scores_all = scores_all
        self._scored_for_us: set[SeqId] = set()

    # Requests come and go.

    def _add(self, request: Request, origin: Sequence | None) -> None:
        super()._add(request, origin)
        self._hand_over(self._arrived, request, origin)

    def _end(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.token_ids) - sequence.num_prompt
        chain = tuple(sequence.table.hashes[1:])
        super()._end(sequence)
        ended = sequence.request_id, sequence.index, num_tokens, sequence.num_cached, chain
        self._hand_over(self._ended, sequence.id, *ended)

    def reset_prefix_cache(self) -> int:
        """As a Scheduler's."""
        num_forgotten = super().reset_prefix_cache()
        self._hand_over(self._forgotten)
        return num_forgotten

    def _forgotten(self) -> CacheForgotten:
        return CacheForgotten(self._clock())

    def _arrived(self, request: Request, origin: Sequence | None) -> Arrived:
        params = request.params
        return Arrived(
            at_s=self._clock(),
            request_id=request.id,
            arrival_s=request.arrival_s,
            num_prompt=len(request.prompt_token_ids),
            num_sequences=params.num_sequences if params.beam is None else params.beam.width,
            max_tokens=request.max_tokens,
            priority=request.priority,
            tenant=request.tenant,
            weight=request.weight,
            adapter=request.adapter,
            is_beam=params.beam is not None,
            scores_prompt=params.prompt_logprobs is not None,
            branch_of=None if origin is None else origin.request_id,
        )

    def _ended(self, seq_id: SeqId, *ended: Any) -> Ended:
        self._scored_for_us.discard(seq_id)
        return Ended(self._clock(), *ended)

    def _hand_over(self, make: Callable[..., Told], *arguments: Any) -> None:
        """Tell what is made of these. No answer depends on it."""
        try:
            self._tell(make(*arguments))
        except WISHES:
            raise
        except BaseException as error:
            self._give_up(error)

    # Steps.

    def plan(self, now: float) -> StepPlan | None:
        """As a Scheduler's; with `scores_all`, with scores of rows that have none."""
        plan = super().plan(now)
        if plan is not None:
            try:
                if self._scores_all and plan.inits:
                    plan = self._scored(plan)
                inits = plan.inits
                self._tell((now, plan, tuple([self._owner(init.seq_id) for init in inits]) if inits else ()))
            except WISHES:
                raise
            except BaseException as error:
                self._give_up(error)
        return plan

    def commit(self, result: StepResult, took_s: float = 0.0) -> StepTokens:
        """As a Scheduler's."""
        asked = self._as_asked(result) if self._scored_for_us and result.scores else result
        try:
            self._tell((self._clock(), result, took_s, self._scores_all))
        except WISHES:
            raise
        except BaseException as error:
            self._give_up(error)
        return super().commit(asked, took_s)

    def revert(self, step_id: int, *, out_of_memory: bool = False) -> RequestId | None:
        """As a Scheduler's."""
        self._hand_over(self._taken_back, False)
        return super().revert(step_id, out_of_memory=out_of_memory)

    def restart(self, wanted: Any) -> Restart:
        """As a Scheduler's."""
        self._hand_over(self._taken_back, True)
        return super().restart(wanted)

    def _owner(self, seq_id: SeqId) -> Owner:
        sequence = self._roster.sequences.get(seq_id)
        return NOBODY if sequence is None else (sequence.request_id, sequence.index, sequence.num_prompt)

    def _taken_back(self, was_torn: bool) -> TakenBack:
        return TakenBack(self._clock(), tuple(plan.step_id for plan in self._in_flight), was_torn)

    # Scores that are for the recording alone.

    def _scored(self, plan: StepPlan) -> StepPlan:
        inits = []
        for init in plan.inits:
            if init.sampling.num_logprobs is None:
                self._scored_for_us.add(init.seq_id)
                init = msgspec.structs.replace(init, sampling=msgspec.structs.replace(init.sampling, num_logprobs=0))
            inits.append(init)
        return msgspec.structs.replace(plan, inits=tuple(inits))

    def _as_asked(self, result: StepResult) -> StepResult:
        """Without the scores that nobody asked for. A sequence that has ended meanwhile is asked for by nobody."""
        sampling = [piece for piece in self._in_flight[0].slices if piece.num_samples]
        accepted = result.num_accepted or (0,) * len(sampling)
        owners = [piece.seq_id for piece, num in zip(sampling, accepted, strict=True) for _ in range(num + 1)]
        ours, sequences = self._scored_for_us, self._roster.sequences
        scores = tuple(
            score if owner in sequences and owner not in ours else None
            for owner, score in zip(owners, result.scores, strict=True)
        )
        return msgspec.structs.replace(result, scores=scores if any(scores) else ())
