"""wanted_replicas: how many replicas there should be, by what they have to compute and how fast they are.

    demand = the larger of  tokens computed per second / (a replica's tokens per second * target_utilisation)
                       and  tokens that wait           / (a replica's tokens per second * target_wait_s)

The first is what comes in, while the replicas keep up with it, and more than there are while they do not; the second
what has piled up, to be computed within target_wait_s. Requests are not counted: a hundred that decode may be less work
than one with a long prompt.

Of what was wanted within the last `up_after_s` the least holds on the way up, of the last `down_after_s` the most on
the way down, and within `tolerance` nothing changes: the stabilisation windows of Kubernetes' HorizontalPodAutoscaler.
A function of its arguments: what it has to remember is a value that it returns, and is given again.
"""

from collections.abc import Mapping
from math import ceil, inf
from typing import Any, Final, Self

import msgspec

from aserve.routing.report import ReplicaLoad

MAX_HISTORY: Final = 256
MIN_INTERVAL_S: Final = 0.5
"""Counters that were read less far apart tell no rate."""
_SPEED_DECAY: Final = 0.8


class ScalingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """min_replicas, max_replicas: bounds; with a least of 0 there may be none while nobody asks.

    target_wait_s: in which tokens that wait shall be computed. target_utilisation: of a replica, in (0, 1].
    up_after_s, down_after_s: how long more, or fewer, have to be wanted. tolerance: a share of them.
    max_step_up: at most so many times the replicas that report, at a time.

    Raises ValueError, naming the field.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_wait_s: float = 2.0
    target_utilisation: float = 0.7
    up_after_s: float = 20.0
    down_after_s: float = 60.0
    tolerance: float = 0.1
    max_step_up: float = 2.0

    def __post_init__(self) -> None:
        bounds = {
            "min_replicas": (0, 10_000),
            "max_replicas": (max(self.min_replicas, 1), 10_000),
            "target_wait_s": (0.001, 86_400),
            "target_utilisation": (0.01, 1),
            "up_after_s": (0, 86_400),
            "down_after_s": (0, 86_400),
            "tolerance": (0, 1),
            "max_step_up": (1.01, 10_000),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} must be from {least} to {most}, got {value!r}")


class ScalingState(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision leaves for the next. computed: tokens, by replica. tokens_per_s: of one replica, measured.

    history: when how many were wanted, the oldest first.
    """

    at: float | None = None
    computed: dict[str, float] = {}
    tokens_per_s: float | None = None
    history: tuple[tuple[float, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As builtins."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        return told

    @classmethod
    def from_dict(cls, told: Mapping[str, Any] | None) -> Self:
        """From `to_dict`; what it did not make is as if nothing had been decided yet."""
        try:
            state: Self = msgspec.convert(dict(told or {}), cls)
        except msgspec.ValidationError:
            return cls()
        return state


def wanted_replicas(
    loads: Mapping[str, ReplicaLoad],
    num_replicas: int,
    state: ScalingState,
    options: ScalingOptions,
    now: float,
    *,
    num_queued: int = 0,
) -> tuple[int, ScalingState]:
    """How many there should be, and the state for the next call. Never raises.

    loads: by replica, of those that tell. num_replicas: that are there, or are being started. num_queued: requests that
    wait for a replica in front of all of them.
    """
    elapsed_s = inf if state.at is None else now - state.at
    if 0 <= elapsed_s < MIN_INTERVAL_S:
        return _bounded(num_replicas, options), state
    speed = _speed(loads, state.tokens_per_s)
    now_wanted = _now_wanted(loads, num_replicas, state, options, (elapsed_s, speed), num_queued)
    longest_s = max(options.up_after_s, options.down_after_s)
    recent = [(at, num) for at, num in state.history if now - longest_s <= at <= now]
    history = (*_thinned(recent), (now, now_wanted))
    computed = {name: load.num_computed_tokens for name, load in loads.items()}
    settled = _settled(history, num_replicas, options, now)
    limit = max(ceil(max(len(loads), 1) * options.max_step_up), num_replicas)
    return (
        _bounded(min(settled, limit), options),
        ScalingState(at=now, computed=computed, tokens_per_s=speed, history=history),
    )


def _speed(loads: Mapping[str, ReplicaLoad], before: float | None) -> float | None:
    """Of one replica, in tokens per second; None while none has measured it."""
    known = [load.tokens_per_s for load in loads.values() if load.tokens_per_s]
    if not known:
        return before
    mean = sum(known) / len(known)
    return mean if before is None else _SPEED_DECAY * before + (1 - _SPEED_DECAY) * mean


def _now_wanted(
    loads: Mapping[str, ReplicaLoad],
    num_replicas: int,
    state: ScalingState,
    options: ScalingOptions,
    pace: tuple[float, float | None],
    num_queued: int,
) -> int:
    """By this moment's figures alone. pace: seconds since the last ones, and a replica's tokens per second."""
    elapsed_s, speed = pace
    is_idle = not num_queued and not any(load.num_requests or load.waiting_tokens for load in loads.values())
    if speed is None:  # nobody ever waited for a full step, or nobody is there
        return _bounded(0 if is_idle else max(num_replicas, 1), options)
    num_computed = sum(
        max(0.0, load.num_computed_tokens - state.computed.get(name, load.num_computed_tokens))
        for name, load in loads.items()
    )
    rate = num_computed / elapsed_s if 0 < elapsed_s < inf else 0.0
    num_waiting = sum(load.waiting_tokens for load in loads.values())
    demand = max(rate / options.target_utilisation, num_waiting / options.target_wait_s) / speed
    if num_replicas and abs(demand / num_replicas - 1) <= options.tolerance:
        return _bounded(num_replicas, options)
    return _bounded(max(ceil(min(demand, options.max_replicas)), 0 if is_idle else 1), options)


def _settled(history: tuple[tuple[float, int], ...], num_replicas: int, options: ScalingOptions, now: float) -> int:
    """More than there are if always more were wanted of late, fewer if always fewer were."""
    up = min(num for at, num in history if at >= now - options.up_after_s)
    down = max(num for at, num in history if at >= now - options.down_after_s)
    if up > num_replicas:
        has_lasted = options.up_after_s == 0 or history[0][0] <= now - options.up_after_s * 0.9
        return up if has_lasted else num_replicas
    has_lasted = options.down_after_s == 0 or history[0][0] <= now - options.down_after_s * 0.9
    return down if down < num_replicas and has_lasted else num_replicas


def _thinned(history: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most MAX_HISTORY - 1 of them: of two neighbours the one that wanted more."""
    while len(history) >= MAX_HISTORY:
        pairs = zip(history[::2], history[1::2], strict=False)
        history = [(later[0], max(earlier[1], later[1])) for earlier, later in pairs]
    return history


def _bounded(num_replicas: int, options: ScalingOptions) -> int:
    return min(max(num_replicas, options.min_replicas), options.max_replicas)
