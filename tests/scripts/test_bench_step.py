"""The step benchmark runs, and prints what it promises."""

import json

import bench_step
import pytest

STAGES = ("plan", "launch", "commit", "publish")


def test_one_json_line_a_size(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_step.py", "--sizes", "1,3", "--steps", "4"])
    bench_step.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["bench"], line["num_running"], line["num_steps"]) for line in lines] == [
        ("step", 1, 4),
        ("step", 3, 4),
    ]
    for line in lines:
        assert 0 < line["plan_commit_us_p50"] <= line["plan_commit_us_p99"]
        assert {"cpu", "cores", "python"} <= set(line["machine"])
        assert line["total_us"] == pytest.approx(sum(line[f"{stage}_us"] for stage in STAGES), rel=0.01)
        assert line["land_us"] > 0


@pytest.mark.slow
@pytest.mark.torch
def test_the_real_runner_has_a_batch_to_build():
    figures = bench_step.figures(2, 4, "demo")
    assert figures["build_us"] > 0
    assert figures["land_us"] > figures["plan_us"]


def test_viewers_may_look_on():
    figures = bench_step.figures(3, 4, None, num_viewers=2)
    assert figures["total_us"] > 0


def test_all_sequences_decode_in_every_timed_step():
    scheduler = bench_step.decoding_scheduler(5, 40)
    flying = scheduler.plan(0.0)
    for _ in range(40):
        launched = scheduler.plan(0.0)
        scheduler.commit(bench_step.sampled(flying))
        assert len(launched.slices) == 5
        flying = launched
    assert scheduler.statistics().num_preemptions == 0
