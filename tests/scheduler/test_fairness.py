"""The fair policy: who is next, what counts, and what a tenant that floods can do to another. On a virtual clock."""

import random
from collections import Counter
from dataclasses import astuple

import pytest

from aserve.core.errors import OverloadedError
from aserve.core.ids import SeqId
from aserve.scheduler.fairness import PRESENCE_S, RECENT_S, FairQueue
from aserve.scheduler.queue import first_come_first_served, priority_with_ageing
from tests.scheduler.simulation import Arrival, Outcome, Simulation, jain, simulate
from tests.scheduler.sync_loop import SyncLoop, request

LONG = (0, 1, 2, 0, 1, 2, 0, 1)


def fair_loop(**limits: object) -> SyncLoop:
    return SyncLoop(is_fair=True, **{"num_blocks": 60, "watermark": 0.0} | limits)


def counters(loop: SyncLoop) -> dict[str, float]:
    queue = loop.scheduler._residents.waiting
    assert isinstance(queue, FairQueue)
    queue.settle()
    return queue.counters()


def admitted(loop: SyncLoop) -> list[int]:
    return [init.seq_id for plan in loop.plans for init in plan.inits]


def test_of_two_tenants_the_one_that_got_less_is_next():
    loop = fair_loop(max_num_seqs=1)
    for i in range(3):
        loop.add(request(f"a{i}", (0, i), max_tokens=3, tenant="a"))
    for i in range(3):
        loop.add(request(f"b{i}", (1, i), max_tokens=3, tenant="b"))
    loop.drain()
    loop.compare()
    assert admitted(loop) == [0, 3, 1, 4, 2, 5]


def test_a_weight_of_three_is_three_requests_to_one():
    loop = fair_loop(max_num_seqs=1)
    for i in range(8):
        loop.add(request(f"a{i}", (0, i % 3), max_tokens=3, tenant="a"))
        loop.add(request(f"b{i}", (1, i % 3), max_tokens=3, tenant="b", weight=3.0))
    loop.drain()
    first = [seq_id % 2 for seq_id in admitted(loop)[:8]]
    assert Counter(first) == {0: 2, 1: 6}


def test_what_is_counted_is_computed_tokens_and_those_of_answers_twice():
    loop = fair_loop()
    loop.add(request("a", LONG, max_tokens=1, tenant="a"))
    loop.drain()
    assert counters(loop) == {"a": len(LONG) + 2.0}


def test_what_the_prefix_cache_has_costs_nothing():
    loop = fair_loop()
    loop.add(request("a", LONG, max_tokens=1, tenant="a"))
    loop.drain()
    before = counters(loop)["a"]
    loop.add(request("again", LONG, max_tokens=1, tenant="a"))
    loop.drain()
    num_hits = loop.scheduler.statistics().num_cache_hits
    assert num_hits == 6
    assert counters(loop)["a"] - before == len(LONG) - num_hits + 2.0


def test_a_tenants_weight_is_that_of_its_latest_request():
    loop = fair_loop()
    loop.add(request("a", LONG, max_tokens=1, tenant="a"))
    loop.drain()
    before = counters(loop)["a"]
    loop.add(request("b", (1, *LONG[1:]), max_tokens=1, tenant="a", weight=2.0))
    loop.drain()
    assert counters(loop)["a"] - before == (len(LONG) + 2.0) / 2.0


def test_who_asked_for_nothing_has_saved_nothing_up():
    loop = fair_loop(max_num_seqs=1)
    for i in range(6):
        loop.add(request(f"a{i}", (0, i % 3, i % 2), max_tokens=4, tenant="a"))
    for _ in range(12):
        loop.step()
    served = len(admitted(loop))
    assert served >= 2
    for i in range(6):
        loop.add(request(f"b{i}", (1, i % 3, i % 2), max_tokens=4, tenant="b"))
    loop.drain()
    turns = ["a" if seq_id < 6 else "b" for seq_id in admitted(loop)[served:]]
    assert all(turns[i : i + 3] != ["b"] * 3 for i in range(4))


