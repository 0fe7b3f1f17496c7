"""The scheduler: add, fork, cancel, finish; plan, commit, revert, restart. Orchestration only: its neighbours decide.

There is no prefill phase and no decode phase. Each step hands out a budget of tokens: first to those who run, oldest
first, then to newcomers. A plan advances `num_computed` at once, and the next plan may be made before it has landed:

    plan 1   plan 2   commit 1   plan 3   commit 2 ...      at most `max_in_flight` have not landed when `plan` returns

Blocks and rows that are given back are reused by the next plan, while steps in flight may still read and write them:
steps run in the order of their plans, so whoever gets them writes after that (I6).

A sequence is one choice of a request, and choices of one request are a group (sequence.py). Who is there is known to
roster.py, which choices are told to held_back.py and beam.py, who holds rows and blocks to residents.py, who computes
what next to planner.py, what a step has brought to landing.py.

Invariants, besides those of the block pool and the paged cache:
  I6  a block is found and read by steps that run after the one that writes it, and sealed when that has landed;
  I7  no more adapters run or are swapped out than max_loras;
  I11 a sequence that ends or is preempted gives back all that it held, once; unknown ids are no-ops;
  I12 when no request is left, no block is held and no row is taken;
  I13 a plan stays within the token budget and max_num_seqs, and there is one whenever anything could run;
  I14 who comes first, of its tenant where tenants share, is admitted first;  I16 who came last is preempted first;
  I15 an admitted request ends after a number of steps bounded by its tokens and those before it;
  I17 what can never fit is refused by `add`;
  I18 a running sequence has a token at its next position, landed or in flight; a beam that waits for others has none;
  I19 a sequence ends once, and nothing of it comes out afterwards;
  I21 every answer is what its request gets alone: requests, and choices of one, share blocks and nothing else;
  I22 behind where a step has landed nothing is sealed, hashed or counted: a rejected draft leaves nothing behind.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Several
from functools import partial
from itertools import chain
from math import inf

from aserve.core.errors import AserveError, ConstraintError, NonFiniteLogitsError
from aserve.core.graph_sizes import GraphSizes
from aserve.core.ids import BlockHash, RequestId, SeqId
from aserve.core.layout import Window, stretched
from aserve.core.outputs import SeqDelta, StepTokens
from aserve.core.plan import StepPlan, StepResult
from aserve.core.ports import Proposer
from aserve.core.request import Request
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.admission import Admission, Pace
from aserve.scheduler.checks import check_running, check_sequences
from aserve.scheduler.deadlines import Deadlines, Expired, best_so_far, expire
from aserve.scheduler.drafting import Drafter
from aserve.scheduler.fairness import FairQueue
from aserve.scheduler.landing import Landing
from aserve.scheduler.planner import Planner
from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.queue import Arrival, Policy, WaitingQueue, first_come_first_served
from aserve.scheduler.readings import Readings
from aserve.scheduler.residents import Residents
from aserve.scheduler.roster import Roster
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.statistics import Statistics, StepSizes, snapshot
from aserve.scheduler.step_cost import AUTO_FACTOR, DECODES_PER_LOOK, LEARN_EVERY_S, StepCost, StreamPace
from aserve.scheduler.undo import Aftermath, Restart


class Scheduler:
    """Owns every sequence, the block bookkeeping and the rows. Deterministic: equal calls give equal plans.

    step_cost: what steps take, learned from those of which `commit` was told. max_in_flight, while it runs: 1 while it
    is being found out who makes steps fail. next_deadline_s: before that `expire` finds nobody, on the clock of
    `Request.deadline_s`; infinity if no request has one. Of the constructor:

    block_size: positions in a block. num_blocks: all blocks, the null block included.
    max_num_seqs: sequences that run at once, and rows. max_num_batched_tokens: tokens that a step computes at most.
    max_model_len: tokens of a sequence, prompt and answer together.
    watermark: share of the blocks that newcomers leave free for those who run, in [0, 1).
    num_host_blocks: of the swap space. preemption: how sequences give way.
    policy: the order in which requests run. long_prefill_token_threshold: known tokens of one sequence that a step
    computes at most; 0 is without limit. scheduler_delay_factor: see `Pace`. max_num_queued_reqs: requests that wait
    at most. windows: of each layer group. keeps_evicted: the swap space is a host tier of the prefix cache too.
    max_in_flight: steps planned and not landed, at most; not over 2 with windows, whose blocks are counted for two.
    is_fair: tenants share by weight, see fairness.py; the policy orders the requests of each. target_itl_s: what a step
    may take in which somebody decodes, itl_factor: how much longer than without prompts, where that is None;
    graph_sizes: of the steps with prompts that are graphs; see `StreamPace` of all three. plans_behind_prompts:
    whether a step with prompts may be in flight while the next is planned.
    proposer: guesses tokens for steps to verify; None for none. max_loras: adapters that run at once; 0 for none.
    has_row_state: the runner keeps of a prompt under way what no block holds (a sum of hidden states, say), by its row:
    after a step that failed it is computed from its beginning, as one is in any case of which each token has a vector.
    """

    def __init__(  # noqa: PLR0913  the numbers of one engine, each used here or by one part
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        watermark: float = 0.01,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        preemption: PreemptionRule | None = None,
        policy: Policy = first_come_first_served,
        long_prefill_token_threshold: int = 0,
        scheduler_delay_factor: float = 0.0,
        max_num_queued_reqs: int | None = None,
        windows: Several[Window] = (None,),
        keeps_evicted: bool = False,
        max_in_flight: int = 2,
        is_fair: bool = False,
        target_itl_s: float | None = 0.0,
        itl_factor: float = AUTO_FACTOR,
        graph_sizes: GraphSizes | None = None,
        plans_behind_prompts: bool = True,
        proposer: Proposer | None = None,
        max_loras: int = 0,
        has_row_state: bool = False,
    ) -> None:
        assert max_in_flight <= 2 or not any(windows), "I23: windows hold two steps of positions"
        self.max_in_flight = self._most_in_flight = max_in_flight
        max_chunk = min(long_prefill_token_threshold or max_num_batched_tokens, max_num_batched_tokens)
        self._cache = PagedCache(
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=enable_prefix_caching,
            windows=windows,
            max_chunk=stretched(max_chunk, max_num_batched_tokens),
            keeps_evicted=keeps_evicted,
        )
        self._admission = Admission(
            self._cache,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            watermark=watermark,
            max_num_queued=max_num_queued_reqs,
        )
        self._aftermath, self.step_cost = Aftermath(max_num_batched_tokens), StepCost(graph_sizes)
        fair = partial(FairQueue, num_rows=max_num_seqs, max_chunk=max_chunk, cost=self.step_cost)
        rows = max_num_seqs, fair if is_fair else lambda _: WaitingQueue(), max_loras, has_row_state
        self._residents = Residents(self._cache, self._admission, preemption, *rows)
        self._plans_behind_prompts, self.next_deadline_s = plans_behind_prompts, inf
        self._drafter, self._sizes = Drafter(proposer, self.step_cost), StepSizes()
        streams = StreamPace(self.step_cost, target_itl_s, max_num_batched_tokens, itl_factor)
        planned_by = Pace(scheduler_delay_factor), streams, self._drafter, self._aftermath.budget
        self._planner = Planner(self._residents, self._admission, *planned_by, max_chunk=max_chunk)
        self._roster, self._deadlines, self._throughput = Roster(policy), Deadlines(), self._admission.throughput
        landed_in = self._roster.sequences, self._cache, self._residents, self._drafter
        self._landing = Landing(*landed_in, end=self._end, end_request=self.cancel)
        self._in_flight, self._next_step_id, self._learned_id, self._unlearned_s = deque[StepPlan](), 0, -1, 0.0

    # Requests come and go.

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raise `ContextLengthError`, with both numbers, for a prompt that `add` would refuse."""
        self._admission.check_fits(num_prompt_tokens)

    def check_room(self, arrival: Arrival, num_before: int = 0) -> None:
        """Raise `OverloadedError` if who comes on these terms, after so many others, would be refused now."""
        self._admission.check_queue(arrival, self._roster.next_key(arrival), self._residents.waiting, num_before)

    def prompt_hashes(self, request: Request) -> Iterator[list[BlockHash]]:
        """A request's, some at a time, to be made before `add`: a plan takes as long as what it still has to hash."""
        return self._cache.prompt_hashes(request.cache_salt, request.prompt_token_ids, request.extra_keys)

    def add(self, request: Request) -> None:
        """Queue a request. Raises as `check_fits`, `check_room`, and `InvalidRequestError` (id in use, wide beams)."""
        self._add(request, None)

    def fork(self, request_id: RequestId, index: int, branches: Several[Request]) -> None:
        """Continue a choice as new requests, each with parameters of its own, on the blocks computed so far.

        Their prompts are `history(request_id, index)`. A request that has ended can be continued until `cancel`; its
        blocks are then those that the prefix cache still has. Raises as `add`; none is added if one cannot be.
        """
        origin = self._roster.choice(request_id, index)
        history = self.history(request_id, index)
        added: list[Request] = []
        try:
            for branch in branches:
                assert branch.prompt_token_ids == history, "a branch continues what it is forked from"
                self._add(branch, origin)
                added.append(branch)
        except Exception:
            for branch in added:
                self.cancel(branch.id)
            raise

    def history(self, request_id: RequestId, index: int = 0) -> tuple[int, ...]:
        """Prompt and answer of a choice, as far as it has come. Raises `InvalidRequestError` where there is none."""
        return self._roster.history(request_id, index)

    def cancel(self, request_id: RequestId) -> None:
        """Nobody wants the rest: give everything back now. Idempotent; an unknown id is a no-op (I11)."""
        try:
            for sequence in tuple(self._roster.requests.get(request_id, ())):
                self._end(sequence)
        finally:
            self._roster.histories.pop(request_id, None)

    def abort(self, request_id: RequestId) -> Several[SeqDelta]:
        """As `cancel`, of a request with a reader. Returns what he is to be told, see `best_so_far`."""
        try:
            return tuple(best_so_far(self._roster.requests.get(request_id, [])))
        finally:
            self.cancel(request_id)

    def finish(self, request_id: RequestId, index: int = 0, *, num_dropped: int = 0) -> None:
        """The loop found the end of a choice in its text (a stop string). Later tokens of it are dropped.

        num_dropped: of those that have landed, how many are later: drafts come together with the end.
        """
        sequence = self._roster.choice(request_id, index)
        if sequence is not None and not sequence.is_held_back:
            self._end(sequence)
        if num_dropped and (history := self._roster.histories.get(request_id, {}).get(index)):
            del history[-num_dropped:]

    def is_cached(self, block_hash: BlockHash) -> bool:
        """Whether a prompt's block is in the prefix cache, by its hash (see `prompt_hashes`)."""
        return self._cache.is_cached(block_hash)

    def reset_prefix_cache(self) -> int:
        """No later request finds what was computed so far. Returns how many blocks were forgotten."""
        return self._cache.reset()

    def _add(self, request: Request, origin: Sequence | None) -> None:
        assert request.max_tokens >= 1, f"request {request.id} asks for {request.max_tokens} tokens"
        context_len = self._admission.context_len_for(request)
        self._roster.check_unused(request.id)
        self.check_room(request)
        new_table = partial(self._cache.new_table, request.cache_salt, request.prompt_hashes, request.extra_keys)
        for sequence in self._roster.enter(request, context_len, new_table, origin):
            self._residents.waiting.add(sequence)
            self._drafter.adopt(sequence)
        self._deadlines.add(request, self._roster.requests)
        self.next_deadline_s = self._deadlines.next_s

    def expire(self, now: float) -> Expired | None:
        """End the requests whose deadline has come by `now`; None if there is none. To be called before `plan`."""
        due = self._deadlines.due(now, self._roster.requests)
        self.next_deadline_s = self._deadlines.next_s
        expired = expire(due) if due else None
        for sequence in chain(*due):
            self._end(sequence)
        return expired

    # One step: plan, then commit or revert.

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run before a step in flight has landed, or at all.

        now: seconds of the clock that `Request.arrival_s` was read from.
        """
        assert len(self._in_flight) < self.max_in_flight, "plan follows a commit"
        planner = self._planner
        if self._aftermath.is_on:
            plan = self._plan_trial(now) or planner.plan(now, self._next_step_id, self._in_flight)
        else:
            plan = planner.plan(now, self._next_step_id, self._in_flight)
        if planner.leaves_waiting or self._throughput.is_measuring:
            num_tokens = 0 if plan is None else planner.num_tokens
            self._throughput.planned(now, num_tokens, is_full=planner.leaves_waiting)
        if plan is None:
            assert self._in_flight or not self._roster.sequences, "I13: requests wait and nothing runs"
            return None
        if planner.num_tokens != self._sizes.num_tokens:
            self._sizes.become(planner.num_tokens, plan.step_id)
        self._next_step_id += 1
        self._in_flight.append(plan)
        if not (self._plans_behind_prompts or self._aftermath.is_on):
            has_prompt = planner.num_tokens > len(plan.slices)  # or drafts, whose rows join the next plan if it waits
            self.max_in_flight = 1 if has_prompt else self._most_in_flight
        return plan

    def _plan_trial(self, now: float) -> StepPlan | None:
        """A step of those alone who may be to blame for the one that failed; None where all may run."""
        plan = None
        if (trial := self._aftermath.trial(self._roster.requests)) is not None:
            plan = self._planner.plan(now, self._next_step_id, (), trial)
        if plan is None:
            self._aftermath.dismiss()
        self.max_in_flight = self._most_in_flight if plan is None else 1
        return plan

    def commit(self, result: StepResult, took_s: float = 0.0) -> StepTokens:
        """Take in the oldest step in flight: append its tokens, seal what has filled up, end what has ended.

        took_s: how long the device had it; 0.0 where that is not known. A slice of a sequence that has ended meanwhile
        is ignored (I19); that of a preempted one still yields its token.
        """
        plan = self._in_flight.popleft()
        assert plan.step_id == result.step_id, f"step {result.step_id} landed before step {plan.step_id}"
        if self._aftermath.is_on:
            self._aftermath.landed()
            self.max_in_flight = 1 if self._aftermath.is_inquest else self._most_in_flight
        if plan.step_id >= self._planner.next_look_id and took_s:
            self._learn(plan, took_s)
        return self._landing.take_in(plan, result)

    def _learn(self, plan: StepPlan, took_s: float) -> None:
        """What a step took tells what the next will take; but one that only decodes, if others like it have told."""
        is_plain = plan.step_id > self._planner.last_long_id
        self._planner.next_look_id = plan.step_id + (DECODES_PER_LOOK if is_plain else 1)
        self._unlearned_s += took_s * DECODES_PER_LOOK
        if self._unlearned_s < LEARN_EVERY_S and is_plain:
            return
        num_steps, self._learned_id, self._unlearned_s = plan.step_id - self._learned_id, plan.step_id, 0.0
        own_s = took_s - self._drafter.seconds(plan) if plan.drafting else took_s
        self.step_cost.landed(plan.slices, own_s, num_steps)

    def revert(self, step_id: int, *, out_of_memory: bool = False) -> RequestId | None:
        """The oldest step in flight raised. Take it and those planned on top of it back, as if they had not been.

        Returns the request that is to blame, which gets no more output, once that is known: until then some of those
        with a slice in the step run without the others. Its client may have left while it was on trial.
        out_of_memory: see `Aftermath.failed`.
        """
        fallen = tuple(self._in_flight)
        assert fallen[0].step_id == step_id, f"step {step_id} failed before step {fallen[0].step_id} landed"
        self._in_flight.clear()
        slices = self._roster.owned(fallen)
        self._residents.rewind(fallen, slices)
        self._drafter.rewind()
        first = {piece.seq_id for piece in fallen[0].slices}
        requests = dict.fromkeys(sequence.request_id for sequence, _ in slices if sequence.id in first)
        culprit = self._aftermath.failed(tuple(requests), fallen[0].num_tokens, out_of_memory=out_of_memory)
        if culprit is not None:
            self._expel(culprit)
        return culprit

    def restart(self, wanted: Collection[RequestId]) -> Restart:
        """A call raised what it ought not to, and who holds what is not to be trusted: forget it, and steps in flight.

        Requests that are still `wanted` are computed again from the tokens that they have; others are forgotten, and so
        is one at whose token a plan or commit raised that had raised there before.
        """
        taken_in, torn_at, is_landing = self._landing.interrupted()
        sequence, self._planner.at = torn_at or self._planner.at, None
        self._in_flight.clear()
        self._aftermath.dismiss()
        self.max_in_flight = self._most_in_flight
        for seq_id in self._roster.restart(wanted, sequence, is_landing=is_landing):
            self._drafter.forget(seq_id)
        self._drafter.rewind()
        self._residents.restart(self._roster.sequences.values())
        return Restart(taken_in, tuple(name for name in wanted if name not in self._roster.requests))

    def expel(self, seq_ids: Iterable[SeqId]) -> dict[RequestId, AserveError]:
        """These sequences cannot be sampled: end their requests, before their `commit`. Returns why, for each."""
        reasons: dict[RequestId, AserveError] = {}
        for sequence in [self._roster.sequences[seq_id] for seq_id in seq_ids if seq_id in self._roster.sequences]:
            failure = None if sequence.constraint is None else sequence.constraint.failure
            reason = NonFiniteLogitsError() if failure is None else ConstraintError(failure)
            reasons.setdefault(sequence.request_id, reason)
        for request_id in reasons:
            self._expel(request_id)
        return reasons

    def _expel(self, request_id: RequestId) -> None:
        if members := self._roster.requests.get(request_id):
            self._residents.quarantine(members)
        self.cancel(request_id)

    # What is going on.

    @property
    def readings(self) -> Readings:
        """For who looks on."""
        return Readings(self._roster, self._cache, self._residents, self._planner)

    def statistics(self) -> Statistics:
        """A snapshot."""
        parts = self._cache, self._residents, self._admission, self._drafter.counts
        return snapshot(*parts, self._sizes.counts(self._next_step_id), len(self._in_flight), self.step_cost.error)

    def check(self) -> None:
        """Assert every invariant, by number. For tests: the cost is that of the whole pool."""
        check_sequences(self._roster.sequences, self._roster.requests, self._residents)
        check_running(self._residents.running, self._in_flight, self._cache, self._admission.context_len)
        for plan in self._in_flight:
            most = stretched(self._aftermath.budget.most, self._aftermath.budget.most)
            assert 0 < plan.num_tokens <= most, f"I13: a step of {plan.num_tokens} tokens"

    # Ends.

    def _end(self, sequence: Sequence) -> None:
        """Forget a sequence, but for the tokens of a choice that can be forked, and take back all it holds (I11)."""
        self._residents.remove(sequence)
        self._roster.leave(sequence)
        self._drafter.forget(sequence.id)
