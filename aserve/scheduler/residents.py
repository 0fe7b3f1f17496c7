"""Residents: who holds rows and blocks, who waits for them, and how one becomes the other.

    waiting --admit--> running --vacate--> (gone)         running: a row and blocks on the device
       ^                | |  ^                            swapped: blocks on the host
       '--make_room-----' |  |                            waiting: nothing
                  make_room  bring_back
                          v  |
                        swapped

What the runner has to copy for it before the next step is gathered until a plan takes it. Knows no budget and no
output; which sequence deserves what is decided by the queues' order, the admission and the preemption rule.
"""

from collections.abc import Callable, Collection, Container, Iterable
from collections.abc import Sequence as Several

from aserve.core.ids import AdapterId, BlockId, RequestId, Row, SeqId
from aserve.core.plan import BlockOps, SeqSlice, StepPlan
from aserve.kv_cache.paged_cache import Copy, PagedCache
from aserve.scheduler.adapter_places import AdapterPlaces
from aserve.scheduler.admission import Admission
from aserve.scheduler.preemption import PreemptionRule, choose_victims
from aserve.scheduler.queue import SequenceQueue, Waiting
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.states import Hold, State, move

NewWaiting = Callable[[SequenceQueue], Waiting]
"""Makes the queue of those who wait, of those who run."""


