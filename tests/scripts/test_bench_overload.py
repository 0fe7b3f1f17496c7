"""The overload benchmark on a real server with the demo model. How fast it is depends on who else uses the machine;
that everybody gets a whole answer or a refusal does not."""

import json
import os

import bench_overload
import pytest
from bench_overload import Tally, Window, apart


@pytest.mark.thorough
@pytest.mark.e2e
@pytest.mark.parametrize("shared", [[], ["--shared"]], ids=["apart", "shared"])
def test_under_ten_times_its_load_everybody_is_answered_or_refused(capsys, shared):
    cores = os.sched_getaffinity(0)
    sizes = ["--max-num-seqs", "8", "--max-num-queued-reqs", "16", "--output-len", "16", "--rounds", "1"]
    bounds = ["--min-goodput", "0", "--refused-p99-ms", "60000", "--health-p99-ms", "60000"]
    assert bench_overload.main([*sizes, *bounds, "--seconds", "3", "--warm-up-seconds", "1", *shared]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["lost"] == 0
    assert figures["answered"] + figures["refused"] == figures["asked"]
    assert figures["refused"] > figures["answered"] > 0
    assert figures["probes"] > 5
    assert figures["goodput_over_peak"] > 0
    assert figures["goodput_by_cpu"] > 0
    assert os.sched_getaffinity(0) == cores, "left as they were"


def test_the_client_has_a_core_that_the_server_has_not(monkeypatch):
    """Catches a ratio that has in it what the client takes from the server."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert apart(is_shared=False) == ({0, 1}, {2})
    assert apart(is_shared=True) == ({0, 1, 2}, {0, 1, 2})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(SystemExit, match="--shared"):
        apart(is_shared=False)


def test_a_window_counts_the_tokens_of_answers_that_end_within_it(monkeypatch):
    """Catches answers of the first quarter, or of the end, that are counted."""
    now_s = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    monkeypatch.setattr(bench_overload, "cpu_s", lambda pid: now_s / 2)
    window = Window(1, 8.0)
    for now_s in (101.0, 102.0, 107.0, 108.0, 109.0):  # noqa: B007  the clock
        window.look()
    assert window.is_over
    tally = Tally(ended=[(101.9, 1000), (102.0, 6), (107.9, 12), (108.0, 1000)])
    assert window.rates(tally) == (3.0, 6.0)


def test_what_is_neither_whole_nor_refused_is_lost():
    tally = Tally()
    tally.statuses.update([200, 429, 429, 503, 0])
    assert tally.num_lost == 2
