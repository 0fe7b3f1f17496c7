"""A histogram cheap enough to be fed with every token. Knows buckets and counts, and nothing of what they measure."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily


class BucketCounts:
    """Counts of observations by upper bound: one bisection and two additions each (prometheus_client's own takes a lock
    and walks its buckets, and costs ten times as much).

    bounds: the inclusive upper bounds, ascending; one bucket more, up to infinity, is implied.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as if it had been seen `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, documentation: str, labels: Mapping[str, str]) -> HistogramMetricFamily:
        """The counts so far as Prometheus takes them: cumulative."""
        cumulative, buckets = 0, []
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == math.inf else str(bound), cumulative))
        family = HistogramMetricFamily(name, documentation, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family
