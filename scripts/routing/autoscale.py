"""Scaled: a simulation in which replicas come and go as a policy wants, some time after it wants them."""

from collections.abc import Callable, Sequence
from math import ceil

from aserve.routing.scaling import ScalingOptions, ScalingState, wanted_replicas

from .arrivals import Arrival
from .policies import Policy
from .replica import Service, SimulatedReplica
from .simulate import Simulation

LOOK_EVERY_S = 10.0
START_S = 40.0
"""Until a replica that is wanted takes requests: its process, and reading the weights."""

Wants = Callable[[Sequence[SimulatedReplica], int, float], int]
"""From the replicas that are there, how many there are with those being started, and the time, to how many it wants."""


class ByTokens:
    """aserve.routing.scaling."""

    def __init__(self, options: ScalingOptions) -> None:
        self._options = options
        self._state = ScalingState()

    def __call__(self, replicas: Sequence[SimulatedReplica], num_replicas: int, now: float) -> int:
        """By what they have to compute."""
        loads = {str(replica.number): replica.report(now).load() for replica in replicas}
        num, self._state = wanted_replicas(loads, num_replicas, self._state, self._options, now)
        return num


class ByRequests:
    """As Ray Serve does by default: open requests over `target`, more after 30 s and fewer after 600 s of wanting so.

    The source: https://docs.ray.io/en/latest/serve/advanced-guides/advanced-autoscaling.html
    """

    def __init__(self, options: ScalingOptions, target: float = 2.0, up_s: float = 30.0, down_s: float = 600.0) -> None:
        self._options = options
        self._target = target
        self._up_s, self._down_s = up_s, down_s
        self._since: tuple[int, float] = (0, 0.0)

    def __call__(self, replicas: Sequence[SimulatedReplica], num_replicas: int, now: float) -> int:
        """By how many requests are open."""
        num = ceil(sum(replica.num_open for replica in replicas) / self._target)
        num = min(max(num, self._options.min_replicas), self._options.max_replicas)
        sign = (num > num_replicas) - (num < num_replicas)
        if sign != self._since[0]:
            self._since = sign, now
        delay_s = self._up_s if sign > 0 else self._down_s
        return num if sign and now - self._since[1] >= delay_s else num_replicas


class Scaled(Simulation):
    """counts: replicas that took requests, each time that somebody looked."""

    def __init__(
        self, arrivals: Sequence[Arrival], policy: Policy, service: Service, num_replicas: int, wants: Wants
    ) -> None:
        super().__init__(arrivals, policy, service, num_replicas)
        self.counts: list[int] = []
        self._wants = wants
        self._num_starting = 0
        self._look()

    def _look(self) -> None:
        self.counts.append(len(self.replicas))
        num = len(self.replicas) + self._num_starting
        change = self._wants(self.replicas, num, self.now) - num
        for _ in range(change):
            self._num_starting += 1
            self.after(START_S, self._started)
        for _ in range(min(-change, len(self.replicas) - 1)):
            self.drop()
        if self.now < self.arrivals[-1].at:
            self.after(LOOK_EVERY_S, self._look)

    def _started(self) -> None:
        self._num_starting -= 1
        self.add()
        self.replica_s += START_S
