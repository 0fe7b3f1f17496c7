"""FairQueue: tenants share the engine by weight; within a tenant the policy's sort key orders.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's counter goes
up by what is computed for it, divided by its weight, and whoever waits with the lowest counter is next. Prompt tokens
found in the prefix cache were not computed, and cost nothing; a token of an answer costs as much as two of a prompt. A
tenant that begins to wait is lifted to the lowest counter among those who wait (if nobody does, to that of who did
last), so that nobody saves up service by asking for none.

    has begun   |a2 b7|            preempted, or a choice of a request that runs: before all others, by sort key
    a  12.0     |a3 a4 a5 a6 ...   next are b8, then a3 if that brings b over 12
    b   9.5     |b8

Slots are not taken from who has them. So that a tenant's newcomers need not wait for another's long answers, as long as
several tenants are present
  - the last eighth of the rows is for tenants that have less than their share of all rows;
  - a step begins no more of a tenant's prompts than `max_chunk` tokens, or one prompt, and while that is unfinished
    none. (That a chunk is no more than half a step is for the configuration to see to.)
A tenant that is held back thus has something running: nothing ever waits for an idle engine (I13). Meanwhile others
pass, if they have less than their share of the rows and are not ahead by more than some chunks.

A tenant floods whose prompts at hand are more than a chunk and more than two of its usual ones; a guest is one that
does not, and has asked for something lately. While there are both, what a step computes of a flood's prompts is bounded
by its predicted time (step_cost.py), so that a guest's first token comes within about 1.5 times what it takes alone:
  - in a step that computes a guest's prompt, to a tenth of what that step takes without them;
  - else to 0.4 of what the step takes without them and a guest's usual prompt takes by itself. The step is under way
    when the guest comes, and the longer its own prompt, the less that matters.
With one tenant, or none that floods, nothing is bounded (docs/adr/0007-tenants-in-turn.md has what it costs).

Nobody starves. While the first request of tenant k waits, another tenant j is admitted only with c_j <= c_k + L / w_j,
where L is that lead, or 0 as long as k is not held back. Each admission raises c_j by 1 / w_j at least, as a prompt has
a token to compute; c_k grows by nothing but what the rows that k has still get, which is finite. So at most
L + w_j * (c_k at the end - c_j at the beginning) + 1 requests of j go before it. And what k is held back for, rows or a
prompt of its own, ends (I15).
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final

from aserve.scheduler.queue import Ahead, Allows, Arrival, Backlog, SequenceQueue
from aserve.scheduler.sequence import Sequence, SortKey
from aserve.scheduler.step_cost import Allowance, Load, StepCost

PROMPT_COST: Final = 1.0
ANSWER_COST: Final = 2.0
"""Of a token, as in the paper: a token of an answer takes a step of its own."""
PRESENCE_S: Final = 600.0
"""How long after its last request a tenant counts as present."""
MAX_LEAD_CHUNKS: Final = 4
"""By how many chunks' tokens a tenant may be ahead of one that is held back, and pass it."""
GUEST_LEAD_CHUNKS: Final = 12
"""The same for a tenant that does not flood, of one that does: a long prompt, and the next one still passes."""
SPARE_SHARE: Final = 8
"""One in so many rows is kept for tenants that have few."""
RECENT_S: Final = 60.0
"""How long after its last request a tenant is expected to come again at any moment."""
FLOOD_PROMPTS: Final = 2
"""Who has more tokens of prompts to compute than so many of its usual ones, and than a chunk, floods."""
SHARE_BEFORE: Final = 0.4
"""Of a flood's prompts in a step with nobody else's, in time: of that step without them and a guest's usual prompt."""
SHARE_BESIDE: Final = 0.1
"""Of a flood's prompts in a step with guests' prompts, in time: of that step without them."""
LEAST_TOKENS: Final = 16
"""Of a flood's prompts in any step, so that it gets on."""
PROMPT_MEMORY: Final = 8
"""Over about so many prompts a tenant's usual length is averaged."""


