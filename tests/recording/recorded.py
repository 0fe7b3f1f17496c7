"""Recordings of engines without a model: a real scheduler over a scripted runner, told to a tape."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from aserve.core.config import EngineConfig, Options
from aserve.core.params import SamplingParams
from aserve.engine import Engine, EngineParts, Progress
from aserve.recording.files import Recording
from aserve.recording.records import Header
from aserve.recording.scheduler import RecordedScheduler
from aserve.recording.tape import Tape
from aserve.scheduling import make_scheduler
from tests.engines import scripted_loader
from tests.fakes import FakeKV, ScriptedRunner

VOCABULARY = range(97, 123)
PROMPTS = tuple(tuple(range(97, 97 + length)) for length in (3, 20, 11, 20, 7, 24))


def header(config: EngineConfig, **fields: object) -> Header:
    return Header(
        version="0",
        started_s=0.0,
        model="scripted",
        fingerprint="",
        vocab_size=260,
        device="cpu",
        dtype="float32",
        options=Options(),
        config=config,
        **fields,
    )


def runner(block_size: int = 8) -> ScriptedRunner:
    return ScriptedRunner(model=FakeKV(block_size, VOCABULARY, seeded=True))


def record(
    path: Path,
    *,
    has_prompts: bool = True,
    scores_all: bool = False,
    max_bytes: int = 10**7,
    land_errors: dict[int, BaseException] | None = None,
    **numbers: object,
) -> Recording:
    """Six requests, some with several choices, one that is given up; as many blocks as `numbers` say."""
    model = ScriptedRunner(model=FakeKV(8, VOCABULARY, seeded=True), land_errors=land_errors)
    load = scripted_loader(runner=model)

    def recorded_loader(report: Callable[[Progress], None]) -> EngineParts:
        parts = load(report)
        config = msgspec.structs.replace(parts.config, **numbers)
        head = header(config, has_prompts=has_prompts, has_logprobs=scores_all)
        tape = Tape(str(path), head, max_bytes=max_bytes)
        scheduler = make_scheduler(config, partial(RecordedScheduler, tape.tell, tape.give_up, scores_all=scores_all))
        return replace(parts, config=config, scheduler=scheduler, on_close=tape.close)

    async def ask(engine: Engine, number: int) -> None:
        params = SamplingParams(
            max_tokens=4 + 3 * number, n=1 + number % 2, seed=number, temperature=number % 3 / 2, ignore_eos=True
        )
        async with engine.open(PROMPTS[number], params, request_id=f"r{number}") as mailbox:
            async for _ in mailbox:
                if number == 4:
                    return

    async def ask_all() -> None:
        async with Engine(recorded_loader) as engine:
            await asyncio.gather(*(ask(engine, number) for number in range(len(PROMPTS))))

    asyncio.run(ask_all())
    return Recording(path)
