"""Simulation: arrivals through a policy to replicas, on a clock of its own, and what came of it."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from statistics import mean, quantiles
from typing import Any

from .arrivals import BLOCK_TOKENS, Arrival
from .policies import Policy
from .replica import Job, Service, SimulatedReplica

REPORT_EVERY_S = 10.0
REPORT_TAKES_S = 0.5
"""From when a replica makes it until routers have it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """hit_rate: of prompts' tokens. load: share of the time that replicas compute prompts. imbalance: the busiest
    replica's work over the mean. replica_s: seconds that replicas were there, all together.
    """

    hit_rate: float
    num_hit_tokens: int
    ttft_p50_s: float
    ttft_p99_s: float
    load: float
    imbalance: float
    replica_s: float

    def to_dict(self) -> dict[str, Any]:
        """Rounded."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


class Simulation:
    """One run. Events are (time, number, what to do), the number telling apart those at one time.

    replicas: that requests are sent to. gone: that were, and finish what they have.
    """

    def __init__(self, arrivals: Sequence[Arrival], policy: Policy, service: Service, num_replicas: int) -> None:
        self.arrivals = arrivals
        self.policy = policy
        self.service = service
        self.replicas: list[SimulatedReplica] = []
        self.gone: list[SimulatedReplica] = []
        self.now = 0.0
        self.replica_s = 0.0
        self._jobs: list[Job] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        for _ in range(num_replicas):
            self.add()

    def add(self) -> None:
        """One replica more, with an empty cache."""
        replica = SimulatedReplica(self.service, len(self.replicas) + len(self.gone))
        self.replicas.append(replica)
        if self.policy.hears:
            self.after(REPORT_EVERY_S * (replica.number * 7 % 16) / 16, partial(self._report, replica))

    def drop(self) -> None:
        """The replica that has the least to do gets nothing more."""
        replica = min(self.replicas, key=lambda each: each.num_open)
        self.replicas.remove(replica)
        self.gone.append(replica)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do it so much later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), do))

    def run(self) -> Outcome:
        """To the last answer's end."""
        for number, arrival in enumerate(self.arrivals):
            self.after(arrival.at, partial(self._arrive, Job(str(number), arrival)))
        while self._events:
            at, _, do = heapq.heappop(self._events)
            self.replica_s += (at - self.now) * (len(self.replicas) + sum(each.num_open > 0 for each in self.gone))
            self.now = at
            do()
        return self._outcome()

    def _arrive(self, job: Job) -> None:
        self._jobs.append(job)
        replica = self.replicas[self.policy.choose(job.name, job.arrival, self.replicas, self.now)]
        replica.arrive(job)
        self._start(replica)

    def _start(self, replica: SimulatedReplica) -> None:
        if (seconds := replica.start()) is not None:
            self.after(seconds, partial(self._prefilled, replica))

    def _prefilled(self, replica: SimulatedReplica) -> None:
        job, seconds = replica.prefilled(self.now)
        self.after(seconds, partial(self._ended, replica, job))
        self._start(replica)

    def _ended(self, replica: SimulatedReplica, job: Job) -> None:
        replica.ended(job)
        self.policy.completed(job.name, self.now)
        self._start(replica)

    def _report(self, replica: SimulatedReplica) -> None:
        if replica in self.replicas and self.now < self.arrivals[-1].at:
            report = replica.report(self.now)
            self.after(REPORT_TAKES_S, lambda: self.policy.reported(replica.number, report, self.now))
            self.after(REPORT_EVERY_S, partial(self._report, replica))

    def _outcome(self) -> Outcome:
        cuts = quantiles([job.first_token_at - job.arrival.at for job in self._jobs], n=100)
        num_hits = sum(job.num_hit for job in self._jobs) * BLOCK_TOKENS
        busy = [replica.busy_s for replica in (*self.replicas, *self.gone)]
        return Outcome(
            hit_rate=num_hits / sum(job.arrival.num_prompt for job in self._jobs),
            num_hit_tokens=num_hits,
            ttft_p50_s=cuts[49],
            ttft_p99_s=cuts[98],
            load=sum(busy) / self.replica_s,
            imbalance=max(busy) / mean(busy),
            replica_s=self.replica_s,
        )


def most_hits(arrivals: Sequence[Arrival], num_blocks: int | None = None) -> float:
    """The share of tokens that one cache of so many blocks would find, or one without bound: all replicas' in one.

    About the most that a policy can have whose replicas forget the least recently used: it knows at once all that was
    computed, wherever it is.
    """
    cached: dict[int, None] = {}
    num_hits = 0
    for arrival in arrivals:
        usable = arrival.block_ids[: (arrival.num_prompt - 1) // BLOCK_TOKENS]
        num_hits += next((place for place, block in enumerate(usable) if block not in cached), len(usable))
        for block in reversed(arrival.block_ids):
            cached.pop(block, None)
            cached[block] = None
        while num_blocks is not None and len(cached) > num_blocks:
            del cached[next(iter(cached))]
    return num_hits * BLOCK_TOKENS / sum(arrival.num_prompt for arrival in arrivals)
