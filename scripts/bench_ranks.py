"""What tensor parallelism costs here: plans told to a rank, the group's calls, and steps beside one process's.

    plans    encode, write and decode a plan, and the way there and back that a result would take if rank 0 were a child
    group    an all_reduce and a broadcast among ranks, by size
    steps    tokens a second, 1 process beside N ranks, in turns: both on all cores that this machine has

Best of the rounds, since what else runs here takes time from both. One JSON line each.

    python scripts/bench_ranks.py --parts plans,group,steps --model demo --rounds 5
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import torch
from report import emit

from aserve import AsyncEngine, SamplingParams
from aserve.core.columns import NEUTRAL
from aserve.core.ids import BlockId, Row, SeqId
from aserve.core.plan import RowInit, RowSampling, SeqSlice, StepPlan
from aserve.runner.following import followed
from aserve.runner.groups import MeetingFile, RankGroup
from aserve.runner.rank_messages import PipeReader, PipeWriter, Run, decode_told, frame

NUM_PLANS = 300
NUM_CALLS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="plans,group,steps")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    parts = args.parts.split(",")
    if "plans" in parts:
        bench_plans()
    if "group" in parts:
        bench_group(args.ranks)
    if "steps" in parts:
        asyncio.run(bench_steps(args))


# ---- plans


def decoding(num_rows: int) -> StepPlan:
    """A token each; every sixteenth row has a new block."""
    return StepPlan(
        7,
        tuple(
            SeqSlice(SeqId(i), Row(i), 500 + i, 1, (), (BlockId(1000 + i),) if i % 16 == 0 else (), 1)
            for i in range(num_rows)
        ),
    )


def admitting(num_rows: int, num_tokens: int) -> StepPlan:
    """A prompt each."""
    sampling = RowSampling(NEUTRAL._replace(temperature=0.7))
    pieces = [
        SeqSlice(SeqId(i), Row(i), 0, num_tokens, tuple(range(1000, 1000 + num_tokens)), (), 1) for i in range(num_rows)
    ]
    inits = [RowInit(Row(i), SeqId(i), sampling, (BlockId(2 * i), BlockId(2 * i + 1))) for i in range(num_rows)]
    return StepPlan(7, tuple(pieces), tuple(inits))


def bench_plans() -> None:
    plans = {"decode 1": decoding(1), "decode 32": decoding(32), "decode 256": decoding(256)}
    plans |= {"admit 16 of 32": admitting(16, 32), "admit 256 of 32": admitting(256, 32)}
    read_fd, write_fd = os.pipe()
    reader, writer = PipeReader(read_fd), PipeWriter(write_fd)
    back_read, back_write = os.pipe()
    back_reader, back_writer = PipeReader(back_read), PipeWriter(back_write)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(tuple[int, ...])

    def rank() -> None:
        """In a process of its own: gets plans, and gives results."""
        while (payloads := reader.read()) is not None:
            for payload in payloads:
                told = decode_told(payload)
                assert isinstance(told, Run)
                encoded = encoder.encode(tuple(range(100_000, 100_000 + len(told.plan.slices))))
                back_writer.write(bytearray(len(encoded).to_bytes(4, "little") + encoded))

    pid = os.fork()
    if pid == 0:
        os.close(write_fd)
        rank()
        os._exit(0)
    for name, plan in plans.items():
        times: dict[str, list[float]] = {"tell": [], "there_and_back": []}
        for _ in range(NUM_PLANS):
            start_s = time.perf_counter()
            writer.write(frame(Run(followed(plan))))
            times["tell"].append(time.perf_counter() - start_s)
            payloads: list[memoryview] = []
            while not payloads:
                payloads = back_reader.read() or []
            decoder.decode(payloads[0])
            times["there_and_back"].append(time.perf_counter() - start_s)
        framed = frame(Run(followed(plan)))
        decode_us = 1e6 * best(partial(decode_told, memoryview(bytes(framed[4:]))))
        told = {f"{what}_us": 1e6 * statistics.median(found) for what, found in times.items()}
        least = {f"{what}_best_us": 1e6 * min(found) for what, found in times.items()}
        emit("plans", {"plan": name}, {"bytes": len(framed), **told, **least, "decode_us": decode_us})
    os.close(write_fd)
    os.waitpid(pid, 0)


def best(work: Callable[[], object], times: int = 100) -> float:
    """Seconds."""
    found = []
    for _ in range(times):
        start_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - start_s)
    return min(found)


# ---- the group


def bench_group(size: int) -> None:
    """By threads of this process, which wait without the interpreter's lock."""
    meeting = MeetingFile()

    def rank(number: int) -> dict[str, tuple[float, float]]:
        torch.set_num_threads(1)
        group = RankGroup(number, size, meeting.path, 60.0)
        group.join()
        calls: dict[str, Callable[[], object]] = {}
        for rows in (1, 32, 512):
            calls[f"all_reduce [{rows}, 896] float32"] = partial(group.all_reduce, torch.ones(rows, 896))
        calls["broadcast [256] int64"] = partial(group.broadcast, torch.zeros(256, dtype=torch.int64))
        calls["gather [1, 75968] float32"] = partial(group.gather, torch.ones(1, 75968))
        found = {}
        for name, call in calls.items():
            times = []
            for _ in range(NUM_CALLS):
                start_s = time.perf_counter()
                call()
                times.append(time.perf_counter() - start_s)
            found[name] = statistics.median(times), min(times)
        group.leave()
        return found

    with ThreadPoolExecutor(size) as pool:
        first, *_ = pool.map(rank, range(size))
    for name, (median_s, best_s) in first.items():
        emit("group", {"call": name}, {"median_us": 1e6 * median_s, "best_us": 1e6 * best_s})
    meeting.close()


# ---- steps


async def bench_steps(args: argparse.Namespace) -> None:
    """Engines of both kinds are there at once, and asked in turns."""
    options: dict[str, Any] = {"dtype": args.dtype, "max_model_len": 1024, "enable_prefix_caching": False}
    sizes = (1, args.ranks)
    async with (
        AsyncEngine(args.model, **options) as one,
        AsyncEngine(args.model, tensor_parallel_size=args.ranks, **options) as several,
    ):
        for streams in map(int, args.streams.split(",")):
            found: dict[int, list[float]] = {size: [] for size in sizes}
            for _ in range(args.rounds):
                for size, engine in zip(sizes, (one, several), strict=True):
                    found[size].append(await decode_s(engine, streams, args.tokens))
            tell("decode", streams, found, streams * args.tokens)
        for num_tokens in (128, 512):
            found = {size: [] for size in sizes}
            for _ in range(args.rounds):
                for size, engine in zip(sizes, (one, several), strict=True):
                    found[size].append(await prefill_s(engine, num_tokens))
            tell(f"prefill {num_tokens}", 1, found, num_tokens)


def tell(what: str, streams: int, found: dict[int, list[float]], num_tokens: int) -> None:
    one_s, several_s = (min(times) for times in found.values())
    tokens_per_s = {size: num_tokens / min(times) for size, times in found.items()}
    emit("ranks", {"what": what, "streams": streams}, {"tokens_per_s": tokens_per_s, "ratio": one_s / several_s})


async def decode_s(engine: AsyncEngine, streams: int, num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start_s = time.perf_counter()
    await asyncio.gather(*(engine.complete((5, 6, 7 + stream), params) for stream in range(streams)))
    return time.perf_counter() - start_s


async def prefill_s(engine: AsyncEngine, num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    start_s = time.perf_counter()
    await engine.complete(tuple(range(5, 5 + num_tokens)), params)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
