"""What simulated steps take: prices fitted to recorded ones, on a machine that is as fast as it was at that time.

    recorded     |== step ==|== step ==|=====|  stands still  |=====|= quick =|       price, and took
    machine           1           1       1          0           1       2            how fast it was, over the usual
    simulated        |=== step ===|=== step ==|  waits for it  |==|                   price, on that machine

A step that only decodes and one with prompts run other kernels, so each kind has prices of its own, and what it usually
takes of them: the median of its steps around that time. One that only decodes behind one with prompts takes as much
longer as such steps did. What is left is not the step's own but its time's: caches, a clock that changes, who else had
the processor. It is kept as the machine's speed then, which whoever is simulated finds there: so a slow while is as
long as it was, and who comes in a moment in which all stands still waits for its end.
"""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median
from typing import Final

from aserve.scheduler.step_cost import Load, prices_of
from aserve.simulation.traffic import Kind, Step

LEAST_STEPS: Final = 16
"""Of a kind, to have prices of its own."""
NUM_NEAR: Final = 24
"""Steps of a kind nearest in time, which tell what it usually takes."""
STANDS_STILL: Final = 2.0
"""A step that takes longer than so many times the usual was as fast as usual, but for a while in which nothing was."""


def _near(times: Sequence[float], at_s: float, num: int) -> range:
    """The places of so many times around one, or of all."""
    first = max(0, min(bisect_left(times, at_s) - num // 2, len(times) - num))
    return range(first, min(len(times), first + num))


class _Priced:
    """Steps of one kind, in their order. swap_s: seconds of a block that is moved, which is not priced."""

    def __init__(self, steps: Sequence[Step], swap_s: float) -> None:
        own_s = [max(step.took_s - step.num_moved * swap_s, 1e-6) for step in steps]
        self._swap_s = swap_s
        self._fitted = prices_of((step.load, seconds) for step, seconds in zip(steps, own_s, strict=True))
        self._times = [step.at_s for step in steps]
        ratios = [seconds / self._price(step.load) for step, seconds in zip(steps, own_s, strict=True)]
        self._usual = [
            median(ratios[near.start : near.stop])
            for near in (_near(self._times, at_s, NUM_NEAR) for at_s in self._times)
        ]

    def usual_s(self, step: Step) -> float:
        """Of a step like that at its time of the recording."""
        place = min(bisect_left(self._times, step.at_s), len(self._times) - 1)
        return self._price(step.load) * self._usual[place] + step.num_moved * self._swap_s

    def _price(self, load: Load) -> float:
        return max(self._fitted.of(load), 1e-6)


class _Machine:
    """How far it came, by time: seconds of usual work. As fast as usual where nothing was recorded."""

    def __init__(self, steps: Sequence[tuple[Step, float]]) -> None:
        """steps: in the order in which they landed, each with what it usually takes. At least one."""
        first = steps[0][0]
        self._times, self._done = [first.landed_s - first.took_s], [0.0]
        for step, usual_s in steps:
            begins_s = max(step.landed_s - step.took_s, self._times[-1])
            seconds = step.landed_s - begins_s
            if seconds <= 0.0:
                continue
            work_s = usual_s * seconds / step.took_s
            self._to(begins_s, begins_s - self._times[-1])
            if seconds > STANDS_STILL * work_s:
                self._to(begins_s + work_s / 2, work_s / 2)
                self._to(step.landed_s - work_s / 2, 0.0)
                work_s /= 2
            self._to(step.landed_s, work_s)

    def _to(self, at_s: float, work_s: float) -> None:
        self._times.append(at_s)
        self._done.append(self._done[-1] + work_s)

    def ends_s(self, begins_s: float, work_s: float) -> float:
        """When work is done that is begun then."""
        wanted = self._done_at(begins_s) + work_s
        place = bisect_left(self._done, wanted)
        if place == len(self._done):
            return max(begins_s, self._times[-1]) + wanted - max(self._done_at(begins_s), self._done[-1])
        if place == 0:
            return begins_s + work_s
        (from_s, to_s), (before, after) = self._times[place - 1 : place + 1], self._done[place - 1 : place + 1]
        return from_s + (to_s - from_s) * (wanted - before) / (after - before)

    def _done_at(self, at_s: float) -> float:
        place = bisect_right(self._times, at_s)
        if place == 0:
            return at_s - self._times[0]
        if place == len(self._times):
            return self._done[-1] + at_s - self._times[-1]
        (from_s, to_s), (before, after) = self._times[place - 1 : place + 1], self._done[place - 1 : place + 1]
        return before + (after - before) * (at_s - from_s) / (to_s - from_s)


class Costs:
    """Of the steps of a recording. Draws gaps from its own generator: a fresh one for each simulation."""

    def __init__(self, steps: Sequence[Step], swap_s: float, seed: int = 0) -> None:
        steps = sorted(steps, key=lambda step: step.at_s)
        alike = {kind: [step for step in steps if step.kind is kind] for kind in Kind}
        every = _Priced(steps, swap_s)
        self._kinds = {
            kind: _Priced(some, swap_s) if len(some) >= LEAST_STEPS else every for kind, some in alike.items()
        }
        self._kinds[Kind.BEHIND], self._behind_s = self._kinds[Kind.DECODE], 0.0
        if len(alike[Kind.BEHIND]) >= LEAST_STEPS:
            self._behind_s = max(0.0, median(step.took_s - self._usual_s(step) for step in alike[Kind.BEHIND]))
        self._machine = _Machine([(step, self._usual_s(step)) for step in steps])
        gaps = [(step.at_s, step.gap_s) for step in steps if step.gap_s is not None] or [(0.0, 0.0)]
        self._gap_times = [at_s for at_s, _ in gaps]
        self._gaps = [gap_s for _, gap_s in gaps]
        self._rng = random.Random(seed)

    def seconds(self, step: Step, speed: float = 1.0) -> float:
        """What a step takes that is begun at its at_s, of the recording's clock, which goes so much faster.

        Its took_s and landed_s are not looked at.
        """
        work_s = self._usual_s(step) * speed
        return (self._machine.ends_s(step.at_s, work_s) - step.at_s) / speed

    def gap_s(self, at_s: float) -> float:
        """From a landing at that time of the recording to the next plan."""
        return self._gaps[self._rng.choice(_near(self._gap_times, at_s, NUM_NEAR))]

    def _usual_s(self, step: Step) -> float:
        return self._kinds[step.kind].usual_s(step) + (self._behind_s if step.kind is Kind.BEHIND else 0.0)
