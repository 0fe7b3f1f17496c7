"""What simulated steps take: prices fitted to recorded ones, and how far these were from their prices.

A step that only decodes and one with prompts run other kernels, so each kind has prices of its own. What a price does
not know (caches, who else had the processor) is drawn, by a seed, from what recorded steps took over or under theirs:
steps with nearly the same price, and of these the nearest in time, for what makes steps slow does so for a while. So
latencies have the tails that they had, and two simulations are the same.
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
NUM_NEAREST: Final = 8
"""From which one is drawn."""
NEARLY_EQUAL: Final = 1.1


class _Kind:
    """Steps of one kind. swap_s: seconds of a block that is moved, which is not priced."""

    def __init__(self, steps: Sequence[Step], swap_s: float) -> None:
        own_s = [max(step.took_s - step.num_moved * swap_s, 1e-6) for step in steps]
        self._fitted = prices_of((step.load, seconds) for step, seconds in zip(steps, own_s, strict=True))
        known = sorted(
            (self._key(step), seconds / self._price(step.load)) for step, seconds in zip(steps, own_s, strict=True)
        )
        self._keys = [key for key, _ in known]
        self._ratios = [ratio for _, ratio in known]

    def seconds(self, step: Step, rng: random.Random) -> float:
        """Of a step like that, planned at that time."""
        first = bisect_left(self._keys, self._key(step)) - NUM_NEAREST // 2
        first = max(0, min(first, len(self._keys) - NUM_NEAREST))
        last = min(len(self._keys), first + NUM_NEAREST)
        return self._price(step.load) * self._ratios[rng.randrange(first, last)]

    def _key(self, step: Step) -> tuple[int, float]:
        """Steps whose prices are nearly equal are in the order of their times."""
        return round(log(self._price(step.load)) / log(NEARLY_EQUAL)), step.at_s

    def _price(self, load: Load) -> float:
        return max(self._fitted.of(load), 1e-6)


class Costs:
    """Of the steps of a recording. Draws from its own generator: a fresh one for each simulation."""

    def __init__(self, steps: Sequence[Step], swap_s: float, seed: int = 0) -> None:
        decodes = [step for step in steps if not step.has_prompt]
        prompts = [step for step in steps if step.has_prompt]
        self._all = _Kind(steps, swap_s)
        self._decode = _Kind(decodes, swap_s) if len(decodes) >= LEAST_STEPS else self._all
        self._prompt = _Kind(prompts, swap_s) if len(prompts) >= LEAST_STEPS else self._all
        self._gaps = [step.gap_s for step in steps if step.gap_s is not None] or [0.0]
        self._swap_s = swap_s
        self._rng = random.Random(seed)

    def seconds(self, step: Step) -> float:
        """What a step takes. Its took_s is not looked at."""
        kind = self._prompt if step.has_prompt else self._decode
        return kind.seconds(step, self._rng) + step.num_moved * self._swap_s

    def gap_s(self) -> float:
        """From a landing to the next plan."""
        return self._rng.choice(self._gaps)
