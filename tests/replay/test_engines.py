"""Recordings of engines of several kinds replayed: with an adapter, with a draft model, in another dtype, with int8."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from aserve import AsyncEngine, SamplingParams
from aserve.cli import commands
from aserve.recording.files import Recording
from aserve.recording.records import Planned
from aserve.scheduler.drafting import Drafter
from tests.adapters import write_adapter
from tests.checkpoints import write_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NUM_TOKENS = 16
ALL_EQUAL = "all 48 tokens of 3 sequences are equal"
ALL_SCORES_EQUAL = "all 48 logprobs are equal, bit by bit"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


def record(path: Path, model: Path, *, lora: str | None = None, **options: Any) -> list[Planned]:
    """Three answers at once, the last of them by an adapter if there is one; the plans that were made for them."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)

    async def answer() -> None:
        engine = AsyncEngine(model, record=path, record_prompts=True, record_logprobs=True, **options)
        async with engine:
            adapters = (None, None, lora)
            asked = (engine.complete([40 + k, 50, 60, 50], params, lora=name) for k, name in enumerate(adapters))
            await asyncio.gather(*asked)

    asyncio.run(answer())
    return [one for one in Recording(path).records() if isinstance(one, Planned)]


def replay(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> tuple[int, str]:
    capsys.readouterr()
    status = commands.main(["replay", str(path), "--check", *words])
    return status, capsys.readouterr().out


def test_with_an_adapter(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    adapter, other = (write_adapter(tmp_path / name, model, seed=seed, size=0.6) for seed, name in enumerate("ab"))
    path = tmp_path / "a.rec"
    plans = record(path, model, lora="a", dtype="float32", enable_lora=True, lora_modules={"a": str(adapter)})
    assert {init.adapter is None for one in plans for init in one.plan.inits} == {False, True}
    status, out = replay(capsys, path)
    assert status == 0, out
    assert ALL_EQUAL in out
    assert ALL_SCORES_EQUAL in out
    adapter.rename(tmp_path / "gone")
    other.rename(adapter)
    status, out = replay(capsys, path)
    assert status == 1, "other factors in the same folder bring other tokens"
    assert "and 2 of 3 sequences" in out


def test_with_the_drafts_of_a_model(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Drafter, "_price", lambda *_: 0.0)
    path = tmp_path / "a.rec"
    drafting = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    plans = record(path, model, dtype="float32", speculative_config=drafting)
    assert any(one.plan.drafting for one in plans)
    assert any(piece.num_samples > 1 for one in plans for piece in one.plan.slices)
    status, out = replay(capsys, path)
    assert status == 0, out
    assert ALL_EQUAL in out
    assert ALL_SCORES_EQUAL in out


@pytest.mark.parametrize(
    ("other", "recorded"),
    [
        (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
        (["--quantization", "int8"], {"quantization": "int8"}),
        (["--kv-cache-dtype", "bfloat16"], {"kv_cache_dtype": "bfloat16"}),
    ],
)
def test_with_weights_or_a_cache_of_another_kind(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], other: list[str], recorded: dict[str, str]
):
    """What was recorded with them is replayed bit by bit; what was not is told to be that far away."""
    record(tmp_path / "same.rec", model, **{"dtype": "float32"} | recorded)
    status, out = replay(capsys, tmp_path / "same.rec")
    assert status == 0, out
    assert ALL_EQUAL in out
    assert ALL_SCORES_EQUAL in out
    record(tmp_path / "whole.rec", model, dtype="float32")
    status, out = replay(capsys, tmp_path / "whole.rec", *other)
    assert status == 1, out
    assert "the first logprob that differs: step " in out
    distance = re.search(r"the largest distance of two of \d+ logprobs: (\S+)", out)
    assert distance is not None, out
    assert 0.0 < float(distance[1]) < 1.0
