"""The swap benchmark runs under pressure, and prints what it promises."""

import json

import bench_swap
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_one_json_line_with_the_ratios(capsys, monkeypatch):
    sizes = ["--groups", "3", "--input-len", "32", "--output-len", "24", "--rounds", "1", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["bench_swap.py", *sizes])
    bench_swap.main()
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["bench"], line["groups"], line["rounds"]) == ("swap", 3, 1)
    assert line["swap_over_recompute"] > 0
    assert line["auto_over_better"] > 0
    assert line["preemptions_recompute"] > 0
    assert 0 < line["swap_outs_swap"] <= line["preemptions_swap"]