class Tenancy:
    """One tenant: its counter and weight, those of it who wait and have not begun, and the rows that it has.

    seen_s: when its last request arrived. newest: the sequence that began last. num_begun: tokens of prompts that the
    step being planned begins. prompt_len: of its usual prompt, as far as that has to be computed.
    """

    __slots__ = (
        *("backlog", "counter", "name", "newest", "num_begun", "num_rows", "prompt_len", "queue"),
        *("seen_s", "weight"),
    )

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.counter = 0.0
        self.weight = weight
        self.queue = SequenceQueue()
        self.backlog = Backlog()
        self.num_begun = 0
        self.num_rows = 0
        self.prompt_len = 0.0
        self.seen_s = 0.0
        self.newest: Sequence | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing here."""
        return not self.queue and not self.num_rows

    @property
    def has_unfinished_prompt(self) -> bool:
        """Whether tokens of a prompt that runs are not planned yet."""
        newest = self.newest
        return newest is not None and newest.row is not None and newest.num_computed < newest.num_prefill

    def charge(self, sequence: Sequence) -> None:
        """Count what a sequence has got since it was charged last."""
        num_tokens = len(sequence.token_ids)
        self.counter += (num_tokens - sequence.num_charged) * ANSWER_COST / self.weight
        sequence.num_charged = num_tokens


class FairQueue:
    """Those who wait, of all tenants. running: those who run. num_rows: of the engine. max_chunk: see above.

    cost: how long steps take.
    """

    takes_turns = True

    def __init__(self, running: SequenceQueue, num_rows: int, max_chunk: int, cost: StepCost) -> None:
        self._running = running
        self._max_chunk = max_chunk
        self._num_rows = num_rows
        self._num_spare_rows = -(-num_rows // SPARE_SHARE) if num_rows > 1 else 0
        self._tenancies: dict[str, Tenancy] = {}
        self._begun = SequenceQueue()
        self._last_to_wait: Tenancy | None = None
        self._num = 0
        self._cost = cost
        self._now = 0.0
        self._step: _Step | None = None

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._begun, *(tenancy.queue for tenancy in self._tenancies.values()))

    def counters(self) -> dict[str, float]:
        """Of each tenant that is present."""
        return {name: tenancy.counter for name, tenancy in self._tenancies.items()}

    # Who waits.

    def add(self, sequence: Sequence) -> None:
        """One more waits; one that has been admitted before goes before all who have not."""
        self._num += 1
        if sequence.num_preemptions:
            self._begun.add(sequence)
            return
        tenancy = self._tenancy_of(sequence)
        tenancy.weight = sequence.request.weight
        tenancy.prompt_len = tenancy.prompt_len or sequence.num_prefill
        tenancy.seen_s = max(tenancy.seen_s, sequence.request.arrival_s)
        if not tenancy.queue:
            self._forget_absent(sequence.request.arrival_s)
            self._lift(tenancy)
        tenancy.queue.add(sequence)
        tenancy.backlog.count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer. If it is the first of several choices to go, the others have begun with it."""
        self._num -= 1
        if self._begun.holds(sequence):
            self._begun.remove(sequence)
            return
        tenancy = self._tenancy_of(sequence)
        self._take_out(tenancy, sequence)
        if sequence.group is not None:
            for sibling in sequence.group.members:
                if sibling is not sequence and tenancy.queue.holds(sibling):
                    self._take_out(tenancy, sibling)
                    self._begun.add(sibling)
        if not tenancy.queue:
            self._last_to_wait = tenancy

    def _take_out(self, tenancy: Tenancy, sequence: Sequence) -> None:
        tenancy.queue.remove(sequence)
        tenancy.backlog.count(sequence, -1)

    def _tenancy_of(self, sequence: Sequence) -> Tenancy:
        """That of its tenant."""
        request = sequence.request
        tenancy = self._tenancies.get(request.tenant)
        if tenancy is None:
            tenancy = self._tenancies[request.tenant] = Tenancy(request.tenant, request.weight)
        return tenancy

    def _forget_absent(self, now: float) -> None:
        """Those who have been away for long come back as anybody new."""
        for tenancy in list(self._tenancies.values()):
            if tenancy.is_idle and tenancy.seen_s + PRESENCE_S < now:
                del self._tenancies[tenancy.name]

    def _lift(self, tenancy: Tenancy) -> None:
        self.settle()
        floor = min((other.counter for other in self._tenancies.values() if other.queue), default=None)
        if floor is None and self._last_to_wait is not None:
            floor = self._last_to_wait.counter
        if floor is not None:
            tenancy.counter = max(tenancy.counter, floor)

    # How much of a step.

    def next_step(self, now: float) -> None:
        """As `Waiting`."""
        self._now = now
        self._step = None

    def allowance(self, sequence: Sequence) -> Allowance | None:
        """As `Waiting`: of those that flood, all together."""
        if len(self._tenancies) < 2:
            return None
        step = self._this_step()
        return step.allowance if step.is_limited(self._tenancy_of(sequence)) else None

    def _this_step(self) -> "_Step":
        if self._step is None:
            self._step = _Step(self._tenancies, self._running, self._now, self._max_chunk, self._cost)
        return self._step

    # Who is next.

    def next_up(self, num_free_rows: int, allows: Allows | None = None) -> Sequence | None:
        """Who has begun; else the first of the tenant with the lowest counter.

        While that is held back, of the next one that has less than its share of the rows and is not far ahead.
        """
        if not num_free_rows:
            return None
        if (begun := self._begun.first_of(allows)) is not None:
            return begun
        firsts = {
            tenancy: first
            for tenancy in self._tenancies.values()
            if (first := tenancy.queue.first_of(allows)) is not None
        }
        waiting = sorted(firsts, key=lambda tenancy: (tenancy.counter, firsts[tenancy].sort_key))
        for tenancy in waiting:
            first = firsts[tenancy]
            if self._may_pass(tenancy, waiting[0]) and not self._is_held_back(tenancy, first, num_free_rows):
                return first
        return None

    def _may_pass(self, tenancy: Tenancy, lowest: Tenancy) -> bool:
        """Whether one may go before that with the lowest counter, if that is held back."""
        if tenancy is lowest:
            return True
        is_guest = self._this_step().is_guest_of(tenancy, lowest)
        lead = (tenancy.counter - lowest.counter) * tenancy.weight
        max_lead = (GUEST_LEAD_CHUNKS if is_guest else MAX_LEAD_CHUNKS) * self._max_chunk
        return lead <= max_lead and self._has_few_rows(tenancy)

    def _is_held_back(self, tenancy: Tenancy, first: Sequence, num_free_rows: int) -> bool:
        if len(self._tenancies) == 1:
            return False
        step = self._this_step()
        if step.is_closed_to(tenancy):
            return True
        has_begun_enough = tenancy.num_begun + first.num_prefill > self._max_chunk
        if tenancy.has_unfinished_prompt or (tenancy.num_begun and has_begun_enough):
            return not step.is_free(tenancy)
        return num_free_rows <= self._num_spare_rows and not self._has_few_rows(tenancy)

    def _has_few_rows(self, tenancy: Tenancy) -> bool:
        """Whether it has less than its share of all rows."""
        total = sum(other.weight for other in self._tenancies.values())
        return tenancy.num_rows * total < self._num_rows * tenancy.weight

    # What they get.

    def settle(self) -> None:
        """Charge the tenants with what their sequences that run have got. Another step is going to be planned."""
        for tenancy in self._tenancies.values():
            tenancy.num_begun = 0
        for sequence in self._running:
            if len(sequence.token_ids) > sequence.num_charged:
                self._tenancy_of(sequence).charge(sequence)

    def began(self, sequence: Sequence) -> None:
        """It runs: charge its prompt, as far as it has to be computed, unless that has been done before."""
        tenancy = self._tenancy_of(sequence)
        tenancy.num_rows += 1
        tenancy.newest = sequence
        num_begun = sequence.num_prefill - sequence.num_computed
        tenancy.prompt_len += (num_begun - tenancy.prompt_len) / PROMPT_MEMORY
        tenancy.num_begun += num_begun
        if not sequence.num_charged:
            tenancy.counter += num_begun * PROMPT_COST / tenancy.weight
            sequence.num_charged = sequence.num_prefill

    def ceased(self, sequence: Sequence) -> None:
        """It runs no longer: charge the rest."""
        tenancy = self._tenancy_of(sequence)
        tenancy.num_rows -= 1
        tenancy.charge(sequence)
        if tenancy.newest is sequence:
            tenancy.newest = None

    # What is told.

    def num_before(self, sequence: Sequence) -> int:
        """As `Waiting`. Of those who have begun, who are few, each is looked at."""
        tenant = sequence.request.tenant
        begun = self._begun[: self._begun.num_before(sequence)]
        num_begun = sum(other.request.tenant == tenant for other in begun)
        tenancy = self._tenancies.get(tenant)
        return num_begun if tenancy is None else num_begun + tenancy.queue.num_before(sequence)

    def ahead_of(self, arrival: Arrival, sort_key: SortKey) -> Ahead:
        """The queue of its tenant, and while that is served the others' shares; but no more than there is."""
        del sort_key
        tenancy = self._tenancies.get(arrival.tenant)
        own = Backlog() if tenancy is None else tenancy.backlog
        waiting = [other for other in self._tenancies.values() if other.queue]
        total = sum(other.weight for other in waiting if other is not tenancy) / arrival.weight + 1.0
        num_sequences = sum(other.backlog.num_sequences for other in waiting)
        num_prompt_tokens = sum(other.backlog.num_prompt_tokens for other in waiting)
        return Ahead(
            own.num_requests,
            min(own.num_sequences * total, num_sequences),
            min(own.num_prompt_tokens * total, num_prompt_tokens),
        )

    def check(self) -> None:
        """Assert I14: in order, by tenant."""
        for queue in (self._begun, *(tenancy.queue for tenancy in self._tenancies.values())):
            queue.check()
        assert sum(1 for _ in self) == self._num, "I14: somebody who waits is lost"
        rows = dict.fromkeys(self._tenancies, 0)
        for sequence in self._running:
            rows[sequence.request.tenant] += 1
        assert rows == {name: tenancy.num_rows for name, tenancy in self._tenancies.items()}, "I14: rows"


