"""The host tier's benchmark evicts a prefix, gets it back from the host, and prints what it promises."""

import json

import bench_host_tier
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_one_json_line_with_the_ratio(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_host_tier.py", "--prefix-len", "64", "--rounds", "1", "--device", "cpu"])
    bench_host_tier.main()
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["bench"], line["prefix_len"], line["rounds"]) == ("host_tier", 64, 1)
    assert line["ttft_tier_s"] > 0
    assert line["without_over_tier"] > 0
    assert line["chosen"] in (True, False)
