"""The GPU check proves itself without a GPU: it runs on tiny shapes, and fakes of stages fail, hang and are killed."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gpu_check
import pytest
from gpu_goals import GOALS
from gpu_report import aligned, cells, judged, markdown, merged, reason, write
from gpu_stages import Stage, Stages, read_records
from load.process import process_tree

ROOT = Path(__file__).parents[2]

OF_8B = {"bench": "goals", "model": "scripts/shapes/qwen3-8b"}
OF_SMALL = {"bench": "goals", "model": "qwen3-0.6b"}
PASSING_STEP = {"bench": "decode", "model": "scripts/shapes/llama-3.1-8b", "context": 1024}
PASSING = [
    *(
        {"bench": "decode", "model": f"scripts/shapes/{model}", "context": 1024, "batch": batch, "step_ms": 1.0}
        | {"roofline_share": 0.7, "busy_share": 0.99, "gap_us": 40.0}
        for model in ("llama-3.1-8b", "qwen3-4b", "qwen3-0.6b")
        for batch in (1, 32, 256)
    ),
    *(
        {"bench": "kernels", "kernel": "decode_attention", "seqs": seqs, "context": 4096, "us": 20.0 * seqs}
        | {"gb_per_s": 3900.0}
        for seqs in (8, 16, 17)
    ),
    *(
        {"bench": "kernels", "kernel": "prefill_attention", "seqs": 1, "queries": n, "context": n, "tflop_per_s": 400.0}
        for n in (4096, 8192)
    ),
    *(
        {"bench": "goals", "part": "offline", "model": model, "workload": "published", "output_tokens_per_s": 3e4}
        for model in ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
    ),
    *(
        one | {"part": part, "concurrency": concurrency, "output_tokens_per_s": speed}
        for one in (OF_8B, OF_SMALL)
        for part, speed in (("offline", 100.0), ("serving", 95.0))
        for concurrency in (64, 256)
    ),
    *(OF_8B | {"part": "ttft", "input_len": length, "ttft_p50_ms": 10.0} for length in (128, 2048, 8192)),
    OF_8B | {"part": "load", "itl_p50_ms": 10.0, "itl_p99_ms": 20.0},
    OF_8B | {"part": "prefix", "input_len": 8192, "later_over_first": 0.1},
    OF_SMALL | {"part": "cache_cost", "cost": 0.005},
    OF_SMALL | {"part": "peer", "ratio": 6.0},
    {"bench": "step", "num_running": 256, "total_us": 600.0},
    *(PASSING_STEP | {"batch": batch, "step_ms": 0.7, "quantization": "fp8"} for batch in (1, 256)),
]
RESULT = '{"bench": "a", "us": 1.5}'
ORPHAN = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
print('{"bench": "a", "us": 1.5}', flush=True)
time.sleep(float(sys.argv[1]))
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def python(name: str, program: str, *arguments: str, limit_s: float = 30) -> Stage:
    """A stage that runs a few lines."""
    return Stage(name, limit_s, (sys.executable, "-S", "-c", program, *arguments))


def record(name="all", ending="ok", results=(), end=()):
    times = {"seconds": 1.0, "limit_s": 2.0}
    return {name: {"stage": name, "ending": ending, **times, "results": list(results), "end": list(end)}}


def children() -> list[int]:
    """Of this process, those that run."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in process_tree(os.getpid())[1:] if runs(pid)]


def assert_no_children() -> None:
    """Killed processes end soon, not at once."""
    deadline = time.monotonic() + 10
    while children():
        assert time.monotonic() < deadline, children()


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.timeout(1800)  # 25 s alone
def test_a_dry_run_ends_well_and_reports_every_stage(tmp_path):
    done = run(tmp_path, "bash", "scripts/gpu_check.sh", "--dry-run", "--seconds", "1800")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {result["bench"] for result in found} == {"device", "kernels", "decode", "goals", "step"}
    parts = {result["part"] for result in found if result["bench"] == "goals"}
    assert parts == {"offline", "cache_cost", "peer", "serving", "ttft", "load", "prefix"}
    wanted = {stage.name for group in gpu_check.on_a_cpu("1e9") for stage in group} | {"device"}
    assert {name: one["ending"] for name, one in read_records(tmp_path).items()} == dict.fromkeys(wanted, "ok")
    goals = json.loads((tmp_path / "goals.json").read_text())
    assert [goal["name"] for goal in goals] == [f"G{n}" for n in range(1, 15)]
    assert not {"met", "NOT MET"} & {goal["met"] for goal in goals}
    assert done.stdout.endswith((tmp_path / "report.txt").read_text() + "\n")


