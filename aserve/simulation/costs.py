"""What simulated steps take: prices fitted to recorded ones, and how far these were from their prices.

A step that only decodes and one with prompts run other kernels, so each kind has prices of its own. What a price does
not know (caches, a clock that changes, who else had the processor) is drawn, by a seed, from what recorded steps took
over or under theirs: of those nearest in time one near in price, for what makes steps slow does so for a while, and
large ones otherwise than small ones. So latencies have the tails that they had, slow spells are where they were in the
traffic, and two simulations are the same.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from math import log
from typing import Final

from aserve.scheduler.step_cost import Load, prices_of
from aserve.simulation.traffic import Step

LEAST_STEPS: Final = 16
"""Of a kind, to have prices of its own."""
NUM_NEAR: Final = 24
"""Steps nearest in time, of which the nearest in price is taken."""
ALIKE: Final = 0.05
"""Prices that are as near to each other, as a share, are told apart by the draw."""
DRAWN_BEFORE: Final = 1.0
"""What has been drawn is as much further off, each time: what was rare comes up about as often as it did."""


def _near(times: Sequence[float], at_s: float, num: int) -> range:
    """The places of so many times around one, or of all."""
    first = max(0, min(bisect_left(times, at_s) - num // 2, len(times) - num))
    return range(first, min(len(times), first + num))


class _Kind:
    """Steps of one kind. swap_s: seconds of a block that is moved, which is not priced."""

    def __init__(self, steps: Sequence[Step], swap_s: float) -> None:
        own_s = [max(step.took_s - step.num_moved * swap_s, 1e-6) for step in steps]
        self._fitted = prices_of((step.load, seconds) for step, seconds in zip(steps, own_s, strict=True))
        known = sorted(
            (step.at_s, price, seconds / price)
            for step, seconds in zip(steps, own_s, strict=True)
            for price in [self._price(step.load)]
        )
        self._times = [at_s for at_s, _, _ in known]
        self._logs = [log(price) for _, price, _ in known]
        self._ratios = [ratio for _, _, ratio in known]
        self._num_drawn = [0] * len(known)

    def seconds(self, step: Step, rng: random.Random) -> float:
        """Of a step like that, planned at that time of the recording."""
        price = self._price(step.load)
        own = log(price)
        logs, num_drawn = self._logs, self._num_drawn
        drawn = min(
            _near(self._times, step.at_s, NUM_NEAR),
            key=lambda place: abs(logs[place] - own) + DRAWN_BEFORE * num_drawn[place] + ALIKE * rng.random(),
        )
        num_drawn[drawn] += 1
        return price * self._ratios[drawn]

    def _price(self, load: Load) -> float:
        return max(self._fitted.of(load), 1e-6)


class Costs:
    """Of the steps of a recording. Draws from its own generator: a fresh one for each simulation."""

    def __init__(self, steps: Sequence[Step], swap_s: float, seed: int = 0) -> None:
        decodes = [step for step in steps if not step.has_prompt]
        prompts = [step for step in steps if step.has_prompt]
        every = _Kind(steps, swap_s)
        self._decode = _Kind(decodes, swap_s) if len(decodes) >= LEAST_STEPS else every
        self._prompt = _Kind(prompts, swap_s) if len(prompts) >= LEAST_STEPS else every
        gaps = sorted((step.at_s, step.gap_s) for step in steps if step.gap_s is not None) or [(0.0, 0.0)]
        self._gap_times = [at_s for at_s, _ in gaps]
        self._gaps = [gap_s for _, gap_s in gaps]
        self._swap_s = swap_s
        self._rng = random.Random(seed)

    def seconds(self, step: Step) -> float:
        """What a step takes. Its took_s is not looked at, and its at_s is of the recording's clock."""
        kind = self._prompt if step.has_prompt else self._decode
        return kind.seconds(step, self._rng) + step.num_moved * self._swap_s

    def gap_s(self, at_s: float) -> float:
        """From a landing at that time of the recording to the next plan."""
        return self._gaps[self._rng.choice(_near(self._gap_times, at_s, NUM_NEAR))]
