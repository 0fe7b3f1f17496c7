"""The overload benchmark on a real server with the demo model. How fast it is depends on who else uses the machine;
that everybody gets a whole answer or a refusal does not."""

import json

import bench_overload
import pytest


@pytest.mark.thorough
@pytest.mark.e2e
def test_under_ten_times_its_load_everybody_is_answered_or_refused(capsys):
    sizes = ["--max-num-seqs", "8", "--max-num-queued-reqs", "16", "--output-len", "16", "--peak-requests", "32"]
    bounds = ["--min-goodput", "0", "--refused-p99-ms", "60000", "--health-p99-ms", "60000"]
    assert bench_overload.main([*sizes, *bounds, "--seconds", "3"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["lost"] == 0
    assert figures["answered"] + figures["refused"] == figures["asked"]
    assert figures["refused"] > figures["answered"] > 0
    assert figures["probes"] > 5
