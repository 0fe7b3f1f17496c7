"""The sweep: at every call between floors, at its k-th time, whatever can be raised is raised, and nobody else notices.

pytest -m thorough -n logical tests/faults sweeps all points, a test each, and says at its end what became of all cases.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.conftest import SWEPT
from tests.faults.points import FAULTS, Point
from tests.faults.rooms import ALL_POINTS
from tests.faults.sweep import Sweep

pytestmark = pytest.mark.torch

MOST_CALLS = 20
NUM_SAMPLED = 100


ONCE_FAULTY = (
    ("cache seal", 13, RuntimeError),
    ("connections mark", 7, RuntimeError),
    ("connection write", 6, RuntimeError),
    ("response store put", 8, RuntimeError),
    ("batch turn", 7, asyncio.CancelledError),
    ("batch stopped", 7, asyncio.CancelledError),
    ("tokenizer token_texts", 14, RuntimeError),
    ("mailbox offer", 11, RuntimeError),
)
"""Cases that were not clean when all points were swept to the 20th call."""


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


async def test_what_a_whole_sweep_found_is_clean():
    points = {point.name: point for point in ALL_POINTS}
    async with Sweep() as sweep:
        for name, k, fault in ONCE_FAULTY:
            outcome = await sweep.run(points[name], k, fault)
            assert outcome.has_fired
            assert not outcome.complaints, f"{name}, call {k}, {fault.__name__}: {outcome.complaints}"


def test_each_point_has_a_name_of_its_own():
    """Catches a point that is taken for another in what the sweep prints."""
    names = Counter(point.name for point in ALL_POINTS)
    assert max(names.values()) == 1, names.most_common(3)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", ALL_POINTS, ids=lambda point: point.name)
async def test_a_point_is_clean_at_every_call(point: Point, record_property: Callable[[str, object], None]):
    async with Sweep() as sweep:
        counts = await swept(sweep, point)
    assert counts["fired"], "it is never called"
    record_property(SWEPT, {"points": 1, **counts})
