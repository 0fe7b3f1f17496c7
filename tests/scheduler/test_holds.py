"""Why the first of those who wait was not admitted: the reason that is told is the one that there is."""

import pytest

from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.states import Hold
from tests.scheduler.sync_loop import SyncLoop, request

LONG = (1, 2) * 6


def hold_of(loop: SyncLoop) -> Hold | None:
    return loop.scheduler.readings.hold


def test_nobody_waits_and_nobody_is_held_back():
    loop = SyncLoop()
    assert hold_of(loop) is None
    loop.add(request("a", (1, 2, 1), 3))
    loop.plan()
    assert hold_of(loop) is None


@pytest.mark.parametrize(
    ("limits", "hold"),
    [
        ({"num_blocks": 9, "max_num_batched_tokens": 64}, Hold.MEMORY),
        ({"num_blocks": 40, "max_num_batched_tokens": 64, "max_num_seqs": 1}, Hold.ROWS),
        ({"num_blocks": 40, "max_num_batched_tokens": 8}, Hold.BUDGET),
        ({"num_blocks": 40, "max_num_batched_tokens": 64, "max_loras": 1}, Hold.ADAPTERS),
    ],
)
def test_what_is_short_is_named(limits, hold):
    loop = SyncLoop(**limits)
    adapters = (1, 2) if hold is Hold.ADAPTERS else (None, None)
    for name, prompt, adapter in zip("ab", (LONG, (2, *LONG)), adapters, strict=True):
        loop.add(request(name, prompt, 4, adapter=adapter))
    loop.plan()
    assert hold_of(loop) is hold


def test_a_sibling_waits_for_the_prompt_that_it_shares():
    loop = SyncLoop(num_blocks=40, max_num_batched_tokens=64)
    loop.add(request("a", LONG, 4, n=2, temperature=1.0))
    loop.plan()
    assert hold_of(loop) is Hold.SIBLING


def test_newcomers_wait_for_who_is_swapped_out():
    loop = SyncLoop(num_blocks=8, num_host_blocks=20, preemption=PreemptionRule("swap"), max_num_batched_tokens=64)
    loop.add(request("a", (1, 2, 1, 2, 1), 8))
    loop.add(request("b", (2, 2, 1, 2, 1), 8))
    while not loop.scheduler.statistics().num_swapped:
        assert loop.step()
    loop.add(request("c", (2, 1, 2), 2))
    loop.step()
    assert loop.scheduler.statistics().num_swapped
    assert hold_of(loop) is Hold.SWAPPED
    loop.drain()
