"""From the samples of a round to its figures, and from rounds to their medians. Pure arithmetic."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Final

from aserve.load.answers import Sample
from aserve.load.drive import Round

PERCENTS: Final = (50, 90, 99)
COUNTS: Final = ("errors", "retries", "short_answers")

Figures = dict[str, float]


@dataclass(frozen=True)
class Limits:
    """What a user would call good: the first token within `ttft_s`, the others `itl_s` each on average."""

    ttft_s: float = inf
    itl_s: float = inf

    def met_by(self, sample: Sample) -> bool:
        """Whether one request was good. The mean gap, since a stream may come in bursts."""
        return sample.ttft_s <= self.ttft_s and sample.s_per_token <= self.itl_s


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated between neighbours; NaN for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def of_round(done: Round, limits: Limits | None = None) -> Figures:
    """The figures of one round; times in ms. A failed request counts as asked for, as failed, and as not good.

    same_read_fraction: the share of token events that came in one read with the one before. Where it is near 1 the
    stream came in bursts, and the time to first token and the gaps mean little. client_cpu: cores that the client took.
    """
    samples = done.samples
    num_out, num_events = sum(s.num_out for s in samples), sum(len(s.event_s) for s in samples)
    figures: Figures = {
        "requests": done.num_asked,
        "errors": len(done.failures),
        "wall_s": done.wall_s,
        "requests_per_s": len(samples) / done.wall_s,
        "output_tokens_per_s": num_out / done.wall_s,
        "total_tokens_per_s": (num_out + sum(s.num_in for s in samples)) / done.wall_s,
        "input_tokens": sum(s.num_in for s in samples),
        "output_tokens": num_out,
        "short_answers": done.num_short,
        **_spread("ttft", [s.ttft_s for s in samples]),
        **_spread("itl", [gap for s in samples for gap in s.gaps_s]),
        **_spread("per_token", [s.s_per_token for s in samples if len(s.event_s) > 1]),
        **_spread("latency", [s.latency_s for s in samples]),
        **_spread("late", done.late_s),
        "tokens_per_event": num_out / max(1, num_events),
        "same_read_fraction": 1 - sum(s.num_reads for s in samples) / num_events if num_events else nan,
        "retries": done.num_retries,
        "client_cpu": done.cpu_s / done.wall_s,
    }
    if limits is not None:
        num_good = sum(map(limits.met_by, samples))
        figures |= {"good_fraction": num_good / done.num_asked, "goodput_per_s": num_good / done.wall_s}
    return figures


def medians(rounds: Sequence[Mapping[str, float]]) -> Figures:
    """Figure by figure, the median of the rounds; errors, retries and short answers are added up."""
    figures = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return figures | {name: sum(one[name] for one in rounds) for name in COUNTS if name in figures}


def _spread(name: str, seconds: Sequence[float]) -> Figures:
    return {f"{name}_p{percent}_ms": 1e3 * percentile(seconds, percent) for percent in PERCENTS}
