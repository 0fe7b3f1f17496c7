"""The offline benchmark draws the published lengths, and prints what it promises."""

import json
import random

import bench_offline
import pytest

pytestmark = pytest.mark.torch


@pytest.mark.slow
def test_the_published_workload_has_the_published_number_of_tokens():
    args = bench_offline.parse_arguments(["--uniform", "100", "1024"])
    prompts, lengths = bench_offline.draw(args, random.Random(0))
    assert (len(prompts), sum(map(len, prompts)), sum(lengths)) == (256, 142_827, 133_966)
    assert {300 <= token_id < 1000 for ids in prompts for token_id in ids} == {True}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 32),
        (["--scale", "0.25"], 8),
        (["--uniform", "1", "2"], 256),
        (["--uniform", "1", "2", "--scale", "0.05"], 13),
        (["--requests", "4", "--scale", "0.01"], 1),
    ],
)
def test_the_scale_is_of_the_number_of_requests(words, expected):
    assert bench_offline.num_requests(bench_offline.parse_arguments(words)) == expected


@pytest.mark.slow
def test_one_json_line(capsys, monkeypatch):
    words = ["--requests", "3", "--uniform", "4", "8", "--rounds", "2", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["bench_offline.py", *words])
    bench_offline.main()
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["bench"], line["requests"], line["rounds"], line["lengths"]) == ("offline", 3, 2, [4, 8])
    assert 0 < line["output_tokens_per_s"] < line["total_tokens_per_s"]
