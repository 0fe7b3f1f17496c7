"""The scheduler: add, cancel, finish; plan, commit, fail. Orchestration only: what is decided, its neighbours decide.

There is no prefill phase and no decode phase. Each step hands out a budget of tokens: first to those who run, oldest
first, then to newcomers. A plan advances `num_computed` at once, and the next plan may be made before it has landed:

    plan 1   plan 2   commit 1   plan 3   commit 2 ...        at most two steps are in flight when `plan` returns

Blocks and rows that are given back are reused by the next plan, while steps in flight may still read and write them:
steps run in the order of their plans, so whoever gets them writes after that (I6).

Invariants, besides those of the block pool and the paged cache:
  I11 a sequence that ends or is preempted gives back all that it held, once; unknown ids are no-ops;
  I12 when no request is left, no block is held and no row is taken;
  I13 a plan stays within the token budget and max_num_seqs, and there is one whenever anything could run;
  I14 who comes first is admitted first;  I16 who came last is preempted first;
  I17 what can never fit is refused by `add`;
  I18 a running sequence has computed less than it has tokens, those in flight included;
  I19 a sequence ends once, and nothing of it comes out afterwards.
"""

from collections import deque

from aserve.core.errors import InvalidRequestError
from aserve.core.ids import BlockId, RequestId, Row, SeqId
from aserve.core.outputs import SeqDelta
from aserve.core.plan import RowInit, SeqSlice, StepPlan, StepResult
from aserve.core.request import Request
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.admission import Admission
from aserve.scheduler.preemption import choose_victim, send_back
from aserve.scheduler.queue import SequenceQueue, first_come_first_served
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.states import State, move
from aserve.scheduler.statistics import Statistics
from aserve.scheduler.stopping import reason_to_stop

__all__ = ["MAX_IN_FLIGHT", "Scheduler", "Statistics"]

MAX_IN_FLIGHT = 2
"""Steps that are planned and have not landed: one on the device and one behind it."""


