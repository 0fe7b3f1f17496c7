"""`aserve replay` and `aserve simulate`: what they tell, how they end, and what is refused before torch is loaded."""

import asyncio
import json
from pathlib import Path

import pytest

from aserve import AsyncEngine, SamplingParams
from aserve.cli import commands
from aserve.recording.files import Recording, first_bytes, frame, pack
from aserve.recording.records import Landed
from tests.cli.program import modules_after
from tests.recording.recorded import record


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "scripted.rec"
    record(path, has_prompts=False)
    return path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = commands.main(words)
    out, err = capsys.readouterr()
    return status, out, err


def test_a_simulation_is_a_table(scripted: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = told(capsys, "simulate", str(scripted), "--set", "max_num_seqs=1", "max-num-batched-tokens=32")
    assert status == 0
    [head, *rows] = out.splitlines()
    assert head.split() == ["recorded", "simulated", "with", "changes"]
    assert next(row for row in rows if row.startswith("requests")).split() == ["requests", "6", "6", "6"]


def test_a_simulation_as_json(scripted: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = told(capsys, "simulate", str(scripted), "--json")
    found = json.loads(out)
    assert status == 0
    assert set(found) == {"model", "changes", "recorded", "simulated"}
    assert found["simulated"]["requests"] == 6


def test_a_step_is_shown_without_a_model(scripted: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = told(capsys, "replay", str(scripted), "--step", "1")
    assert status == 0
    assert "scripted as float32 on cpu, recorded by aserve 0 without prompts" in out
    assert "step 1 at" in out
    assert "set up row" in out
    assert "row 0: request r0 choice 0, position 3" in out  # which was set up in the step before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["simulate"], "aserve simulate needs a recording: aserve simulate FILE"),
        (["replay"], "aserve replay needs a recording: aserve replay FILE"),
        (["simulate", "FILE", "--set", "max_num_seq=4"], "unknown name max_num_seq; did you mean max_num_seqs?"),
        (["simulate", "FILE", "--set", "max_num_seqs"], "--set: NAME=VALUE is expected, got 'max_num_seqs'"),
        (["simulate", "FILE", "--set", "max_num_seqs=many"], "--set max_num_seqs=many: a whole number is expected"),
        (["simulate", "FILE", "--set", "max_num_seqs=0"], "max_num_seqs must be at least 1, got 0"),
        (["simulate", "FILE", "--set", "zzz=1"], "unknown name zzz; there are block_size,"),
        (["replay", "FILE", "--check"], "recorded without prompts: other tokens are computed"),
        (["replay", "FILE", "--step", "9999"], "there is no step 9999; the last one is"),
        (["replay", "NOTHING"], "NOTHING: cannot read it: No such file or directory"),
        (["replay", "FILE", "--model", "./nowhere"], "./nowhere"),
        (["serve", "demo", "--record", "FILE"], "exists, and a recording is written over nothing"),
        (["serve", "demo", "--record", "/nowhere/a.rec"], "--record: /nowhere is no folder"),
        (["serve", "demo", "--record-prompts"], "record_prompts needs record"),
    ],
)
def test_mistakes_are_told_in_a_line(scripted: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str):
    status, _, err = told(capsys, *(str(scripted) if word == "FILE" else word for word in words))
    assert status in (1, 2)
    assert line in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["simulate"], ["replay", "--check"], ["replay", "--step", "1"]])
def test_torch_is_not_loaded(scripted: Path, words: list[str]):
    """Not for a simulation, for a step that is shown, nor for what is refused."""
    _, modules = modules_after(words[0], str(scripted), *words[1:])
    assert not {"torch", "transformers", "numpy"} & modules


@pytest.mark.torch
@pytest.mark.slow
def test_the_demonstration_model_recorded_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "demo.rec"

    async def answer() -> None:
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
        engine = AsyncEngine("demo", record=path, record_prompts=True, record_logprobs=True, max_num_seqs=2)
        async with engine:
            await asyncio.gather(*(engine.complete(f"Hello {number}", params) for number in range(3)))

    asyncio.run(answer())
    status, out, _ = told(capsys, "replay", str(path), "--check")
    assert status == 0
    assert "all 36 tokens of 3 sequences are equal" in out
    assert "all 36 logprobs are equal, bit by bit" in out

    recording = Recording(path)
    records = list(recording.records())
    place = next(place for place, one in enumerate(records) if isinstance(one, Landed) and one.step_id == 5)
    landed = records[place]
    wrong = (landed.token_ids[0] + 1, *landed.token_ids[1:])
    records[place] = Landed(landed.at_s, 5, landed.took_s, wrong, landed.num_accepted, (), landed.logprobs)
    changed = tmp_path / "changed.rec"
    changed.write_bytes(first_bytes(recording.header) + frame(pack(records, len(records))))
    status, out, _ = told(capsys, "replay", str(changed), "--check", "--step", "6")
    assert status == 1
    assert "the first difference: step 5, row 0" in out
    assert f"recorded token {wrong[0]}, found token {landed.token_ids[0]}" in out
    assert "step 6 at" in out