class Residents:
    """The queues, the rows, and the block operations of the plan to come.

    max_loras: adapters that run at once; 0 where there are none. has_row_state: see `Scheduler`.
    """

    def __init__(
        self,
        cache: PagedCache,
        admission: Admission,
        rule: PreemptionRule | None,
        num_rows: int,
        new_waiting: NewWaiting,
        max_loras: int = 0,
        has_row_state: bool = False,
    ) -> None:
        self.grown: list[tuple[SeqId, tuple[BlockId, ...]]] | None = None
        """Blocks that tables of those who run have got, in their order, for who looks on; None where nobody does."""
        self.moved: list[SeqId] | None = None
        """Likewise: who has gone from one state to another."""
        self.num_preemptions = 0
        self.num_swap_outs = 0
        """Of the preemptions, those that swapped."""
        self.num_copied_blocks = 0
        self.num_swapped_blocks = 0
        self._cache = cache
        self._admission = admission
        self._rule = rule or PreemptionRule()
        self._num_rows = num_rows
        self._new_waiting = new_waiting
        self._max_loras = max_loras
        self._has_row_state = has_row_state
        self.has_host_memory = cache.has_host_memory
        self._clear()

    def _clear(self) -> None:
        self.running = SequenceQueue()
        self.waiting: Waiting = self._new_waiting(self.running)
        self.swapped = SequenceQueue()
        self._places = AdapterPlaces(self._max_loras, self.running, self.swapped) if self._max_loras else None
        self._free_rows = [Row(row) for row in reversed(range(self._num_rows))]
        self.copies: list[Copy] = []
        """To be made before the next step."""
        self.scrubs: list[BlockId] = []
        """Likewise: blocks of sequences that were put in quarantine."""

    def adapters(self) -> tuple[tuple[AdapterId, ...], tuple[AdapterId, ...]]:
        """Of those who run or are swapped out, and of those who wait; nothing where the model takes none."""
        if self._places is None:
            return (), ()
        waiting = {sequence.request.adapter for sequence in self.waiting}
        return self._places.running(), tuple(adapter for adapter in waiting if adapter is not None)

    @property
    def num_waiting_tokens(self) -> int:
        """To be computed before all who wait, and all prompts of those who run, have got so far. Cost: all of them."""
        begun = sum(max(0, sequence.num_prefill - sequence.num_computed) for sequence in self.running)
        return begun + sum(len(sequence.token_ids) for sequence in (*self.waiting, *self.swapped))

    # Coming.

    def settle(self) -> None:
        """Before a step's first `next_up`: who is next may depend on what those who run have got."""
        if self._free_rows and self.waiting:
            self.waiting.settle()
            if self._places is not None:
                self._places.settle()

    @property
    def num_next_up(self) -> int:
        """How many of those who wait have a row to go to."""
        return min(len(self.waiting), len(self._free_rows))

    def next_up(self, only: Collection[RequestId] | None) -> Sequence | None:
        """Who of those who wait is to be admitted next, if there is a row; of these requests, where not all may."""
        allows = None if self._places is None else self._places.allows
        if only is None:
            return self.waiting.next_up(len(self._free_rows), allows)
        theirs = (sequence for sequence in self.waiting if sequence.request_id in only)
        return next(filter(allows, theirs) if allows else theirs, None)

    @property
    def why_nobody(self) -> Hold:
        """Why `next_up` has nobody, where somebody waits."""
        if not self._free_rows:
            return Hold.ROWS
        return Hold.TURN if self._places is None or not self._places.holds_back else Hold.ADAPTERS

    def admit(self, sequence: Sequence, settling: Container[SeqId]) -> bool:
        """Let a waiting sequence run, if there is a row, and blocks for all of its tokens. See `Admission.admit`."""
        if not self._free_rows:
            return False
        num_of_its_own = 0 if sequence.group is None else len(sequence.group.running())
        others_run = len(self.running) > num_of_its_own
        copies = self._admission.admit(sequence, settling=settling, others_run=others_run)
        if copies is None:
            return False
        self.copies.extend(copies)
        self.waiting.remove(sequence)
        self._settle_in(sequence)
        if self._places is not None:
            self._places.admitted(sequence)
        return True

    def bring_back(self, oldest_flying: int | None) -> list[Sequence]:
        """Swap in the first of those who are swapped out, and as many who went with it as fit, each with a free token.

        Nobody, if it does not fit yet. If it does not fit with the device to itself, it will be recomputed.
        """
        first = self.swapped.first
        unit = [sequence for sequence in self.swapped if sequence.swap_id == first.swap_id]
        if any(is_flying(sequence, oldest_flying) for sequence in unit):
            return []
        for num_members in range(min(len(unit), len(self._free_rows)), 0, -1):
            if self._swap_in(unit[:num_members]):
                return unit[:num_members]
        if not len(self.running):
            self._forget_swapped(unit)
        return []

    def _swap_in(self, sequences: list[Sequence]) -> bool:
        """Give sequences that are swapped out their blocks and rows back, if there is room for another token each."""
        num_groups, block_size = self._cache.num_groups, self._cache.block_size
        num_more = sum(s.num_computed * num_groups >= len(s.table.host_ids) * block_size for s in sequences)
        num_spare_blocks = num_more * num_groups + (self._admission.num_spare_blocks if len(self.running) else 0)
        group = sequences[0].group
        beside = [] if group is None else [sequence.table for sequence in group.running()]
        tables = [sequence.table for sequence in sequences]
        swap_ins = self._cache.swap_in(tables, beside=beside, num_spare_blocks=num_spare_blocks)
        if swap_ins is None:
            return False
        for sequence in sequences:
            self.swapped.remove(sequence)
            sequence.num_prefill = len(sequence.token_ids)
            self._cache.reserve(sequence.table, sequence.num_computed + 1)
            sequence.num_bound = len(sequence.table.block_ids)
            self._settle_in(sequence)
        return True

    def _forget_swapped(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._leave_host(sequence)
            self._send_to_wait(sequence)

    def _leave_host(self, sequence: Sequence) -> None:
        """Give up the place on the host of a sequence that does not come back to it."""
        self.swapped.remove(sequence)
        self._cache.free_host(sequence.table)
        self._cache.free(sequence.table)

    def _settle_in(self, sequence: Sequence) -> None:
        self.running.add(sequence)
        self._move(sequence, State.RUNNING)
        sequence.row = self._free_rows.pop()
        self.waiting.began(sequence)

    # Staying.

    def make_room(
        self, sequence: Sequence, num_positions: int, newest_flying: int | None
    ) -> tuple[BlockId, ...] | None:
        """Blocks for so many positions, at the cost of whoever came last. None if that is the sequence itself."""
        while (new_blocks := self._cache.reserve(sequence.table, num_positions)) is None:
            self.preempt(choose_victims(self.running, sequence), newest_flying, may_swap=True)
            if sequence.state is not State.RUNNING:
                return None
        if self.grown is not None and new_blocks:
            self.grown.append((sequence.id, new_blocks))
        return new_blocks

    def extend(self, sequence: Sequence, num_positions: int) -> int:
        """Blocks for so many positions, as far as free ones go. Returns how many it has blocks for."""
        if num_positions > sequence.table.capacity:
            num_held = len(sequence.table.block_ids)
            self._cache.reserve_most(sequence.table, num_positions)
            if self.grown is not None:
                self.grown.append((sequence.id, tuple(sequence.table.block_ids[num_held:])))
        return min(num_positions, sequence.table.capacity)

    def take_over(self, sequence: Sequence, parent: Sequence) -> None:
        """Have the slot of a pruned beam go on as a copy of `parent`: its tokens, its blocks, and the row set up anew.

        Both have computed equally many positions, so that the copy needs no block more than the slot has.
        """
        if sequence.token_ids == parent.token_ids:
            return
        copies = self._cache.rebase(sequence.table, parent.table, sequence.num_computed)
        self.copies.extend(copies)
        sequence.token_ids = parent.token_ids[:]
        sequence.num_bound = len(sequence.table.block_ids)

    # Going.

    def preempt(self, victims: list[Sequence], newest_flying: int | None, *, may_swap: bool) -> None:
        """Take the rows and blocks of running sequences; they wait, or are swapped out together."""
        self.num_preemptions += len(victims)
        tables = [victim.table for victim in victims]
        swap_outs = None
        if may_swap and self._rule.prefers_swap(victims):
            swap_outs = self._cache.swap_out(tables)
        if swap_outs is not None:
            self.num_swap_outs += len(victims)
        for victim in victims:
            self._vacate(victim)
            victim.num_preemptions += 1
            victim.resume_after = newest_flying
            if victim.group is not None and victim.group.beams is not None:
                victim.group.beams.retract(victim.index)
            if swap_outs is None:
                self._send_to_wait(victim)
            else:
                self._move(victim, State.SWAPPED)
                victim.swap_id = victims[0].id
                self.swapped.add(victim)

    def remove(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds, wherever it is (I11): it has ended."""
        self._admission.throughput.answered(len(sequence.token_ids) - sequence.num_prompt)
        if sequence.state is State.RUNNING:
            self._vacate(sequence)
        elif sequence.state is State.SWAPPED:
            self._leave_host(sequence)
        else:
            self.waiting.remove(sequence)
        self._move(sequence, State.FINISHED)

    def rewind(self, plans: Several[StepPlan], slices: Iterable[tuple[Sequence, SeqSlice]]) -> None:
        """All steps in flight failed: these, with those slices of sequences that have not ended. Take them back.

        Who runs goes back to what has landed, keeps row and blocks, and sets its row up anew. Who took its row in one
        of these steps gives it back, and so does who relies on a block that they were to move, or has more than tokens
        in a row that they may have changed.
        """
        changed: list[Sequence] = []
        for sequence, piece in slices:
            if sequence.state is not State.WAITING and piece.start < sequence.num_computed:
                sequence.num_computed = piece.start
                self._cache.rewind(sequence.table, piece.start)
            if sequence.state is State.RUNNING:
                sequence.num_prefill = len(sequence.token_ids)
                sequence.num_bound = len(sequence.table.block_ids)
                if self._has_row_state or sequence.request.per_token:
                    changed.append(sequence)
        all_ops = [plan.block_ops for plan in plans if plan.block_ops is not None]
        blocks = {block_id for ops in all_ops for _, block_id in (*ops.copies, *ops.swap_ins)}
        host_ids = {host_id for ops in all_ops for _, host_id in ops.swap_outs}
        self.scrubs.extend(block_id for ops in all_ops for block_id in ops.scrubs)
        first_step = plans[0].step_id
        for sequence in tuple(self.running):
            is_new = sequence.settled_in >= first_step
            if is_new or sequence in changed or blocks.intersection(sequence.table.block_ids):
                self.quarantine([sequence])  # others get the blocks, and nobody knows what was written there
                self.preempt([sequence], None, may_swap=False)
        # Lost on the host: what these steps were to swap out, and all of who took its row in one of them and is swapped
        # out already, for what was copied or computed for it never was.
        lost = [s for s in self.swapped if s.settled_in >= first_step or host_ids.intersection(s.table.host_ids)]
        self._forget_swapped(lost)
        self._cache.distrust_host(host_ids)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Nobody holds anything any more, whatever was written here: these wait, to be computed from their tokens."""
        self._cache.restart()
        self._clear()
        for sequence in sequences:
            sequence.num_preemptions += sequence.state is not State.WAITING
            sequence.state = State.WAITING
            request = sequence.request
            sequence.table = self._cache.new_table(request.cache_salt, request.prompt_hashes, request.extra_keys)
            sequence.row = sequence.num_bound = sequence.resume_after = sequence.origin = None
            sequence.num_computed = 0
            if sequence.group is not None and sequence.group.beams is not None:
                sequence.group.beams.retract(sequence.index)
            self.waiting.add(sequence)

    def quarantine(self, sequences: Several[Sequence]) -> None:
        """Nobody is to meet what these of a request computed: a step failed, or it is not finite."""
        num_trusted = min(sequence.num_cached for sequence in sequences)
        self.scrubs.extend(self._cache.quarantine([sequence.table for sequence in sequences], num_trusted))

    def _move(self, sequence: Sequence, to: State) -> None:
        sequence.state = move(sequence.state, to)
        if self.moved is not None:
            self.moved.append(sequence.id)

    def _send_to_wait(self, sequence: Sequence) -> None:
        self._move(sequence, State.WAITING)
        sequence.num_computed = 0
        self.waiting.add(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Take back the row and the blocks of a running sequence, if those have not been swapped out."""
        assert sequence.row is not None, f"I11: {sequence!r} has no row"
        self.running.remove(sequence)
        self.waiting.ceased(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = None
        sequence.num_bound = None
        if self.copies:  # nobody needs what was to be copied for it
            held = set(sequence.table.block_ids)
            self.copies = [copy for copy in self.copies if copy[1] not in held]
        if sequence.table.block_ids:
            self._cache.free(sequence.table)

    # What the runner has to do.

    def take_block_ops(self) -> BlockOps | None:
        """What has to be done to blocks before the next step; the plan takes it along.

        Nothing without copies, scrubs or host memory.
        """
        swap_outs, swap_ins = self._cache.take_host_moves()
        if not (swap_outs or self.copies or swap_ins or self.scrubs):
            return None
        self.num_swapped_blocks += len(swap_outs) + len(swap_ins)
        self.num_copied_blocks += len(self.copies)
        copies, scrubs = tuple(self.copies), tuple(self.scrubs)
        self.copies.clear()
        self.scrubs.clear()
        return BlockOps(scrubs, swap_outs, copies, swap_ins)

    def check(self) -> None:
        """Assert I7, I12, I14 and what the cache promises."""
        if self._places is not None:
            self._places.check()
        self._cache.check([s.table for s in self.running], [s.table for s in self.swapped])
        for queue in (self.waiting, self.running, self.swapped):
            queue.check()
        assert len(self.running) <= self._num_rows, "I13: too many run"
        rows = [sequence.row for sequence in self.running] + list(self._free_rows)
        assert sorted(row for row in rows if row is not None) == list(range(self._num_rows)), "I12: rows"
        for sequence in self.waiting:
            assert sequence.state is State.WAITING, f"I14: {sequence!r}"
            assert sequence.row is None, f"I11: {sequence!r}"
            assert not sequence.table.block_ids, f"I11: {sequence!r}"
            assert not sequence.table.host_ids, f"I11: {sequence!r}"
        for sequence in self.swapped:
            assert sequence.state is State.SWAPPED, f"I14: {sequence!r}"
            assert sequence.row is None, f"I11: {sequence!r}"
            assert not sequence.table.block_ids, f"I11: {sequence!r}"


def is_flying(sequence: Sequence, oldest_flying: int | None) -> bool:
    """Whether a step that a preempted sequence had a part in may not have landed yet."""
    after = sequence.resume_after
    return after is not None and oldest_flying is not None and oldest_flying <= after
