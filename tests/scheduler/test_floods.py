"""How much of a step is for a flood's prompts: each part of that, in seconds that a model of costs predicts."""

from types import SimpleNamespace

import pytest

from aserve.core.ids import BlockHash, Row, SeqId
from aserve.kv_cache.table import BlockTable
from aserve.scheduler.fairness import LEAST_TOKENS, PROMPT_MEMORY, RECENT_S, FairQueue
from aserve.scheduler.queue import SequenceQueue, first_come_first_served
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.step_cost import Prices
from tests.scheduler.sync_loop import request

BASE_S, TOKEN_S, ROW_S, KEY_S = 1.0, 0.001, 0.01, 0.0001
MAX_CHUNK = 100


class Tenants:
    """A fair queue, with nobody in it at first. flood: three prompts of 500 tokens of one tenant wait."""

    def __init__(self, *, is_known: bool = True) -> None:
        prices = Prices(BASE_S, TOKEN_S, ROW_S, KEY_S) if is_known else None
        self.running = SequenceQueue()
        cost = SimpleNamespace(rough_prices=lambda: prices)
        self.queue = FairQueue(self.running, num_rows=8, max_chunk=MAX_CHUNK, cost=cost)
        self.flood = [self.waits("flood", 500) for _ in range(3)]

    def waits(self, tenant: str, num_prompt: int) -> Sequence:
        """One more of a tenant."""
        seq_id = SeqId(len(self.queue) + len(self.running))
        wanted = request(f"r{seq_id}", (0,) * num_prompt, tenant=tenant)
        key = first_come_first_served(wanted, seq_id)
        sequence = Sequence(seq_id, wanted, BlockTable(BlockHash(bytes(32))), key, 10_000)
        self.queue.add(sequence)
        return sequence

    def runs(self, tenant: str, num_prompt: int, num_computed: int) -> Sequence:
        """One more of a tenant, of whose prompt so much has been computed since it was admitted."""
        sequence = self.waits(tenant, num_prompt)
        self.queue.remove(sequence)
        self.running.add(sequence)
        sequence.row = Row(0)
        self.queue.began(sequence)
        sequence.num_computed = num_computed
        return sequence

    def spare_s(self, now: float = 0.0) -> float | None:
        """Of a step: seconds for prompts of who floods; None where any number may be computed."""
        self.queue.next_step(now)
        allowance = self.queue.allowance(self.flood[0])
        return None if allowance is None else allowance._spare_s


def test_beside_a_guests_prompt_a_flood_gets_a_tenth_of_the_step():
    tenants = Tenants()
    guest = tenants.waits("guest", 50)
    tenants.runs("reader", 10, 10)
    others_s = BASE_S + TOKEN_S + ROW_S + 10 * KEY_S
    assert tenants.spare_s() == pytest.approx(0.1 * (others_s + 50 * TOKEN_S))
    assert tenants.queue.allowance(guest) is None, "who does not flood is not limited"
    tenants.waits("third guest", 120)
    tenants.runs("second guest", 170, 40)
    assert tenants.spare_s() == pytest.approx(0.1 * (others_s + (50 + 100 + 100) * TOKEN_S)), "a chunk of each at most"


@pytest.mark.parametrize(("num_prompt", "num_bases"), [(50, 1.0), (250, 2.5)])
def test_before_a_guest_comes_a_flood_gets_a_share_of_what_its_usual_prompt_will_take(num_prompt, num_bases):
    """The guest has a row, and decodes: who knows when it comes again."""
    tenants = Tenants()
    tenants.runs("guest", num_prompt, num_prompt)
    own_s = BASE_S + TOKEN_S + ROW_S + num_prompt * KEY_S
    expected = 0.4 * (own_s + num_bases * BASE_S + num_prompt * TOKEN_S)
    assert tenants.spare_s() == pytest.approx(expected)
    assert tenants.spare_s(now=RECENT_S) == pytest.approx(expected)
    assert tenants.spare_s(now=RECENT_S + 1.0) is None, "it comes no more"


