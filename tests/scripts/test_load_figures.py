"""The arithmetic from samples to figures, and from figures to the table of a comparison."""

from math import isnan

import pytest
from load.comparison import render, rows

from aserve.load.answers import Sample
from aserve.load.drive import Round
from aserve.load.figures import Limits, medians, of_round, percentile


def sample(*event_s, due_s=0.0, num_out=None):
    return Sample(due_s, due_s, event_s[-1], 10, num_out or len(event_s), list(event_s), len(set(event_s)))


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3, 1, 2], 50, 2),
        ([1, 2, 3, 4], 50, 2.5),
        (range(101), 99, 99),
        ([1, 2], 99, 1.99),
        ([5], 1, 5),
        ([1, 9], 100, 9),
    ],
)
def test_percentiles_lie_between_neighbours(values, percent, expected):
    assert percentile(list(values), percent) == pytest.approx(expected)


def test_no_values_have_no_percentile():
    assert isnan(percentile([], 50))


def test_the_figures_of_a_round():
    done = Round(
        3, [sample(1.0, 1.5, 2.0), sample(3.0, 3.0, num_out=4, due_s=1.0)], ["no answer"], [0.0, 0.1], wall_s=4.0
    )
    done.cpu_s = 0.4
    figures = of_round(done, Limits(ttft_s=1.5, itl_s=0.6))
    assert (figures["requests"], figures["errors"]) == (3, 1)
    assert (figures["output_tokens_per_s"], figures["total_tokens_per_s"]) == (7 / 4, 27 / 4)
    assert (figures["ttft_p50_ms"], figures["itl_p50_ms"]) == (1500, 500)
    assert figures["same_read_fraction"] == pytest.approx(1 / 5)
    assert figures["tokens_per_event"] == pytest.approx(7 / 5)
    assert (figures["client_cpu"], figures["late_p99_ms"]) == pytest.approx((0.1, 99))
    assert (figures["good_fraction"], figures["goodput_per_s"]) == pytest.approx((1 / 3, 0.25))


def test_a_round_without_answers_has_no_times():
    figures = of_round(Round(2, failures=["a", "b"], wall_s=1.0))
    assert figures["output_tokens_per_s"] == 0
    assert isnan(figures["ttft_p50_ms"])
    assert isnan(figures["same_read_fraction"])


def test_goodput_wants_both_limits():
    limits = Limits(ttft_s=1.0, itl_s=0.5)
    assert limits.met_by(sample(1.0, 1.5, 2.0))
    assert not limits.met_by(sample(1.1, 1.2))
    assert not limits.met_by(sample(0.5, 1.1))
    assert limits.met_by(sample(0.5, 0.9, 1.3, num_out=3))


def test_medians_of_rounds_and_sums_of_errors():
    assert medians([{"x": 1.0, "errors": 1}, {"x": 9.0, "errors": 0}, {"x": 2.0, "errors": 2}]) == {
        "x": 2.0,
        "errors": 3,
    }


MEDIANS = {
    "aserve": {"c8": {"output_tokens_per_s": 1200.0, "itl_p50_ms": 2.0}, "offline": {"output_tokens_per_s": 50.0}},
    "one": {"c8": {"output_tokens_per_s": 800.0, "itl_p50_ms": 1.6}},
    "two": {"c8": {"output_tokens_per_s": 400.0, "itl_p50_ms": 4.0}, "offline": {"output_tokens_per_s": 25.0}},
}


def test_the_best_of_the_others_is_the_fastest():
    table = {(row.part, row.figure): row for row in rows(MEDIANS, "aserve")}
    speed, gap = table["c8", "output_tokens_per_s"], table["c8", "itl_p50_ms"]
    assert (speed.best, speed.ratio) == ("one", 1.5)
    assert (gap.best, gap.ratio) == ("one", 1.25)
    assert (table["offline", "output_tokens_per_s"].best, table["offline", "output_tokens_per_s"].ratio) == ("two", 2.0)
    assert isnan(table["c8", "ttft_p50_ms"].ratio)


def test_the_table_lines_up_and_marks_what_is_missing():
    lines = render(rows(MEDIANS, "aserve"), "aserve").splitlines()
    assert lines[0].split() == ["aserve", "one", "two", "best", "other", "aserve/best"]
    assert lines[1].split() == ["c8", "output_tokens_per_s", "1200", "800", "400", "one", "1.5"]
    assert lines[-1].split() == ["offline", "output_tokens_per_s", "50", "-", "25", "two", "2"]
    assert len({len(line) for line in lines if line.endswith(("1.5", "1.25", "2"))}) == 1


def test_aserve_alone_has_no_ratio():
    (row, *_) = rows({"aserve": {"offline": {"output_tokens_per_s": 5.0}}}, "aserve")
    assert (row.best, isnan(row.ratio)) == ("", True)
    assert render([], "aserve") == "nothing was measured"
