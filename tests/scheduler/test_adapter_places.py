"""At most so many adapters run at once; who would bring one more holds nobody back, and is not held back for ever."""

import pytest

from aserve.scheduler.adapter_places import MOST_PASSING, AdapterPlaces
from tests.scheduler.sync_loop import SyncLoop, request

POLICIES = [{}, {"is_fair": True}]


def running(loop: SyncLoop) -> list[int | None]:
    return [sequence.request.adapter for sequence in loop.scheduler._residents.running]


def new_loop(**options: object) -> SyncLoop:
    return SyncLoop(**{"num_blocks": 400, "max_num_seqs": 4, "max_num_batched_tokens": 64, **options})


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_others_pass_who_brings_an_adapter_too_many(policy):
    """With places for two: the third adapter waits, and those behind it, with these two or with none, do not."""
    loop = new_loop(max_loras=2, **policy)
    for name, adapter in (("a", 1), ("b", 2), ("c", 3), ("d", 2), ("e", None)):
        loop.add(request(name, (0, 1), max_tokens=4, adapter=adapter))
    loop.step()
    assert running(loop) == [1, 2, 2, None]
    loop.cancel("a")
    loop.step()
    assert running(loop) == [2, 3, 2, None]  # in order of arrival
    loop.drain()
    loop.compare()


def test_statistics_tell_the_adapters_that_run_and_those_that_wait():
    loop = new_loop(max_loras=2)
    for name, adapter in (("a", 1), ("b", 2), ("c", 3), ("d", 2), ("e", None)):
        loop.add(request(name, (0, 1), max_tokens=4, adapter=adapter))
    assert loop.scheduler.statistics().running_adapters == ()
    assert sorted(loop.scheduler.statistics().waiting_adapters) == [1, 2, 3]
    loop.step()
    assert sorted(loop.scheduler.statistics().running_adapters) == [1, 2]
    assert loop.scheduler.statistics().waiting_adapters == (3,)
    loop.drain()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_without_a_bound_all_adapters_run(policy):
    loop = new_loop(**policy)
    for adapter in (1, 2, 3):
        loop.add(request(f"r{adapter}", (0, 1), adapter=adapter))
    loop.step()
    assert running(loop) == [1, 2, 3]
    loop.drain()
    loop.compare()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_whoever_waits_for_a_place_is_passed_so_many_times_and_no_more(policy):
    """Requests of one adapter keep coming, and overlap: without a bound they would keep its place for ever."""
    loop = new_loop(max_loras=1, max_num_seqs=3, **policy)
    loop.add(request("first", (0, 1), max_tokens=5, adapter=1))
    loop.add(request("patient", (0, 1), max_tokens=3, adapter=2))
    for number in range(8 * MOST_PASSING):
        loop.add(request(f"r{number}", (number % 3, 1), max_tokens=4 + number % 3, adapter=1, arrival_s=1.0 + number))
        loop.step()
        if loop.answers["patient"].token_ids:
            break
    assert loop.answers["patient"].token_ids, "it waits for ever"
    admitted = [init.seq_id for plan in loop.plans for init in plan.inits]
    assert admitted.index(1) == 1 + MOST_PASSING
    loop.drain()
    loop.compare()


def test_without_an_adapter_nobody_waits_for_a_place():
    """Also while somebody has been passed for long, and those with adapters are held back for it."""
    loop = new_loop(max_loras=1, max_num_seqs=3)
    loop.add(request("long", (0, 1), max_tokens=500, adapter=1))
    loop.add(request("patient", (0, 1), max_tokens=3, adapter=2))
    for number in range(MOST_PASSING + 3):
        loop.add(request(f"r{number}", (number % 3, 1), max_tokens=1, adapter=1, arrival_s=1.0 + number))
        loop.step()
    loop.add(request("held back", (0, 0), max_tokens=1, adapter=1, arrival_s=1000.0))
    loop.add(request("base", (1, 1), max_tokens=1, arrival_s=1001.0))
    for _ in range(4):
        loop.step()
    assert loop.answers["base"].token_ids
    assert not loop.answers["held back"].token_ids
    loop.cancel("long")
    loop.drain()
    loop.compare()


class Waiter:
    """Of a sequence, what `AdapterPlaces` looks at."""

    def __init__(self, seq_id: int, adapter: int) -> None:
        self.id = seq_id
        self.request = self
        self.adapter = adapter


def test_who_is_passed_is_who_was_held_back_first_since_somebody_was_admitted():
    """Caught: `_first = None` removed from `admitted`, by which one who is first no more would be counted as passed."""
    earlier, first, follower = Waiter(1, 2), Waiter(2, 3), Waiter(3, 1)
    places = AdapterPlaces(1, [Waiter(0, 1)], [])
    places.settle()
    assert not places.allows(earlier)
    places.admitted(follower)
    for _ in range(MOST_PASSING):
        assert not places.allows(first)
        assert places.allows(follower)
        places.admitted(follower)
    assert not places.allows(first)
    assert not places.allows(follower), "it has been passed so often that it is next"
