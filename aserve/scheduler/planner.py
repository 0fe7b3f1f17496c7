"""Planner: hands out a step's budget of tokens, first to those who run, oldest first, then to newcomers.

Makes the slices of a plan and moves `num_computed` on. Knows no request and no result.
"""

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Several

import msgspec

from aserve.core.ids import BlockId, RequestId, SeqId
from aserve.core.layout import STRETCH
from aserve.core.plan import RowInit, SeqSlice, StepPlan
from aserve.core.speculation import MAX_STEP_DRAFTS
from aserve.scheduler.admission import Admission, Pace, awaits_source
from aserve.scheduler.drafting import Drafter
from aserve.scheduler.preemption import choose_victims
from aserve.scheduler.residents import Residents, is_flying
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.states import Hold, State
from aserve.scheduler.step_cost import Allowance, StreamPace
from aserve.scheduler.undo import StepBudget


class Planner:
    """budget: of a step, in tokens. max_chunk: known tokens of one sequence that a step computes at most.

    A chunk that may fill a step may be somewhat longer if it is then its prompt's last; see `STRETCH`.
    """

    def __init__(
        self,
        residents: Residents,
        admission: Admission,
        pace: Pace,
        streams: StreamPace,
        drafter: Drafter,
        budget: StepBudget,
        *,
        max_chunk: int,
    ) -> None:
        self._residents = residents
        self._admission = admission
        self._pace = pace
        self._drafter = drafter
        self._budget = budget
        self._streams = streams
        self._max_chunk = max_chunk
        self._may_stretch = max_chunk == budget.most
        self._settling: set[SeqId] = set()
        self._draft = _Draft(MAX_STEP_DRAFTS)
        self._counts_steps = pace.delays or residents.waiting.takes_turns
        self.num_tokens = 0
        """Of the plan made last."""
        self.leaves_waiting = False
        """Whether somebody waits whom that plan did not admit."""
        self.last_long_id = -1
        """The newest step with more than one token of a sequence: of its prompt, or drafts."""
        self.next_look_id = 0
        """The first step of which it is to be looked at what it took: at the latest the next that is long."""
        self.hold: Hold | None = None
        """Why the plan made last did not admit the first of those who wait, where it left somebody waiting."""
        self.at: Sequence | None = None
        """For whom the plan in progress is taking blocks; after one that raised, at whom that was."""

    def plan(
        self,
        now: float,
        step_id: int,
        in_flight: Several[StepPlan],
        only: Collection[RequestId] | None = None,
    ) -> StepPlan | None:
        """The next step, or None if nothing can run. A step that preempts admits nobody.

        in_flight: those that have not landed, oldest first; `step_id - 1`, if still among them, is the newest.
        only: the requests that may run; None lets all.
        """
        residents = self._residents
        num_preemptions = residents.num_preemptions
        slices: list[SeqSlice] = []
        self.leaves_waiting = False
        draft = self._fresh_draft(now) if self._draft.is_used or self._counts_steps else self._draft
        draft.step_id, draft.slices = step_id, slices
        budget = self._budget.num_tokens
        no_blocks: tuple[BlockId, ...] = ()
        running = residents.running if only is None else _only_running(residents.running, only)
        for sequence in running:  # preemption removes from the far end only
            start = sequence.num_computed
            if not budget:
                break
            if start > sequence.free_until and (num_tokens := self._not_free(sequence, budget, draft)) is not None:
                budget -= num_tokens
                continue
            if start < sequence.num_prefill:
                self.at = sequence
                budget -= min(budget, self._next_chunk(sequence, budget, draft))
                continue
            new_blocks: tuple[BlockId, ...] | None = no_blocks
            if start >= sequence.table.capacity:
                self.at = sequence
                new_blocks = residents.make_room(sequence, start + 1, step_id - 1)
                if new_blocks is None:
                    break  # it was the last itself
            # Hundreds of these are made each step: positional, and without a look at the row, which all who run have.
            slices.append(SeqSlice(sequence.id, sequence.row, start, 1, (), new_blocks, 1))  # type: ignore[arg-type]
            sequence.num_computed = start + 1
            budget -= 1
        if residents.waiting or residents.swapped:
            budget = budget if num_preemptions == residents.num_preemptions else 0
            self._newcomers(now, budget, draft, in_flight[0].step_id if in_flight else None, only)
        if not slices and (in_flight or only is not None or not self._unblock(now, draft)):
            self.at = None
            return None
        self.at = None
        self.num_tokens = draft.num_more + len(slices)
        moves = residents.copies or residents.scrubs or residents.has_host_memory
        block_ops = residents.take_block_ops() if moves else None
        drafting = self._drafter.steps(step_id, slices) if self._drafter.makes_steps else ()
        return StepPlan(step_id, tuple(slices), draft.inits, block_ops, drafting)

    def _fresh_draft(self, now: float) -> "_Draft":
        """A plan in which nobody is yet, in place of one that was not of single tokens alone."""
        self._draft = _Draft(MAX_STEP_DRAFTS)
        self._settling.clear()
        self._pace.next_step(now)
        self._residents.waiting.next_step(now)
        return self._draft

    def _not_free(self, sequence: Sequence, budget: int, draft: "_Draft") -> int | None:
        """Plan a sequence that may have to wait, or may have drafts; returns the number of tokens, 0 if it waits.

        None, and nothing is planned, where it goes on as any other does.
        """
        start = sequence.num_computed
        if not sequence.may_advance():
            return 0
        if not sequence.may_have_drafts or sequence.awaits_tokens or start < sequence.num_prefill:
            return None  # what is sampled next may depend on the token that it awaits, by more than the model
        most = min(budget - 1, self._max_chunk - 1, sequence.last_position - start, draft.num_drafts_left)
        draft_ids = self._drafter.drafts_for(sequence, most, len(self._residents.running))
        if draft_ids is None:
            return 0
        return self._with_drafts(sequence, draft_ids, draft) if draft_ids else None

    def _with_drafts(self, sequence: Sequence, draft_ids: tuple[int, ...], draft: "_Draft") -> int:
        """Append a slice of a sequence's newest token and as many drafts as free blocks allow; returns its tokens.

        For the token others may have to give way, for drafts nobody has. 0 if that was the sequence itself.
        """
        self.at = sequence
        assert sequence.row is not None, f"{sequence!r} has no row"
        start, num_held = sequence.num_computed, len(sequence.table.block_ids)
        self._residents.make_room(sequence, start + 1, draft.step_id - 1)
        if sequence.state is not State.RUNNING:
            return 0
        end = self._residents.extend(sequence, start + 1 + len(draft_ids))
        token_ids = (sequence.token_ids[start], *draft_ids[: end - start - 1])
        new_blocks = tuple(sequence.table.block_ids[num_held:])
        num_tokens = end - start
        draft.slices.append(
            SeqSlice(sequence.id, sequence.row, start, num_tokens, token_ids, new_blocks, num_samples=num_tokens)
        )
        sequence.num_computed = sequence.drafted_until = end
        draft.num_drafts_left -= num_tokens - 1
        self._is_long(draft, num_tokens - 1)
        return num_tokens

    def _is_long(self, draft: "_Draft", num_more: int) -> None:
        """The step has a slice of so many tokens more than one."""
        draft.is_used = True
        draft.num_more += num_more
        self.last_long_id = draft.step_id
        self.next_look_id = min(self.next_look_id, draft.step_id)

    def _unblock(self, now: float, draft: "_Draft") -> bool:
        """If all who run wait for one that cannot come, make room for it. Whether anything can run now."""
        while not draft.slices and self._residents.running:
            self._residents.preempt(choose_victims(self._residents.running, None), None, may_swap=False)
            self._residents.waiting.next_step(now)
            self._newcomers(now, self._budget.num_tokens, draft, None)
        return bool(draft.slices)

    def _next_chunk(self, sequence: Sequence, budget: int, draft: "_Draft") -> int:
        """Plan the next known tokens of a running sequence, as `_known`, and return their number.

        0 if they have to wait, or if the blocks for them were only to be had by preempting the sequence itself. Blocks
        are lacking with sliding windows alone: other tables hold their whole prompt from admission on.
        """
        num_tokens = self._chunk_len(sequence, budget, draft)
        if not num_tokens:
            return 0
        end = sequence.num_computed + num_tokens
        new_blocks: tuple[BlockId, ...] | None = ()
        if end > sequence.table.capacity:
            new_blocks = self._residents.make_room(sequence, end, draft.step_id - 1)
        return 0 if new_blocks is None else self._known(sequence, end, new_blocks, draft)

    def _chunk_len(self, sequence: Sequence, budget: int, draft: "_Draft") -> int:
        """How many of a sequence's known tokens are next: 0 if no more may be computed beside those who decode."""
        num_left = sequence.num_prefill - sequence.num_computed
        most = min(budget, self._max_chunk)
        if self._may_stretch and num_left <= most + most // STRETCH:
            most = num_left
        most = min(most, num_left)
        for allowance in (self._allowance(draft), self._residents.waiting.allowance(sequence)):
            if allowance is not None:
                most = allowance.take(sequence.num_computed, most)
        return most

    def _allowance(self, draft: "_Draft") -> Allowance | None:
        """Of the step, for prompts; worked out when the first of them is about to be planned."""
        if not draft.knows_allowance:
            draft.is_used = draft.knows_allowance = True
            running = self._residents.running
            decoding = [sequence for sequence in running if sequence.num_prefill <= sequence.num_computed]
            num_newcomers = len(running) - len(decoding) + self._residents.num_next_up
            draft.allowance = self._streams.allowance(decoding, num_newcomers)
        return draft.allowance

    def _known(self, sequence: Sequence, end: int, new_blocks: tuple[BlockId, ...], draft: "_Draft") -> int:
        """Append a sequence's known tokens up to `end`, and its RowInit if it needs one; returns their number."""
        assert sequence.row is not None, f"{sequence!r} has no row"
        if sequence.num_bound is not None:
            draft.inits += (sequence.row_init(sequence.row, sequence.num_bound),)
            new_blocks = tuple(sequence.table.block_ids[sequence.num_bound :])
            sequence.num_bound = None
        self._settling.add(sequence.id)
        start = sequence.num_computed
        self._is_long(draft, end - start - 1)
        num_targets = min(end, sequence.num_prompt - 1) if sequence.num_scored < sequence.num_prompt else 0
        draft.slices.append(
            SeqSlice(
                seq_id=sequence.id,
                row=sequence.row,
                start=start,
                num_tokens=end - start,
                token_ids=tuple(sequence.token_ids[start:end]),
                new_blocks=new_blocks,
                num_samples=int(end == sequence.num_prefill),
                target_ids=tuple(sequence.token_ids[start + 1 : num_targets + 1]),
            )
        )
        sequence.num_computed = end
        return end - start

    def _newcomers(
        self,
        now: float,
        budget: int,
        draft: "_Draft",
        oldest_flying: int | None,
        only: Collection[RequestId] | None = None,
    ) -> None:
        """With what is left of the budget, bring back who was swapped out, then admit in order, until one cannot (I14).

        Nobody is admitted while somebody is swapped out, unless it is on trial.
        """
        residents = self._residents
        self.leaves_waiting = True
        while budget and residents.swapped and only is None:
            self.at = residents.swapped.first
            returned = residents.bring_back(oldest_flying)
            if not returned and residents.swapped:
                self.hold = Hold.SWAPPED
                return
            for sequence in returned:
                if budget:
                    budget -= min(budget, self._first_chunk(sequence, budget, draft))
        residents.settle()
        hold = None
        while budget and (newcomer := residents.next_up(only)) is not None:
            if (hold := self._admit(now, newcomer, draft, oldest_flying)) is not None:
                break
            self._admission.count(newcomer, now)
            budget -= min(budget, self._first_chunk(newcomer, budget, draft))
            self._pace.admitted()
        self.leaves_waiting = bool(residents.waiting)
        if self.leaves_waiting:
            self.hold = hold or (residents.why_nobody if budget else Hold.BUDGET)

    def _admit(self, now: float, newcomer: Sequence, draft: "_Draft", oldest_flying: int | None) -> Hold | None:
        """Let a newcomer run; or why it cannot."""
        if is_flying(newcomer, oldest_flying):
            return Hold.FLIGHT
        if draft.slices and not self._pace.allows(now, newcomer.request.arrival_s):
            return Hold.PACE
        if (allowance := self._allowance(draft)) is not None and allowance.is_spent:
            return Hold.STREAMS
        self.at = newcomer
        if self._residents.admit(newcomer, self._settling):
            return None
        return Hold.SIBLING if awaits_source(newcomer, self._settling) else Hold.MEMORY

    def _first_chunk(self, sequence: Sequence, budget: int, draft: "_Draft") -> int:
        """Plan the first known tokens of a sequence that was just admitted, as `_known`, and return their number.

        It computes as many as free blocks allow, and preempts nobody; admission has left room for one at least.
        """
        sequence.settled_in = draft.step_id
        num_tokens = max(1, self._chunk_len(sequence, budget, draft))
        end = self._residents.extend(sequence, sequence.num_computed + num_tokens)
        return self._known(sequence, end, (), draft)


class _Draft(msgspec.Struct, gc=False):
    """What a plan will be made of. Where that was slices of one token alone, the next plan is made in the same one.

    num_more: its tokens, but for the first of each slice.
    """

    num_drafts_left: int
    step_id: int = -1
    slices: list[SeqSlice] = []
    is_used: bool = False
    inits: tuple[RowInit, ...] = ()
    num_more: int = 0
    allowance: Allowance | None = None
    knows_allowance: bool = False


def _only_running(running: Several[Sequence], only: Collection[RequestId]) -> Iterator[Sequence]:
    """Those of these requests that still run when it is their turn."""
    for sequence in tuple(running):
        if sequence.request_id in only and sequence.state is State.RUNNING:
            yield sequence