def test_the_script_names_every_stage_that_the_time_does_not_allow(tmp_path):
    """Through the shell: none starts, all are told of, and that is no good ending."""
    done = run(tmp_path, "bash", "scripts/gpu_check.sh", "--seconds", "0", "--from", "peer_qwen3-0.6b")
    assert done.returncode == 1, done.stderr
    assert {name: one["ending"] for name, one in read_records(tmp_path).items()} == dict.fromkeys(
        ("device", "peer_qwen3-0.6b"), "not started"
    )
    rows = {row["name"]: row for row in json.loads((tmp_path / "goals.json").read_text())}
    assert rows["G12"]["measured"].endswith("(peer_qwen3-0.6b: not started; the device did not answer)")


def test_a_stage_that_fails_stops_no_other_and_its_last_words_are_kept(tmp_path):
    told = []
    stages = Stages(tmp_path, 60, told.append)
    bad = python("bad", f"print('{RESULT}'); print('noise'); raise SystemExit('no memory')")
    assert not gpu_check.run(stages, [(bad,), (python("good", f"print('{RESULT}')"),)])
    found = read_records(tmp_path)
    assert [one["ending"] for one in told] == [found["bad"]["ending"], found["good"]["ending"]] == ["failed", "ok"]
    assert found["bad"]["end"] == ["noise", "no memory"]
    assert found["bad"]["results"] == found["good"]["results"] == [json.loads(RESULT)]
    assert reason(found["bad"]) == "failed; no memory"
    assert "-- bad: failed\nnoise\nno memory" in write(tmp_path, dry_run=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("goals.json", "log.txt", "report.txt", "results.jsonl", "stages.jsonl")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("sleeps_s", "ending"), [("60", "cut off"), ("0", "ok")])
def test_what_a_stage_leaves_running_is_ended_whether_it_was_cut_off_or_not(tmp_path, sleeps_s, ending):
    """A server in a session of its own would keep the GPU's memory from every later stage."""
    begin_s = time.monotonic()
    Stages(tmp_path, 60, lambda _: None).run([python("a", ORPHAN, sleeps_s, limit_s=1)])
    assert time.monotonic() - begin_s < 50, "what sleeps for 60 s has been waited for"
    assert_no_children()
    found = read_records(tmp_path)["a"]
    assert (found["ending"], found["results"]) == (ending, [json.loads(RESULT)])


def test_stages_of_a_group_run_side_by_side(tmp_path):
    """Each waits for a file of the other's."""
    program = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)
"""
    paths = [str(tmp_path / name) for name in ("one", "other")]
    group = [python("a", program, *paths), python("b", program, *reversed(paths))]
    assert Stages(tmp_path, 60, lambda _: None).run(group)


def test_a_stage_whose_limit_does_not_fit_gives_way_to_a_shorter_one(tmp_path):
    stages = Stages(tmp_path, 30, lambda _: None)
    assert not gpu_check.run(stages, [(python("long", "", limit_s=40),), (python("short", "", limit_s=20),)])
    found = read_records(tmp_path)
    assert (found["long"]["ending"], found["short"]["ending"]) == ("not started", "ok")
    assert found["long"]["end"] == ["30 s were left of all, and it may take 40"]


def test_without_a_device_nothing_else_is_started(tmp_path):
    """Kernels' tests would pass under the interpreter, and look as if they had run on a GPU."""
    groups = [(python(gpu_check.DEVICE, "raise SystemExit(1)"),), (python("test", "print('passed')"),)]
    assert not gpu_check.run(Stages(tmp_path, 60, lambda _: None), groups)
    assert read_records(tmp_path)["test"]["ending"] == "not started"