class _Step:
    """The step being planned: who floods, who is to be spared that, and what is left for prompts of the former.

    allowance: prompt tokens of those that flood, all together; None for any number.
    """

    def __init__(
        self, tenancies: Mapping[str, Tenancy], running: SequenceQueue, now: float, max_chunk: int, cost: StepCost
    ) -> None:
        at_hand = {tenancy: tenancy.backlog.num_prompt_tokens for tenancy in tenancies.values()}
        due = dict.fromkeys(at_hand, 0)
        num_rows = num_keys = 0
        for sequence in running:
            if (num_left := sequence.num_prefill - sequence.num_computed) <= 0:
                num_rows += 1
                num_keys += sequence.num_computed
            else:
                tenancy = tenancies[sequence.request.tenant]
                at_hand[tenancy] += num_left
                due[tenancy] += min(num_left, max_chunk)
        self._flooding = {
            tenancy for tenancy, num in at_hand.items() if num > max(FLOOD_PROMPTS * tenancy.prompt_len, max_chunk)
        }
        self._guests = guests = [
            tenancy for tenancy in at_hand if tenancy not in self._flooding and tenancy.seen_s + RECENT_S >= now
        ]
        self.allowance: Allowance | None = None
        prices = cost.rough_prices()
        if prices is None or not guests or not self._flooding:
            return
        lowest = min(tenancy.counter for tenancy in self._flooding)
        num_due = 0
        for guest in guests:
            num_due += due[guest]
            if (guest.counter - lowest) * guest.weight <= GUEST_LEAD_CHUNKS * max_chunk:  # else it is not next
                num_due += sum(min(sequence.num_prefill, max_chunk) for sequence in guest.queue)
        step_s = prices.of(Load(num_rows, num_rows, num_keys)) + prices.token * num_due
        if num_due:
            spare_s = SHARE_BESIDE * step_s
        else:
            num_usual = min(guest.prompt_len for guest in guests)
            spare_s = SHARE_BEFORE * (step_s + prices.base * max(1.0, num_usual / max_chunk) + prices.token * num_usual)
        self.allowance = Allowance(prices, spare_s, LEAST_TOKENS)

    def is_limited(self, tenancy: Tenancy) -> bool:
        """Whether its prompts get what is allowed, and no more."""
        return tenancy in self._flooding

    def is_free(self, tenancy: Tenancy) -> bool:
        """Whether it may begin any number of prompts: the only guest of a flood, or a flood that nobody is near."""
        active = self._guests if tenancy not in self._flooding else [*self._guests, *self._flooding]
        return bool(self._flooding) and active == [tenancy]

    def is_guest_of(self, tenancy: Tenancy, other: Tenancy) -> bool:
        """Whether one does not flood, and the other does."""
        return tenancy not in self._flooding and other in self._flooding

    def is_closed_to(self, tenancy: Tenancy) -> bool:
        """Whether not one more of its prompts may be begun."""
        return tenancy in self._flooding and self.allowance is not None and self.allowance.is_spent
