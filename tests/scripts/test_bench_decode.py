"""bench_decode.py: what counts as the device's idle time, on traces of launches as the profiler records them."""

from types import SimpleNamespace

import pytest
import torch
from bench_decode import Span, busy_figures, device_spans, kernel_figures, launches_us
from torch.profiler import ProfilerActivity, profile, record_function

pytestmark = pytest.mark.torch


def graph(launch: int, begin_us: float, num_kernels: int) -> list[Span]:
    """Kernels of 3 us each, 1 us apart, all of one launch."""
    return [Span("kernel", launch, begin_us + 4 * k, begin_us + 4 * k + 3) for k in range(num_kernels)]


def decoding(gap_us: float, num_steps: int = 4) -> list[Span]:
    """Steps of a graph of 100 kernels, which take 399 us, and of a copy to the host 1 us behind it, which takes 2."""
    spans: list[Span] = []
    for step in range(num_steps):
        begin_us = 50 + step * (402 + gap_us)
        spans += [*graph(100 + 2 * step, begin_us, 100), Span("copy", 101 + 2 * step, begin_us + 400, begin_us + 402)]
    return spans


def test_between_the_kernels_of_a_graph_nothing_is_idle() -> None:
    """Kernels alone are busy for 75 % of the time, which no host could better."""
    figures = busy_figures(launches_us(decoding(gap_us=10)), 4)
    idle_us, total_us = 4 * 1 + 3 * 10, 4 * 402 + 3 * 10
    assert figures == {"busy_share": pytest.approx(1 - idle_us / total_us), "gap_us": 10}
    assert figures["busy_share"] > 0.97


def test_between_kernels_that_the_host_launches_one_by_one_it_is() -> None:
    eager = [Span(span.name, number, span.begin_us, span.end_us) for number, span in enumerate(decoding(gap_us=10))]
    assert busy_figures(launches_us(eager), 4)["busy_share"] == pytest.approx(
        1 - (4 * 100 + 3 * 10) / (4 * 402 + 3 * 10)
    )


def test_gaps_between_steps_are_seen_whatever_the_order_of_the_records() -> None:
    slow, fast = (launches_us(reversed(decoding(gap_us))) for gap_us in (200, 0))
    assert busy_figures(slow, 4)["gap_us"] == 200
    assert busy_figures(slow, 4)["busy_share"] == pytest.approx(1 - (4 * 1 + 3 * 200) / (4 * 402 + 3 * 200))
    assert busy_figures(fast, 4)["gap_us"] == 1  # all that is left: before the copies
    assert busy_figures([], 4) == {}


def test_what_overlaps_is_counted_once() -> None:
    spans = [Span("k", 1, 0.0, 10.0), Span("k", 2, 4.0, 6.0), Span("k", 3, 12.0, 20.0), Span("k", 3, 13.0, 18.0)]
    assert launches_us(spans) == [(0, 10), (4, 6), (12, 20)]
    assert busy_figures(launches_us(spans), 2) == {"busy_share": 0.9, "gap_us": 2}


def test_kernels_are_told_by_what_they_take_of_a_step() -> None:
    figures = kernel_figures(decoding(gap_us=10, num_steps=4), 4)
    assert figures == [("kernel", {"us": 300, "launches": 100}), ("copy", {"us": 2, "launches": 1})]


def test_only_what_ran_on_the_device_is_a_span() -> None:
    def event(device: str, number: int, *, is_user_annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            name="kernel",
            device_type=SimpleNamespace(name=device),
            id=number,
            time_range=SimpleNamespace(start=1.0, end=2.0),
            is_user_annotation=is_user_annotation,
        )

    events = [event("CPU", 1), event("CUDA", 2), event("CUDA", 3, is_user_annotation=True)]
    assert list(device_spans(events)) == [Span("kernel", 2, 1.0, 2.0)]


def test_events_of_the_profiler_have_what_is_read() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function("an annotation"):
        torch.ones(3).add(1)
    [annotation] = [event for event in profiled.events() if event.name == "an annotation"]
    assert isinstance(annotation.id, int)
    assert isinstance(annotation.is_user_annotation, bool)
    assert annotation.time_range.end > annotation.time_range.start
    assert list(device_spans(profiled.events())) == []