@pytest.mark.slow
def test_being_killed_in_the_middle_loses_nothing(tmp_path):
    """Not even what the stage that was running had printed."""
    program = """
import sys
from pathlib import Path
from gpu_stages import Stage, Stages
stages = Stages(Path(sys.argv[1]), 60, lambda _: None)
first = "import sys; print(sys.argv[1], flush=True)"
last = first + "; import time; print('half a', end='', flush=True); time.sleep(60)"
for name, program in (("first", first), ("last", last)):
    stages.run([Stage(name, 30, (sys.executable, "-S", "-c", program, sys.argv[2]))])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    popen = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), RESULT], env=environment)
    log = tmp_path / "running-last.log"
    deadline = time.monotonic() + 30
    while not (log.exists() and "half a" in log.read_text()):
        assert popen.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for pid in reversed(process_tree(popen.pid)):
        os.kill(pid, signal.SIGKILL)
    popen.wait()
    found = read_records(tmp_path)
    assert {name: one["ending"] for name, one in found.items()} == {"first": "ok", "last": "cut off"}
    assert found["first"]["results"] == found["last"]["results"] == [json.loads(RESULT)]
    assert found["last"]["end"] == ["half a"]
    assert "last" in run(tmp_path, sys.executable, "scripts/gpu_report.py", str(tmp_path)).stdout


def test_a_check_goes_on_at_a_stage_or_without_those_that_ended_well():
    groups = [(python("a", ""), python("b", "")), (python("c", ""),), (python("d", ""),)]

    def left(start, *done):
        return [[stage.name for stage in group] for group in gpu_check.remaining(groups, start, set(done))]

    assert left(None) == [["a", "b"], ["c"], ["d"]]
    assert left("c") == [["c"], ["d"]]
    assert left(None, "a", "c") == [["b"], ["d"]]
    assert left("b", "d") == [["a", "b"], ["c"]]
    with pytest.raises(SystemExit, match="no stage e; there are a b c d"):
        left("e")


def test_kernels_are_tested_first_peers_come_last_and_every_goal_has_its_stages():
    groups = gpu_check.on_a_gpu("4.8e12")
    names = [stage.name for group in groups for stage in group]
    assert len(names) == len(set(names))
    assert "test_attention" in names[: len(groups[0])]
    assert names[-1].startswith("peer")
    assert {name for goal in GOALS for name in goal.stages} <= set(names)
    assert [goal.name for goal in GOALS if not goal.stages] == []
    longest = {stage.name: stage.limit_s for group in groups for stage in group}
    prelude_s = sum(stage.limit_s for [stage] in gpu_check.first("cuda", "wheels", "site"))
    assert prelude_s + max(longest.values()) <= 570, "a stage that never fits"


def test_every_test_file_with_something_for_a_gpu_is_run():
    commands = [" ".join(stage.command) for stage in gpu_check.on_a_gpu("1")[0]]
    for path in (ROOT / "tests" / "kernels").glob("test_*.py"):
        ran = [command for command in commands if f"/{path.name}" in command]
        assert bool(ran) != gpu_check.needs_no_gpu(path), path
    assert any("tests/runner/test_streams.py" in command and "-m gpu" in command for command in commands)
    assert any("tests/test_parity.py" in command and "pytest_asyncio" in command for command in commands)


@pytest.mark.torch
def test_what_only_a_gpu_runs_is_asked_for_in_words_that_the_script_knows(monkeypatch):
    """No dry run comes by these command lines."""
    import bench_goals

    parts = set()
    for [stage] in gpu_check.on_a_gpu("1")[1:]:
        if "scripts/bench_goals.py" in stage.command:
            monkeypatch.setattr(sys, "argv", list(stage.command[1:]))
            args = bench_goals.parse_arguments()
            assert args.device == "cuda"
            assert (ROOT / args.model / "config.json").exists()
            parts |= {*args.parts}
    assert parts == {*bench_goals.IN_PROCESS, *bench_goals.OVER_HTTP}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("options", [(), gpu_check.ASYNC], ids=["kernels", "others"])
def test_kernels_need_no_plugin_of_pytest_and_other_tests_asyncio_s_alone(options):
    """The options of plugins in pyproject.toml would stop a strict pytest that lacks them, and so would their marks."""
    commands = [stage.command for stage in gpu_check.on_a_gpu("1")[0] if "pytest" in stage.command]
    wanted = [command for command in commands if (gpu_check.ASYNC[1] in command) == bool(options)]
    paths = {word for command in wanted for word in command if word.endswith(".py")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, "--collect-only", *paths],
        cwd=ROOT,
        env={**os.environ, **gpu_check.PLAIN_PYTEST},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests collected" in done.stdout


@pytest.mark.slow
def test_wheels_are_installed_into_a_folder_of_their_own(tmp_path):
    """Without a network, and although the machine lacks what the wheel asks for."""
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "VALUE = 7")
        metadata = "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\nRequires-Dist: lost\n"
        wheel.writestr("carried-1.0.dist-info/METADATA", metadata)
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    site = tmp_path / "site"
    [install], _ = gpu_check.first("cpu", str(tmp_path), str(site))
    assert Stages(tmp_path, 100, lambda _: None).run([install]), read_records(tmp_path)
    program = "import carried; print(carried.VALUE)"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"


def test_every_goal_that_is_built_is_judged_by_what_was_measured():
    verdicts = {row["name"]: row["met"] for row in judged(record(results=PASSING), dry_run=False)}
    assert verdicts == {f"G{n}": "met" for n in range(1, 15)}


def test_a_goal_is_missed_by_one_figure_among_many():
    slow = PASSING[0] | {"step_ms": 5.0}
    cliff = {"bench": "kernels", "kernel": "decode_attention", "seqs": 18, "context": 4096, "us": 500.0}
    rows = judged(record(results=[*PASSING, slow, cliff | {"gb_per_s": 3900.0}]), dry_run=False)
    missed = {row["name"]: row["measured"] for row in rows if row["met"] == "NOT MET"}
    assert missed == {"G1": "5 / 1 / 1 ms (70% / 70% / 70%)", "G9": "3.90 TB/s, 1.39 x"}


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ({}, "(http_qwen3-8b was not run)"),
        (record("http_qwen3-8b", "cut off", end=["loading", ""]), "(http_qwen3-8b: cut off; loading)"),
        (
            record(
                "http_qwen3-8b", "failed", [{"bench": "goals_failed", "part": "ttft", "error": "KeyError: 1"}], ["x"]
            ),
            "(http_qwen3-8b: failed; ttft: KeyError: 1)",
        ),
    ],
)
def test_what_was_not_measured_is_named_with_the_reason(records, why):
    others = [line for line in PASSING if line.get("part") != "ttft"]
    [row] = [row for row in judged(record(results=others) | records, dry_run=False) if row["name"] == "G7"]
    assert row["met"] == "missing"
    assert row["measured"] == f"ttft_p50_ms of goals ttft qwen3-8b 128 {why}"


def test_of_several_runs_the_last_record_of_a_stage_counts(tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, speed in zip(folders, (1, 2), strict=True):
        folder.mkdir()
        Stages(folder, 60, lambda _: None).run([python("a", f'print(\'{{"bench": "a", "us": {speed}}}\')')])
    Stages(folders[0], 60, lambda _: None).run([python("b", "")])
    found = merged(folders)
    assert sorted(found) == ["a", "b"]
    assert found["a"]["results"] == [{"bench": "a", "us": 2}]


def test_the_report_lines_cells_up():
    lines = [{"bench": "a", "size": 10, "us": 1.5, "commit": "x"}, {"bench": "longer", "model": "x/y", "us": 30.0}]
    assert aligned([cells(line) for line in lines]).splitlines() == [
        "a       size=10  us=1.5",
        "longer  model=y  us=30.0",
    ]


def test_the_documented_table_has_the_goals_as_they_are_judged():
    """Only the last cells are filled in by hand, from `gpu_report.py --markdown` of what a GPU gave."""
    documented = (ROOT / "docs" / "performance.md").read_text()
    empty = markdown(judged({}, dry_run=False)).splitlines()
    assert len(empty) == 2 + len(GOALS)
    for line in empty:
        assert line.removesuffix(" |") in documented
    filled = markdown(judged(record(results=PASSING), dry_run=False))
    assert "| 3e+04 / 3e+04 / 3e+04 tok/s: met |" in filled


@pytest.mark.torch
@pytest.mark.parametrize(("goal", "model"), [(0, "llama-3.1-8b"), (1, "qwen3-4b"), (2, "qwen3-0.6b")])
def test_rooflines_of_steps_are_those_of_the_shapes(goal, model):
    from bench_decode import linear_bytes

    from aserve.models.spec import read_spec

    spec = read_spec(json.loads((ROOT / "scripts" / "shapes" / model / "config.json").read_text()))
    num_bytes, kv_bytes = linear_bytes(spec), 1024 * spec.kv_bytes_per_token(2)
    seconds = [max(num_bytes / 4.8e12, b * num_bytes / 990e12) + b * kv_bytes / 4.8e12 for b in (1, 32, 256)]
    stated = [float(word) for word in GOALS[goal].roofline.removesuffix(" ms").split(" / ")]
    assert [1e3 * one for one in seconds] == pytest.approx(stated, rel=0.02)