class Scheduler:
    """Owns every sequence, the block bookkeeping and the rows. Deterministic: equal calls give equal plans.

    block_size: positions in a block. num_blocks: all blocks, the null block included.
    max_num_seqs: sequences that run at once, and rows. max_num_batched_tokens: tokens that a step computes at most.
    max_model_len: tokens of a sequence, prompt and answer together.
    watermark: share of the blocks that newcomers leave free for those who run, in [0, 1).
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        watermark: float = 0.01,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._cache = PagedCache(
            num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching
        )
        self._admission = Admission(self._cache, max_model_len=max_model_len, watermark=watermark)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting = SequenceQueue()
        self._running = SequenceQueue()
        self._sequences: dict[SeqId, Sequence] = {}
        self._seq_ids: dict[RequestId, SeqId] = {}
        self._free_rows = [Row(row) for row in reversed(range(max_num_seqs))]
        self._in_flight: deque[StepPlan] = deque()
        self._next_seq_id = 0
        self._next_step_id = 0
        self._num_preemptions = 0
        self._num_admitted = 0
        self._queue_time_s = 0.0

    # Requests come and go.

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raise `ContextLengthError`, with both numbers, for a prompt that `add` would refuse."""
        self._admission.check_fits(num_prompt_tokens)

    def add(self, request: Request) -> None:
        """Queue a request. Raises as `check_fits`, and `InvalidRequestError` while another has the same id."""
        assert request.max_tokens >= 1, f"request {request.id} asks for {request.max_tokens} tokens"
        self.check_fits(len(request.prompt_token_ids))
        if request.id in self._seq_ids:
            raise InvalidRequestError(f"request id {request.id!r} is in use", "request_id")
        seq_id = SeqId(self._next_seq_id)
        self._next_seq_id += 1
        sequence = Sequence(
            seq_id,
            request,
            self._cache.new_table(request.cache_salt),
            first_come_first_served(request, seq_id),
            self._admission.context_len,
        )
        self._sequences[seq_id] = sequence
        self._seq_ids[request.id] = seq_id
        self._waiting.add(sequence)

    def cancel(self, request_id: RequestId) -> None:
        """Nobody wants the rest: give everything back now. Idempotent; an unknown id is a no-op (I11)."""
        seq_id = self._seq_ids.get(request_id)
        if seq_id is not None:
            self._end(self._sequences[seq_id])

    def finish(self, request_id: RequestId) -> None:
        """The loop found the end in the text (a stop string). Later tokens are dropped, as with `cancel`."""
        self.cancel(request_id)

    # One step: plan, then commit or fail.

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run before a step in flight has landed, or at all.

        now: seconds of the clock that `Request.arrival_s` was read from.
        """
        assert len(self._in_flight) < MAX_IN_FLIGHT, "plan follows a commit"
        num_preemptions = self._num_preemptions
        slices: list[SeqSlice] = []
        budget = self._plan_running(slices)
        inits: list[RowInit] = []
        if self._waiting and num_preemptions == self._num_preemptions:
            self._plan_admissions(now, budget, slices, inits)
        assert slices or self._in_flight or not self._sequences, "I13: requests wait and nothing runs"
        if not slices:
            return None
        plan = StepPlan(self._next_step_id, tuple(slices), tuple(inits))
        self._next_step_id += 1
        self._in_flight.append(plan)
        return plan

    def commit(self, result: StepResult) -> tuple[SeqDelta, ...]:
        """Take in the oldest step in flight: append its tokens, seal what has filled up, end what has ended.

        A slice of a sequence that has ended meanwhile is ignored (I19); that of a preempted one still yields its token.
        """
        plan = self._in_flight.popleft()
        assert plan.step_id == result.step_id, f"step {result.step_id} landed before step {plan.step_id}"
        sampled = iter(result.token_ids)
        sequences = self._sequences
        deltas: list[SeqDelta] = []
        for piece in plan.slices:
            token_id = next(sampled) if piece.samples else None
            sequence = sequences.get(piece.seq_id)
            if sequence is None:
                continue
            num_landed = piece.start + piece.num_tokens
            if num_landed >= sequence.table.seal_at:  # never true of a preempted sequence: it has no blocks
                self._cache.seal(sequence.table, sequence.token_ids, num_landed)
            if token_id is None:
                continue
            sequence.token_ids.append(token_id)
            if token_id in sequence.stop_ids or num_landed > sequence.last_position:
                deltas.append(self._stop(sequence, token_id))
            else:
                deltas.append(SeqDelta(sequence.request_id, (token_id,), None, None, 0, sequence.num_cached))
        return tuple(deltas)

    def fail(self, step_id: int) -> tuple[RequestId, ...]:
        """The step raised. Drop it and those planned on top of it; end every request with a slice in them.

        Returns the requests, which get no more output. Nothing that those steps computed was sealed (I6).
        """
        failed: list[RequestId] = []
        while self._in_flight and self._in_flight[-1].step_id >= step_id:
            plan = self._in_flight.pop()
            for piece in plan.slices:
                sequence = self._sequences.get(piece.seq_id)
                if sequence is not None:
                    self._end(sequence)
                    failed.append(sequence.request_id)
        return tuple(failed)

    # What is going on.

    def statistics(self) -> Statistics:
        """A snapshot."""
        cache = self._cache.statistics()
        return Statistics(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_in_flight=len(self._in_flight),
            num_blocks=self._cache.num_blocks,
            num_used_blocks=cache.num_used,
            num_free_blocks=cache.num_free,
            num_preemptions=self._num_preemptions,
            num_admitted=self._num_admitted,
            queue_time_s=self._queue_time_s,
            num_cache_queries=cache.num_queried_tokens,
            num_cache_hits=cache.num_hit_tokens,
            num_cache_evictions=cache.num_evictions,
        )

    def check(self) -> None:
        """Assert every invariant, by number. For tests: the cost is that of the whole pool."""
        self._cache.check(sequence.table for sequence in self._running)
        self._waiting.check()
        self._running.check()
        assert len(self._running) <= self._max_num_seqs, "I13: too many run"
        assert set(self._sequences.values()) == {*self._waiting, *self._running}, "I19: a sequence is lost or undead"
        assert list(self._seq_ids.values()) == list(self._sequences), "I19: a request is lost or undead"
        rows = [sequence.row for sequence in self._running] + list(self._free_rows)
        assert sorted(row for row in rows if row is not None) == list(range(self._max_num_seqs)), "I12: rows"
        for sequence in self._waiting:
            assert sequence.state is State.WAITING, f"I14: {sequence!r}"
            assert sequence.row is None, f"I11: {sequence!r}"
            assert not sequence.table.block_ids, f"I11: {sequence!r}"
        for sequence in self._running:
            self._check_running(sequence)
        for plan in self._in_flight:
            assert 0 < plan.num_tokens <= self._max_num_batched_tokens, f"I13: a step of {plan.num_tokens} tokens"

    def _check_running(self, sequence: Sequence) -> None:
        assert sequence.state is State.RUNNING, f"I14: {sequence!r}"
        flying = [piece for plan in self._in_flight for piece in plan.slices if piece.seq_id == sequence.id]
        num_tokens = len(sequence.token_ids) + sum(piece.samples for piece in flying)
        assert sequence.num_computed < num_tokens <= sequence.max_len, f"I18: {sequence!r}"
        assert sequence.max_len <= self._admission.context_len, f"I17: {sequence!r}"
        assert sequence.num_computed <= sequence.table.capacity, f"I18: {sequence!r} has no block to write to"
        num_landed = flying[0].start if flying else sequence.num_computed
        assert sequence.table.num_sealed * self._cache.block_size <= num_landed, f"I6: {sequence!r} sealed too early"

    # Parts of plan.

    def _plan_running(self, slices: list[SeqSlice]) -> int:
        """Append a slice for each running sequence with something to compute; returns what is left of the budget."""
        budget = self._max_num_batched_tokens
        for sequence in self._running:  # preemption removes from the far end only
            start = sequence.num_computed
            if start > sequence.last_position:
                continue  # all is planned: its last token is on its way
            if not budget:
                break
            if start < sequence.num_prefill:
                budget -= self._plan_prefill(sequence, budget, (), slices)
                continue
            new_blocks: tuple[BlockId, ...] | None = ()
            if start >= sequence.table.capacity:
                new_blocks = self._make_room(sequence)
                if new_blocks is None:
                    break  # it was the last itself
            # Hundreds of these are made each step: positional, and without a look at the row, which all who run have.
            slices.append(SeqSlice(sequence.id, sequence.row, start, 1, (), new_blocks, True))  # type: ignore[arg-type]
            sequence.num_computed = start + 1
            budget -= 1
        return budget

    def _plan_prefill(
        self, sequence: Sequence, budget: int, new_blocks: tuple[BlockId, ...], slices: list[SeqSlice]
    ) -> int:
        """Append the next chunk of a sequence's known tokens; returns its size."""
        assert sequence.row is not None, f"{sequence!r} has no row"
        start = sequence.num_computed
        end = min(start + budget, sequence.num_prefill)
        slices.append(
            SeqSlice(
                seq_id=sequence.id,
                row=sequence.row,
                start=start,
                num_tokens=end - start,
                token_ids=tuple(sequence.token_ids[start:end]),
                new_blocks=new_blocks,
                samples=end == sequence.num_prefill,
            )
        )
        sequence.num_computed = end
        return end - start

    def _make_room(self, sequence: Sequence) -> tuple[BlockId, ...] | None:
        """A block for one more position, at the cost of whoever came last. None if that is the sequence itself."""
        while (new_blocks := self._cache.reserve(sequence.table, sequence.num_computed + 1)) is None:
            victim = choose_victim(self._running, sequence)
            self._vacate(victim)
            send_back(victim, self._in_flight[-1].step_id if self._in_flight else None)
            self._waiting.add(victim)
            self._num_preemptions += 1
            if victim is sequence:
                return None
        return new_blocks

    def _plan_admissions(self, now: float, budget: int, slices: list[SeqSlice], inits: list[RowInit]) -> None:
        """Start waiting sequences in order, until one cannot (I14), with what is left of the budget."""
        while budget and self._waiting and self._free_rows:
            sequence = self._waiting.first
            if self._may_be_flying(sequence):
                return
            hits = self._admission.admit(sequence, others_run=len(self._running) > 0)
            if hits is None:
                return
            self._waiting.remove(sequence)
            self._running.add(sequence)
            sequence.state = move(sequence.state, State.RUNNING)
            sequence.row = self._free_rows.pop()
            if sequence.num_preemptions == 0:
                self._num_admitted += 1
                self._queue_time_s += now - sequence.request.arrival_s
            inits.append(RowInit(sequence.row, sequence.id, sequence.sampling, hits))
            budget -= self._plan_prefill(sequence, budget, tuple(sequence.table.block_ids[len(hits) :]), slices)

    def _may_be_flying(self, sequence: Sequence) -> bool:
        """Whether a step that a preempted sequence had a part in may not have landed yet."""
        after = sequence.resume_after
        return after is not None and bool(self._in_flight) and self._in_flight[0].step_id <= after

    # Ends.

    def _stop(self, sequence: Sequence, token_id: int) -> SeqDelta:
        reason, stop_reason = reason_to_stop(sequence, token_id)
        self._end(sequence)
        return SeqDelta(
            request_id=sequence.request_id,
            token_ids=(token_id,),
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=sequence.num_cached,
        )

    def _end(self, sequence: Sequence) -> None:
        """Forget a sequence and take back all that it holds (I11)."""
        if sequence.state is State.RUNNING:
            self._vacate(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = move(sequence.state, State.FINISHED)
        del self._sequences[sequence.id]
        del self._seq_ids[sequence.request_id]

    def _vacate(self, sequence: Sequence) -> None:
        """Take back the row and the blocks of a running sequence."""
        assert sequence.row is not None, f"I11: {sequence!r} has no row"
        self._running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = None
        self._cache.free(sequence.table)
