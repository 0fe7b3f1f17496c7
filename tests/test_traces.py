"""Random traces of overlapping requests over a real model, in a pool so small that they preempt and swap one another.

Every answer must be, token by token, what its request yields when it is alone in a large pool without a prefix cache;
of a request that was aborted, a beginning of that. There is no excuse: a row's bits do not depend on what else is in
its step. More traces than a test run does:

    python -m tests.test_traces 500
    python -m tests.test_traces 500 bfloat16
"""

import asyncio
import random
import sys
import tempfile
from collections import Counter, deque
from pathlib import Path

import msgspec
import pytest
import torch

from aserve.build import load, make_options
from aserve.core.config import GiB
from aserve.core.ids import RequestId
from aserve.core.params import BeamParams, SamplingParams
from aserve.core.plan import StepPlan
from aserve.core.ports import Flight, Runner
from aserve.core.request import Request
from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.queue import first_come_first_served, priority_with_ageing
from aserve.scheduler.scheduler import Scheduler
from tests.checkpoints import EOS_ID, VOCAB_SIZE, checkpoints, write_checkpoint
from tests.fakes import deltas_of

__all__ = ["checkpoints"]
pytestmark = [pytest.mark.torch, pytest.mark.slow]

NUM_TRACES = {"float32": 20, "bfloat16": 10}
NUM_MOVES = 40
BLOCK_SIZE = 8
BLOCK_NUMBERS = BLOCK_SIZE * 64
"""Keys and values of the tiny Llama: 2 layers of 2 heads of 8 dimensions."""
NUM_BLOCKS, NUM_HOST_BLOCKS, MAX_NUM_SEQS = 64, 32, 8
MAX_MODEL_LEN = 40
STEMS = tuple(tuple(random.Random(seed).choices(range(1, 256), k=16)) for seed in range(3))
"""Beginnings that many prompts share."""
Answers = dict[tuple[str, int], list[int]]
"""The tokens of each choice: (request id, index)."""


def load_runner(folder: Path, dtype: str) -> Runner:
    """The runner that an engine on `folder` has; every trace has a scheduler of its own over it."""
    block_bytes = BLOCK_NUMBERS * getattr(torch, dtype).itemsize
    options = make_options(
        model=folder,
        dtype=dtype,
        device="cpu",
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=NUM_BLOCKS * block_bytes,
        swap_space=NUM_HOST_BLOCKS * block_bytes / GiB,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )
    parts = load(options, lambda _progress: None)
    assert (parts.config.num_blocks, parts.config.num_host_blocks) == (NUM_BLOCKS, NUM_HOST_BLOCKS)
    return parts.runner


class Drive:
    """A scheduler over a runner, a verb at a time. depth: steps in flight at most."""

    def __init__(self, runner: Runner, depth: int, **limits: object) -> None:
        self.scheduler = Scheduler(block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, max_in_flight=depth, **limits)
        self.answers: Answers = {}
        self.now = 0.0
        self._runner = runner
        self._depth = depth
        self._flying: deque[tuple[StepPlan, Flight]] = deque()

    def add(self, wanted: Request) -> None:
        self.scheduler.add(wanted)
        self.answers |= {(wanted.id, index): [] for index in range(wanted.params.n)}

    async def step(self) -> bool:
        """Plan and launch, then land what is due. False when nothing is left to do."""
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self._flying.append((plan, self._runner.launch(plan)))
        if self._flying and (plan is None or len(self._flying) == self._depth):
            _, flight = self._flying.popleft()
            for delta in deltas_of(self.scheduler.commit(await flight.land())):
                self.answers[delta.request_id, delta.index].extend(delta.token_ids)
            return True
        return plan is not None

    async def drain(self) -> None:
        while await self.step():
            pass
        self.scheduler.check()


def random_request(rng: random.Random, name: str, now: float) -> Request:
    """Short enough to fit the smallest pool alone, as beams must."""
    prompt = rng.choice(STEMS)[: rng.choice((0, 8, 12, 16, 16))] + tuple(
        rng.choices(range(1, VOCAB_SIZE), k=rng.randint(1, 4))
    )
    prompt = tuple(token for token in prompt if token != EOS_ID) or (1,)
    max_tokens = rng.randint(1, 20)
    params = random_params(rng)
    if params.beam is not None:
        max_tokens = min(max_tokens, 4 * BLOCK_SIZE - len(prompt))
    return Request(
        id=RequestId(name),
        prompt_token_ids=prompt,
        params=params,
        max_tokens=max_tokens,
        seed=rng.randrange(2**32),
        arrival_s=now,
        stop_ids=frozenset(rng.sample(range(1, VOCAB_SIZE), rng.choice((0, 0, 8)))),
        cache_salt=rng.choice((b"", b"", b"salt")),
        priority=rng.choice((0, 0, 2)),
    )


def random_params(rng: random.Random) -> SamplingParams:
    """Greedy, sampled, penalized; one choice, several, or beams."""
    sampled = {"temperature": 1.0, "top_p": rng.choice((1.0, 0.9)), "top_k": rng.choice((0, 20))}
    match rng.choices(("greedy", "sampled", "penalized", "n", "beam"), (20, 20, 15, 30, 15))[0]:
        case "greedy":
            return SamplingParams(temperature=0.0)
        case "sampled":
            return SamplingParams(**sampled)
        case "penalized":
            return SamplingParams(**sampled, presence_penalty=1.5, repetition_penalty=1.3, frequency_penalty=-0.5)
        case "n":
            return SamplingParams(**sampled, n=rng.randint(2, 4))
    beam = BeamParams(width=rng.randint(2, 3), length_penalty=rng.choice((0.0, 1.0)), early_stopping=rng.random() < 0.5)
    return SamplingParams(beam=beam, n=rng.randint(1, beam.width))


