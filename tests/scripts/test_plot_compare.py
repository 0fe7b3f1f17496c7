"""plot_compare.py reads what compare.py prints; the drawing itself is matplotlib's and looked at by eye."""

import json
from pathlib import Path

import plot_compare

BENCH = Path(__file__).parents[2] / "docs/bench"


def test_the_first_line_of_a_peer_and_part_counts(tmp_path):
    lines = [
        {"bench": "compare", "peer": "aserve", "part": "batch", "output_tokens_per_s": 1.0},
        {"bench": "compare", "peer": "aserve", "part": "batch", "output_tokens_per_s": 2.0},
        {"bench": "profile", "kind": "decode"},
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\na table\n")
    assert plot_compare.read(path) == {("aserve", "batch"): lines[0]}


def test_every_panel_has_a_figure_of_aserve_in_the_runs_of_each_model():
    runs = [*BENCH.glob("*-q05.jsonl"), *BENCH.glob("*-tiny.jsonl")]
    assert len(runs) >= 2
    for run in runs:
        results = plot_compare.read(run)
        for part, name, *_ in plot_compare.PANELS:
            assert results["aserve", part][name] > 0
