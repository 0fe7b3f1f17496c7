"""Policies: where a request goes. All but aserve's are told the true length of every queue at that moment."""

from collections.abc import Sequence
from random import Random
from typing import Protocol

from aserve.routing import Ask, Router, RouterOptions
from aserve.routing.report import ReplicaReport

from .arrivals import Arrival
from .replica import SimulatedReplica


class Policy(Protocol):
    """hears: whether replicas' reports are made for it, which takes the simulation long."""

    hears: bool

    def choose(self, name: str, arrival: Arrival, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """The place of the replica."""
        ...

    def reported(self, number: int, report: ReplicaReport, now: float) -> None:
        """A replica's report came."""
        ...

    def completed(self, name: str, now: float) -> None:
        """A request is over."""
        ...


class _Deaf:
    hears = False

    def reported(self, number: int, report: ReplicaReport, now: float) -> None:
        """Is not asked for."""

    def completed(self, name: str, now: float) -> None:
        """Does not matter."""


class RoundRobin(_Deaf):
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, name: str, arrival: Arrival, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """The next."""
        self._next = (self._next + 1) % len(replicas)
        return self._next


class TwoChoices(_Deaf):
    """The shorter queue of two drawn at random: Ray Serve's default."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, name: str, arrival: Arrival, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """One of two."""
        return min(self._random.sample(range(len(replicas)), 2), key=lambda place: replicas[place].num_open)


class PrefixAffinity(_Deaf):
    """Ray Serve's PrefixCacheAffinityRouter, by its documentation, in blocks instead of characters.

    While the longest queue is at most `imbalanced_threshold` longer than the shortest: the replicas that the longest
    prefix of the prompt was sent to, if that is at least `match_rate_threshold` of it, else those to which the least
    different text was sent; of them the one with the shortest queue. Otherwise two choices. The tree of what was sent
    is not cut back (do_eviction is False). The defaults are Ray's. The source:
    https://docs.ray.io/en/latest/serve/llm/prefix-aware-request-router.html
    """

    def __init__(
        self, imbalanced_threshold: float = float("inf"), match_rate_threshold: float = 0.1, seed: int = 0
    ) -> None:
        self._imbalanced = imbalanced_threshold
        self._match_rate = match_rate_threshold
        self._two = TwoChoices(seed)
        self._random = Random(seed)
        self._sent_to: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}

    def choose(self, name: str, arrival: Arrival, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """By match, or by size, or by load."""
        queues = [replica.num_open for replica in replicas]
        if max(queues) - min(queues) > self._imbalanced:
            place = self._two.choose(name, arrival, replicas, now)
        else:
            fits = self._matched(arrival) or self._smallest(len(replicas))
            shortest = min(queues[place] for place in fits)
            place = self._random.choice([place for place in fits if queues[place] == shortest])
        for block in arrival.block_ids:
            holders = self._sent_to.setdefault(block, set())
            self._sizes[place] = self._sizes.get(place, 0) + (place not in holders)
            holders.add(place)
        return place

    def _matched(self, arrival: Arrival) -> list[int]:
        num_matched = 0
        while num_matched < len(arrival.block_ids) and arrival.block_ids[num_matched] in self._sent_to:
            num_matched += 1
        if not num_matched or num_matched < self._match_rate * len(arrival.block_ids):
            return []
        return sorted(self._sent_to[arrival.block_ids[num_matched - 1]])

    def _smallest(self, num_replicas: int) -> list[int]:
        sizes = [self._sizes.get(place, 0) for place in range(num_replicas)]
        return [place for place, size in enumerate(sizes) if size == min(sizes)]


class ByPrefix:
    """aserve.routing. num_routers: that share the requests, each with its own record; all hear the same reports."""

    hears = True

    def __init__(self, num_routers: int = 1, options: RouterOptions | None = None, seed: int = 0) -> None:
        self._routers = [Router(options, seed=seed + number) for number in range(num_routers)]
        self._random = Random(seed)
        self._sent_by: dict[str, Router] = {}

    def choose(self, name: str, arrival: Arrival, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """What a router at random says."""
        router = self._sent_by[name] = self._random.choice(self._routers)
        keys = arrival.keys()
        names = [str(replica.number) for replica in replicas]
        place = names.index(router.choose(names, Ask(id=name, keys=keys), now).ranked[0])
        replicas[place].ledger.came(name, keys)
        return place

    def reported(self, number: int, report: ReplicaReport, now: float) -> None:
        """Told to all."""
        for router in self._routers:
            router.reported(str(number), report, now)

    def completed(self, name: str, now: float) -> None:
        """Told to the one that sent it."""
        self._sent_by.pop(name).completed(name, now)