async def run_trace(runner: Runner, seed: int) -> tuple[Drive, dict[str, Request], set[str]]:
    """The life of one scheduler, the requests that it was given, and those of them that were aborted."""
    rng = random.Random(seed)
    drive = Drive(
        runner,
        depth=rng.choice((1, 2, 4)),
        num_blocks=rng.randint(13, 15),
        max_num_seqs=rng.randint(6, MAX_NUM_SEQS),
        max_num_batched_tokens=rng.randint(8, 48),
        num_host_blocks=rng.choice((6, NUM_HOST_BLOCKS)),
        preemption=PreemptionRule(rng.choice(("auto", "swap", "recompute", "swap")), swap_cost_s=20e-6),
        policy=rng.choice((first_come_first_served, priority_with_ageing(3.0))),
        long_prefill_token_threshold=rng.choice((0, 0, 8)),
        keeps_evicted=rng.random() < 0.75,
    )
    requests: dict[str, Request] = {}
    aborted: set[str] = set()
    for _ in range(NUM_MOVES):
        drive.now += 0.5
        match rng.choices(("add", "step", "abort", "reset"), (30, 66, 3, 1))[0]:
            case "add":
                wanted = random_request(rng, f"r{len(requests)}", drive.now)
                drive.add(wanted)
                requests[wanted.id] = wanted
            case "abort" if requests:
                name = rng.choice(list(requests))
                drive.scheduler.cancel(RequestId(name))
                aborted.add(name)
            case "reset":
                drive.scheduler.reset_prefix_cache()
            case _:
                await drive.step()
        drive.scheduler.check()
    await drive.drain()
    return drive, requests, aborted


async def solo(runner: Runner, wanted: Request) -> list[list[int]]:
    """What each choice of a request yields alone: of several that are sampled, each as a request of its own."""
    if wanted.params.beam is None and wanted.params.n > 1:
        params = msgspec.structs.replace(wanted.params, n=1)
        choices = [msgspec.structs.replace(wanted, params=params, seed=wanted.seed + k) for k in range(wanted.params.n)]
        return [(await solo(runner, choice))[0] for choice in choices]
    drive = Drive(
        runner,
        depth=1,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_MODEL_LEN,
        enable_prefix_caching=False,
    )
    drive.add(wanted)
    await drive.drain()
    assert drive.scheduler.statistics().num_preemptions == 0
    return list(drive.answers.values())


async def compare_trace(runner: Runner, seed: int) -> Counter[str]:
    """Run a trace, compare all of its answers, and count what happened."""
    drive, requests, aborted = await run_trace(runner, seed)
    for name, wanted in requests.items():
        for index, expected in enumerate(await solo(runner, wanted)):
            found = drive.answers[name, index]
            whole = expected[: len(found)] if name in aborted else expected
            assert found == whole, f"trace {seed}: choice {index} of {wanted} is {found}, not {expected}"
    counts = drive.scheduler.statistics()
    assert counts.num_used_blocks == counts.num_host_used_blocks == 0
    return Counter(
        traces=1,
        requests=len(requests),
        choices=len(drive.answers),
        beam_searches=sum(wanted.params.beam is not None for wanted in requests.values()),
        aborts=len(aborted),
        preemptions=counts.num_preemptions,
        swap_outs=counts.num_swap_outs,
        swapped_blocks=counts.num_swapped_blocks,
        copied_blocks=counts.num_copied_blocks,
        cache_hit_tokens=counts.num_cache_hits,
        evictions=counts.num_cache_evictions,
        host_hit_blocks=counts.num_host_hit_blocks,
        traces_with_preemption=int(counts.num_preemptions > 0),
        traces_with_swap=int(counts.num_swap_outs > 0),
    )


async def compare_traces(folder: Path, num_traces: int, dtype: str) -> Counter[str]:
    """As `compare_trace`, of so many."""
    runner = load_runner(folder, dtype)
    counts: Counter[str] = Counter()
    try:
        for seed in range(num_traces):
            counts += await compare_trace(runner, seed)
    finally:
        runner.close()
    return counts


@pytest.mark.parametrize(("dtype", "num_traces"), NUM_TRACES.items())
async def test_every_answer_of_a_trace_equals_its_solo_run(checkpoints, dtype, num_traces):
    counts = await compare_traces(checkpoints("llama"), num_traces, dtype)
    assert counts["copied_blocks"] > num_traces, counts
    assert counts["host_hit_blocks"] > num_traces / 2, counts
    assert counts["cache_hit_tokens"] > num_traces, counts
    assert counts["traces_with_preemption"] > num_traces / 2, counts
    assert counts["traces_with_swap"] > num_traces / 2, counts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        tiny = write_checkpoint(Path(root) / "llama", "llama")
        print(dict(asyncio.run(compare_traces(tiny, int(sys.argv[1]), *sys.argv[2:] or ["float32"]))))