def test_within_a_tenant_priorities_are_heeded():
    loop = fair_loop(max_num_seqs=1, policy=priority_with_ageing(60.0))
    for name, priority in (("x", 3), ("y", -1), ("z", 0)):
        loop.add(request(name, (0, 1), max_tokens=1, priority=priority, tenant="a"))
    loop.drain()
    assert admitted(loop) == [1, 2, 0]


def test_choices_of_a_request_that_runs_go_before_all_others():
    loop = fair_loop(max_num_seqs=2)
    loop.add(request("a", (0, 1), max_tokens=4, n=3, temperature=1.0, tenant="a"))
    loop.step()
    loop.add(request("b", (1, 1), max_tokens=2, tenant="b"))
    loop.drain()
    loop.compare()
    assert admitted(loop) == [0, 1, 2, 3]


def test_who_was_preempted_goes_before_newcomers():
    loop = fair_loop(num_blocks=6)
    loop.add(request("old", (0, 0, 0, 0), max_tokens=6, tenant="a"))
    loop.add(request("new", (1, 1, 1, 1), max_tokens=4, tenant="a"))
    loop.plan()
    loop.plan()
    assert loop.scheduler.statistics().num_preemptions == 1
    loop.add(request("other", (2,), max_tokens=1, tenant="b"))
    loop.drain()
    loop.compare()
    assert admitted(loop) == [0, 1, 1, 2]


@pytest.mark.parametrize(("tenants", "num_running"), [("a", 8), ("ab", 7)])
def test_the_last_rows_are_kept_for_who_has_few_once_there_are_several(tenants, num_running):
    loop = fair_loop(max_num_seqs=8, max_num_batched_tokens=64)
    for tenant in tenants:
        loop.add(request(f"first of {tenant}", (0,), max_tokens=1, tenant=tenant))
    loop.drain()
    for i in range(9):
        loop.add(request(f"a{i}", (0, 1, i % 3), max_tokens=4, tenant="a"))
    loop.plan()
    assert loop.scheduler.statistics().num_running == num_running
    loop.drain()


def test_while_a_prompt_is_unfinished_its_tenant_starts_nothing_more():
    loop = fair_loop(max_num_batched_tokens=8, long_prefill_token_threshold=4)
    loop.add(request("b", (1,), max_tokens=1, tenant="b"))
    loop.drain()
    loop.add(request("a0", LONG + LONG, max_tokens=1, tenant="a"))
    loop.add(request("a1", LONG, max_tokens=1, tenant="a"))
    loop.plan()
    loop.add(request("b1", (1, 2), max_tokens=1, tenant="b", arrival_s=1.0))
    second = loop.plan()
    assert second is not None
    assert [(piece.seq_id, piece.num_tokens) for piece in second.slices] == [(1, 4), (3, 2)]
    loop.drain()


def test_who_has_been_away_for_long_is_forgotten():
    loop = fair_loop()
    for name, arrival_s in (("a", 0.0), ("b", PRESENCE_S), ("c", PRESENCE_S + 1.0)):
        loop.now = arrival_s
        loop.add(request(name, (0, 1), max_tokens=1, tenant=name, arrival_s=arrival_s))
        loop.drain()
    assert set(counters(loop)) == {"b", "c"}


def test_each_tenant_has_a_queue_of_its_own_to_fill():
    loop = fair_loop(max_num_queued_reqs=2)
    for i in range(2):
        loop.add(request(f"a{i}", (0, 1), tenant="a"))
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        loop.add(request("a2", (0, 1), tenant="a"))
    loop.add(request("b", (1, 1), tenant="b"))
    loop.drain()