def test_of_several_guests_the_one_of_the_shortest_prompts_counts():
    tenants = Tenants()
    for tenant, num_prompt in (("guest", 250), ("short", 150)):
        tenants.runs(tenant, num_prompt, num_prompt)
    own_s = BASE_S + 2 * TOKEN_S + 2 * ROW_S + 400 * KEY_S
    assert tenants.spare_s() == pytest.approx(0.4 * (own_s + 1.5 * BASE_S + 150 * TOKEN_S))


def test_a_usual_prompt_is_an_average_of_the_latest_as_far_as_they_were_computed():
    tenants = Tenants()
    tenants.runs("guest", 80, 80)
    tenancy = tenants.queue._tenancies["guest"]
    assert tenancy.prompt_len == 80
    tenants.runs("guest", 80 + 8 * PROMPT_MEMORY, 0)
    assert tenancy.prompt_len == 88
    late = tenants.waits("guest", 500)
    tenants.queue.remove(late)
    late.num_computed = 500 - 88
    tenants.queue.began(late)
    assert tenancy.prompt_len == 88


@pytest.mark.parametrize(("lead", "is_next"), [(12 * MAX_CHUNK, True), (12 * MAX_CHUNK + 1, False)])
def test_a_guest_that_is_far_ahead_is_not_next_and_its_prompts_are_not_waited_for(lead, is_next):
    """Of a weight of two, half a token of the counter is one of its own."""
    tenants = Tenants()
    tenants.waits("guest", 50)
    tenancies = tenants.queue._tenancies
    tenancies["flood"].counter, tenancies["guest"].counter = 7.0, 7.0 + lead / 2
    tenancies["guest"].weight = 2.0
    num_due_s = 0.1 * (BASE_S + 50 * TOKEN_S)
    before_s = 0.4 * (2 * BASE_S + 50 * TOKEN_S)
    assert tenants.spare_s() == pytest.approx(num_due_s if is_next else before_s)


def test_nothing_is_bounded_while_nobody_floods_or_costs_are_not_known():
    assert Tenants().spare_s() is None, "nobody else is here"
    unknown = Tenants(is_known=False)
    unknown.waits("guest", 50)
    assert unknown.spare_s() is None
    calm = Tenants()
    calm.waits("guest", 50)
    calm.queue.remove(calm.flood.pop())
    assert calm.spare_s() is None, "two prompts are not more than two of its usual ones"


def test_a_prompt_of_a_flood_that_runs_counts_for_what_is_left_of_it():
    tenants = Tenants()
    tenants.waits("guest", 50)
    tenants.queue.remove(tenants.flood.pop())
    running = tenants.runs("flood", 500, 499)
    assert tenants.spare_s() is not None, "1001 tokens are at hand"
    running.num_computed = 500
    assert tenants.spare_s() is None


def test_a_flood_gets_on_a_little_in_any_step():
    tenants = Tenants()
    tenants.waits("guest", 1)
    allowance = tenants.queue.allowance(tenants.flood[0])
    assert allowance is not None
    allowance._spare_s = 0.0
    assert allowance.take(0, 400) == LEAST_TOKENS
    assert tenants.queue._this_step().is_closed_to(tenants.queue._tenancies["flood"])
    assert not tenants.queue._this_step().is_closed_to(tenants.queue._tenancies["guest"])


def test_the_only_guest_of_a_flood_may_begin_any_number_of_prompts():
    tenants = Tenants()
    step = lambda: tenants.queue._this_step()  # noqa: E731
    tenancies = tenants.queue._tenancies
    tenants.waits("guest", 50)
    tenants.queue.next_step(0.0)
    assert step().is_free(tenancies["guest"])
    assert not step().is_free(tenancies["flood"]), "somebody is near"
    assert step().is_guest_of(tenancies["guest"], tenancies["flood"])
    assert not step().is_guest_of(tenancies["flood"], tenancies["flood"])
    assert not step().is_guest_of(tenancies["guest"], tenancies["guest"])
    tenants.waits("second guest", 50)
    tenants.queue.next_step(0.0)
    assert not step().is_free(tenancies["guest"])


def test_a_flood_that_nobody_is_near_may_begin_any_number_of_prompts():
    tenants = Tenants()
    tenants.queue.next_step(0.0)
    assert tenants.queue._this_step().is_free(tenants.queue._tenancies["flood"])
