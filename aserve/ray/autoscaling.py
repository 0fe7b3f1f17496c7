"""follow_load: Serve's autoscaling by tokens that wait, over the tokens a second that were measured.

    record_autoscaling_stats of each replica --> ReplicaLoad --> wanted_replicas --> how many there shall be

A class, as Serve makes one from `policy_kwargs`; what has to be remembered travels in Serve's own policy state.
"""

from collections.abc import Mapping
from typing import Any

from aserve.routing import ReplicaLoad, ScalingOptions, ScalingState, wanted_replicas


class FollowLoad:
    """Serve's autoscaling policy. Takes the fields of `ScalingOptions` but the bounds, which Serve has."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """How many replicas there shall be, and what to remember. context: Ray's `AutoscalingContext`."""
        options = ScalingOptions(
            min_replicas=context.capacity_adjusted_min_replicas,
            max_replicas=context.capacity_adjusted_max_replicas,
            **self._options,
        )
        wanted, state = wanted_replicas(
            loads_of(context.aggregated_metrics or {}),
            context.target_num_replicas,
            ScalingState.from_dict(context.policy_state or {}),
            options,
            context.current_time,
            num_queued=int(context.total_queued_requests or 0),
        )
        return wanted, state.to_dict()


def loads_of(metrics: Mapping[str, Mapping[Any, float]]) -> dict[str, ReplicaLoad]:
    """Of each replica, from what Serve gathered by metric and replica; of those that have told all of it."""
    by_replica: dict[str, dict[str, float]] = {}
    for metric, values in metrics.items():
        for replica, value in values.items():
            by_replica.setdefault(str(replica), {})[metric] = value
    found = {}
    for replica, stats in by_replica.items():
        try:
            found[replica] = ReplicaLoad.from_stats(stats)
        except (ValueError, KeyError):  # it is starting, or of another version
            continue
    return found