def test_a_newcomer_is_told_of_its_own_turn_and_not_of_the_whole_queue():
    queue = SyncLoop(is_fair=True, num_blocks=60)
    for i in range(30):
        queue.add(request(f"a{i}", LONG, tenant="a"))
    queue.add(request("b", (1, 1), tenant="b"))
    ahead = {}
    for tenant in "ab":
        coming = request("next", (0,), tenant=tenant)
        waiting = queue.scheduler._residents.waiting
        ahead[tenant] = waiting.ahead_of(coming, first_come_first_served(coming, SeqId(99)))
    assert (ahead["a"].num_sequences, ahead["a"].num_queued) == (31, 30)  # all that there is
    assert (ahead["b"].num_sequences, ahead["b"].num_prompt_tokens) == (2, 4)  # its own, and as much of a's
    queue.drain()


def flood(seed: int, tenant: str, per_s: float, seconds: float, prompts: tuple[int, int], answers: tuple[int, int]):
    """Requests as they come by chance, whether or not those before have been answered."""
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(per_s)) < seconds:
        yield Arrival(at_s, tenant, rng.randint(*prompts), rng.randint(*answers))


SECONDS = 60.0
POLITE = tuple(flood(1, "polite", 4.0, SECONDS, (50, 200), (20, 60)))


def both(per_s: float, prompts: tuple[int, int], answers: tuple[int, int], **limits: object) -> Outcome:
    return simulate((*POLITE, *flood(2, "greedy", per_s, SECONDS, prompts, answers)), SECONDS, **limits)


@pytest.mark.slow
@pytest.mark.parametrize("answers", [(300, 900), (300, 300)], ids=["long answers", "answers of one length"])
def test_a_flood_of_long_answers_makes_nobody_wait_half_as_long_again(answers):
    """4 requests a second beside 40, of which the machine can answer 5: the time to the first token, at the p95."""
    alone = simulate(POLITE, SECONDS, is_fair=True).p95("polite")
    assert both(40.0, (50, 200), answers, is_fair=True).p95("polite") <= 1.5 * alone
    assert both(40.0, (50, 200), answers).p95("polite") > 100 * alone


FLOODS = {"long prompts": (35.0, (1000, 3000), (1, 20)), "short requests": (560.0, (50, 200), (1, 2))}
"""Requests a second, and tokens: five times what the machine can do."""
GUESTS = {
    "short": (30.0, 4.0, (50, 200)),
    "short, for longer": (60.0, 4.0, (50, 200)),
    "of two chunks": (120.0, 1.0, (300, 900)),
    "of ten chunks": (120.0, 0.5, (1500, 3000)),
}
"""For how many seconds, requests a second, and tokens of a prompt."""


@pytest.mark.slow
@pytest.mark.parametrize("flooding", FLOODS)
@pytest.mark.parametrize(
    "guest", ["short", *(pytest.param(name, marks=pytest.mark.thorough) for name in list(GUESTS)[1:])]
)
def test_a_flood_of_prompts_makes_nobody_wait_half_as_long_again(guest, flooding):
    """Catches a flood's prompts in the steps that others wait for, and prompts of a guest that hold each other up."""
    seconds, per_s, prompts = GUESTS[guest]
    polite = tuple(flood(1, "polite", per_s, seconds, prompts, (20, 60)))
    many, lengths, answers = FLOODS[flooding]
    greedy = tuple(flood(2, "greedy", many, seconds, lengths, answers))
    alone = simulate(polite, seconds, is_fair=True)
    flooded = simulate((*polite, *greedy), seconds, is_fair=True)
    assert flooded.p95("polite") <= 1.5 * alone.p95("polite")
    assert len(flooded.first_token_s["polite"]) >= len(alone.first_token_s["polite"]) - 1
    unbothered = simulate(greedy, seconds, is_fair=True)
    assert flooded.service["greedy"] >= 0.6 * unbothered.service["greedy"]


