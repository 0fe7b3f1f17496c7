"""The sweep: at every call between floors, at its k-th time, whatever can be raised is raised, and nobody else notices.

python -m tests.faults.test_sweep prints what became of the whole product, and takes minutes.
"""

import asyncio
import random
import sys
from collections import Counter

import pytest

from tests.faults.points import FAULTS, Point
from tests.faults.rooms import ALL_POINTS
from tests.faults.sweep import Sweep

pytestmark = pytest.mark.torch

MOST_CALLS = 20
NUM_SAMPLED = 100


async def swept(sweep: Sweep, point: Point) -> Counter[str]:
    """All cases of a point, up to a k-th call that is never made."""
    counts: Counter[str] = Counter()
    for k in range(1, MOST_CALLS + 1):
        num_fired = 0
        for fault in FAULTS:
            outcome = await sweep.run(point, k, fault)
            assert not outcome.complaints, f"{point.name}, call {k}, {fault.__name__}: {outcome.complaints}"
            num_fired += outcome.has_fired
            counts["ended own request"] += outcome.has_ended_own
            counts["engine declared dead"] += outcome.has_ended_engine
        counts["cases"] += len(FAULTS)
        counts["fired"] += num_fired
        if not num_fired:
            break
    counts["nobody noticed"] = counts["fired"] - counts["ended own request"] - counts["engine declared dead"]
    complaints = sweep.collect()
    assert not complaints, f"{point.name}: {complaints}"
    return counts


async def test_a_sample_of_the_sweep_is_clean():
    """Some points, in all worlds; half of them at their first calls, which is where most is under way."""
    rng = random.Random(6)
    num_fired = 0
    async with Sweep() as sweep:
        for number, point in enumerate(rng.sample(ALL_POINTS, NUM_SAMPLED)):
            k = rng.randint(1, 3 if number < NUM_SAMPLED // 2 else MOST_CALLS)
            fault = rng.choice(FAULTS)
            outcome = await sweep.run(point, k, fault)
            assert not outcome.complaints, f"{point.name}, call {k}, {fault.__name__}: {outcome.complaints}"
            num_fired += outcome.has_fired
        assert not sweep.collect()
    assert num_fired > NUM_SAMPLED // 2


def test_each_point_has_a_name_of_its_own():
    """Catches a point that is taken for another in what the sweep prints."""
    names = Counter(point.name for point in ALL_POINTS)
    assert max(names.values()) == 1, names.most_common(3)


@pytest.mark.thorough
@pytest.mark.timeout(7200)
async def test_the_whole_sweep_is_clean():
    total = await print_sweep()
    assert total["fired"] > 5_600
    assert len(ALL_POINTS) >= 40


async def print_sweep() -> Counter[str]:
    """Sweep all points and say what became of them."""
    total: Counter[str] = Counter()
    async with Sweep() as sweep:
        for point in ALL_POINTS:
            counts = await swept(sweep, point)
            assert counts["fired"], f"{point.name} is never called"
            print(f"{point.name:24}", dict(counts), flush=True)
            total += counts
    print(f"{len(ALL_POINTS)} points", dict(total))
    return total


if __name__ == "__main__":
    sys.exit(asyncio.run(print_sweep())["cases"] == 0)
