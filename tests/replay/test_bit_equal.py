"""Recordings of real models replayed, bit by bit: what preempts, swaps, shares, drafts, searches and masks.

python -m pytest -m thorough tests/replay/test_bit_equal.py        a hundred of them
"""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aserve import AsyncEngine, BeamParams, SamplingParams, StructuredOutputs
from aserve.build import load
from aserve.recording.files import Recording
from aserve.replay.replaying import Replay, Replayed, check_replayable
from tests.checkpoints import write_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.slow]

FEW = range(5, 10)
"""Seeds among which memory is short, with swaps and without, and drafts are made, and windows."""
KINDS: tuple[dict[str, Any], ...] = (
    {"n": 3},
    {"beam": BeamParams(width=3), "n": 2, "temperature": 0.0},
    {"presence_penalty": 0.6, "repetition_penalty": 1.2, "logprobs": 2},
    {"structured": StructuredOutputs(regex="[a-f]{3,20}")},
    {"best_of": 3},
    {"prompt_logprobs": 1},
    {},
)
LEAVES = len(KINDS) - 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("models")
    names = {False: "qwen2", True: "qwen2_windows"}
    return {windows: write_checkpoint(root / name, name) for windows, name in names.items()}


async def ask(engine: AsyncEngine, rng: random.Random, number: int) -> None:
    await asyncio.sleep(rng.random() * 0.05)
    prompt = (*range(40, 40 + rng.choice([5, 17, 40])), *(rng.randrange(10, 90) for _ in range(rng.randrange(20))))
    kind = rng.randrange(len(KINDS))
    fields = {"max_tokens": rng.randrange(1, 32), "temperature": rng.choice([0.0, 0.9]), "seed": number}
    num_seen = 0
    async with engine.open(prompt, SamplingParams(**fields | {"ignore_eos": True} | KINDS[kind])) as mailbox:
        async for _ in mailbox:
            num_seen += 1
            if kind == LEAVES and num_seen == 3:
                return


def record(path: Path, models: dict[bool, Path], seed: int) -> Counter[str]:
    """What came over the requests, and had to, for the recording to be of any use."""
    windows, swaps, drafts, is_tight = bool(seed % 2), seed // 2 % 2, seed // 4 % 2, seed // 8 % 2 == 0
    num_blocks = (60 if windows else 36) if is_tight else 400
    drafting = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1} if drafts else None

    async def run() -> Counter[str]:
        engine = AsyncEngine(
            models[windows],
            dtype="float32",
            max_model_len=128,
            block_size=8,
            kv_cache_memory_bytes=num_blocks * 2048 // (1 + windows),
            preemption_mode="swap" if swaps else "recompute",
            swap_space=0.001 if swaps else 0.0,
            speculative_config=drafting,
            record=path,
            record_prompts=True,
            record_logprobs=seed % 3 > 0,
        )
        rng = random.Random(seed)
        async with engine:
            await asyncio.gather(*(ask(engine, rng, number) for number in range(12)))
            found = engine.statistics()
        return Counter(
            windows=int(windows),
            recomputed=found.num_preemptions - found.num_swap_outs,
            swapped=found.num_swap_outs,
            drafts=found.num_drafts,
            hits=found.num_cache_hits,
        )

    return asyncio.run(run())


def replay(recording: Recording) -> Replayed:
    check_replayable(recording, checks=True)
    asked = msgspec.structs.replace(recording.header.options, record=None, record_prompts=False, record_logprobs=False)

    async def run() -> Replayed:
        parts = load(asked, lambda _: None, recording.header.config)
        try:
            return await Replay(recording, parts.runner).run()
        finally:
            await parts.close(is_stuck=False)

    return asyncio.run(run())


def check(root: Path, models: dict[bool, Path], seeds: range) -> Counter[str]:
    came = Counter[str]()
    for seed in seeds:
        path = root / f"{seed}.rec"
        came += record(path, models, seed)
        found = replay(Recording(path)).comparison
        assert found.is_equal, f"seed {seed}: {found.first or found.first_logprob}"
        assert found.num_tokens > 50
        assert (found.num_logprobs == found.num_tokens) == (seed % 3 > 0)
        came["compared"] += found.num_tokens
        path.unlink()
    return came


def test_a_few_are_replayed_bit_by_bit(tmp_path: Path, models: dict[bool, Path]):
    came = check(tmp_path, models, FEW)
    assert all(came[name] for name in ("windows", "recomputed", "swapped", "drafts", "hits")), came


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_a_hundred_are_replayed_bit_by_bit(tmp_path: Path, models: dict[bool, Path]):
    came = check(tmp_path, models, range(100))
    assert all(came[name] for name in ("windows", "recomputed", "swapped", "drafts", "hits")), came