@pytest.mark.slow
@pytest.mark.parametrize("flooding", FLOODS)
def test_who_is_alone_pays_nothing(flooding):
    """Catches bounds on a flood's prompts for the sake of nobody: before others came, and a minute after."""
    per_s, prompts, answers = FLOODS[flooding]
    arrivals = tuple(flood(2, "greedy", per_s, 5.0, prompts, answers))
    assert simulate(arrivals, 5.0, is_fair=True) == simulate(arrivals, 5.0)
    guest = Arrival(0.0, "polite", 50, 5)
    later = [Arrival(arrival.at_s + RECENT_S + 1.0, *astuple(arrival)[1:]) for arrival in arrivals]
    seconds = RECENT_S + 6.0
    left = simulate((guest, *later), seconds, is_fair=True)
    assert left.service["greedy"] >= 0.99 * simulate(later, seconds, is_fair=True).service["greedy"]


@pytest.mark.slow
def test_tenants_that_are_never_satisfied_share_by_weight():
    shapes = {"a": (1.0, (20, 60), (200, 400)), "b": (2.0, (400, 900), (10, 40)), "c": (4.0, (20, 60), (20, 60))}
    seconds = 20.0
    arrivals = [
        Arrival(0.0, tenant, one.num_prompt, one.num_tokens, weight)
        for tenant, (weight, prompts, answers) in shapes.items()
        for one in flood(3, tenant, 100.0, seconds, prompts, answers)
    ]
    simulation = Simulation(arrivals, is_fair=True)
    outcome = simulation.run(seconds)
    assert {arrival.tenant for arrival in arrivals} == {
        sequence.request.tenant for sequence in simulation.scheduler._residents.waiting
    }, "all of them still wait"
    assert jain(outcome.service[tenant] / weight for tenant, (weight, _, _) in shapes.items()) >= 0.95
    unfair = simulate(arrivals, seconds).service
    assert jain(unfair[tenant] / weight for tenant, (weight, _, _) in shapes.items()) < 0.5


class Witness(Simulation):
    """Holds what is claimed in fairness.py to every admission: how many of others came before it."""

    def __init__(self, arrivals: list[Arrival], weights: dict[str, float], **limits: object) -> None:
        super().__init__(arrivals, is_fair=True, max_num_seqs=1, **limits)  # with one row nobody is ever held back
        self.num_checked = 0
        self._weights = weights
        self._heads: dict[str, tuple[object, dict[str, float], Counter[str]]] = {}

    def _step(self, plan):
        queue = self.scheduler._residents.waiting
        sequences = self.scheduler._roster.sequences
        now = {name: tenancy.counter for name, tenancy in queue._tenancies.items()}
        for init in plan.inits:
            request_ = sequences[init.seq_id].request
            head = self._heads.pop(request_.tenant, None)
            if head is not None and head[0] is request_:
                self._hold(request_.tenant, now, head[1], head[2])
            for _, _, passed in self._heads.values():
                passed[request_.tenant] += 1
        queue.settle()
        for name, tenancy in queue._tenancies.items():
            first = tenancy.queue.first.request if tenancy.queue else None
            if first is not None and (name not in self._heads or self._heads[name][0] is not first):
                self._heads[name] = (first, queue.counters(), Counter())
        super()._step(plan)

    def _hold(self, tenant: str, now: dict[str, float], before: dict[str, float], passed: Counter[str]) -> None:
        for other, count in passed.items():
            gap = now[tenant] - before.get(other, 0.0)
            assert count <= max(0.0, gap) * self._weights[other] + 1, (tenant, other)
        self.num_checked += 1


@pytest.mark.parametrize("seed", range(4))
def test_nobody_starves(seed):
    """However heavy the others are and however many of them keep coming."""
    rng = random.Random(seed)
    weights = {name: rng.choice((0.1, 1.0, 7.0)) for name in "abcd"}
    arrivals = [
        Arrival(rng.uniform(0.0, 20.0), tenant, rng.randint(1, 400), rng.randint(1, 60), weight)
        for tenant, weight in weights.items()
        for _ in range(60)
    ]
    witness = Witness(arrivals, weights)
    outcome = witness.run()
    assert len(outcome.finished) == len(arrivals)
    assert witness.num_checked > 100
