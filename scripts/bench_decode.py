"""Milliseconds of a decode step in the model runner, without scheduler, text or HTTP, two steps in flight.

Rows are prefilled with random tokens to --context, then decode --steps tokens each. One JSON line a batch size.
`roofline_share`: the time in which memory of --bandwidth (bytes per second) delivers the weights of the linear layers
and the KV cache of the batch, in 16 bits (of layers 8 with --quantization fp8, of the cache with --kv-cache-dtype fp8),
divided by the measured time. On CUDA some more steps run under torch's profiler: `busy_share` of their time the device
had something to do, and between two steps it waited for `gap_us` (the median). A graph is one thing to do, from its
first kernel to its last: what passes @
    python scripts/bench_decode.py --model scripts/shapes/qwen3-8b --load-format dummy --bandwidth 4.8e12
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from report import emit

from aserve import build
from aserve.cli.bench.step_plans import Rows
from aserve.core.plan import StepPlan
from aserve.core.ports import Runner
from aserve.engine import EngineParts
from aserve.models.spec import ModelSpec, read_spec

PROFILED_PROMPTS: Final = 4
NUM_KERNELS: Final = 16
NAME_CHARACTERS: Final = 80
"""Of a kernel: a template's name goes on for a page."""


async def time_steps(runner: Runner, plans: list[StepPlan]) -> list[float]:
    """Seconds between landings, with the next step launched before the last one has landed."""
    times = []
    flying = runner.launch(plans[0])
    before = time.perf_counter()
    for plan in plans[1:]:
        launched = runner.launch(plan)
        await flying.land()
        now = time.perf_counter()
        times.append(now - before)
        before, flying = now, launched
    await flying.land()
    return times


class Span(NamedTuple):
    """Something that ran on the device, in microseconds. launch: the call of the host that it comes from."""

    name: str
    launch: int
    begin_us: float
    end_us: float


def launches_us(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """From the first begin to the last end of each launch.

    The kernels of a graph bear the correlation id of the one call that launched it (CUPTI's activity records).
    """
    whole: dict[int, tuple[float, float]] = {}
    for _, launch, begin_us, end_us in spans:
        before = whole.get(launch, (begin_us, end_us))
        whole[launch] = min(before[0], begin_us), max(before[1], end_us)
    return list(whole.values())


def busy_figures(spans_us: Iterable[tuple[float, float]], num_steps: int) -> dict[str, float]:
    """busy_share and gap_us of launches that ran from begin to end, in microseconds; nothing of none.

    gap_us: of the waits between launches the num_steps longest are those between steps.
    """
    spans_us = sorted(spans_us)
    if not spans_us:
        return {}
    covered = spans_us[0][0]
    gaps_us = []
    for begin, end in spans_us:
        if begin > covered:
            gaps_us.append(begin - covered)
        covered = max(covered, end)
    total_us = covered - spans_us[0][0]
    longest = sorted(gaps_us)[-num_steps:] or [0.0]
    return {"busy_share": 1 - sum(gaps_us) / total_us, "gap_us": statistics.median(longest)}


def kernel_figures(spans: Iterable[Span], num_steps: int) -> list[tuple[str, dict[str, float]]]:
    """The kernels that take the most time, by name: microseconds and launches of a step."""
    durations_us = defaultdict[str, list[float]](list)
    for span in spans:
        durations_us[span.name[:NAME_CHARACTERS]].append(span.end_us - span.begin_us)
    longest = sorted(durations_us.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]
    return [(name, {"us": sum(us) / num_steps, "launches": len(us) / num_steps}) for name, us in longest]


async def profile_steps(runner: Runner, plans: list[StepPlan]) -> list[Span]:
    """What these steps have the device do, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        await time_steps(runner, plans)
    return list(device_spans(profiled.events()))


def device_spans(events: Iterable[Any]) -> Iterator[Span]:
    """What ran on the device, of the events of torch's profiler; an annotation only covers what is told by itself."""
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            yield Span(event.name, event.id, event.time_range.start, event.time_range.end)


def linear_bytes(spec: ModelSpec, quantization: str | None = None) -> int:
    """Bytes of the weights that every step reads: all linear layers, in 16 bits or fp8, and the head, in 16 bits."""
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = hidden * (2 * heads + 2 * kv_heads) + 3 * hidden * spec.intermediate_size
    return (1 if quantization == "fp8" else 2) * spec.num_layers * layer + 2 * hidden * spec.vocab_size


async def bench(parts: EngineParts, batch: int, args: argparse.Namespace) -> None:
    """The figures of one batch size."""
    rows = Rows(batch, args.context, parts.config.block_size, parts.info.vocab_size, args.steps + args.profiled_steps)
    config = {"model": args.model, "batch": batch, "context": args.context, "quantization": args.quantization}
    config["kv_cache_dtype"] = args.kv_cache_dtype
    prompts = rows.prefill(parts.config.max_num_batched_tokens)
    await time_steps(parts.runner, prompts[:-PROFILED_PROMPTS] or prompts)
    profiled_prompts = await profile_steps(parts.runner, prompts[-PROFILED_PROMPTS:])
    step_s = statistics.median(await time_steps(parts.runner, [rows.decode(step) for step in range(args.steps)]))
    figures = {"step_ms": 1e3 * step_s, "tokens_per_s": batch / step_s}
    if args.bandwidth:
        of_token = args.spec.kv_bytes_per_token(1 if args.kv_cache_dtype == "fp8" else 2)
        num_bytes = linear_bytes(args.spec, args.quantization) + batch * args.context * of_token
        figures["roofline_share"] = num_bytes / args.bandwidth / step_s
    profiled = [rows.decode(args.steps + step) for step in range(args.profiled_steps)]
    spans = await profile_steps(parts.runner, profiled)
    num_steps = {"prefill": len(prompts[-PROFILED_PROMPTS:]), "decode": len(profiled)}
    emit("decode", config, figures | busy_figures(launches_us(spans), len(profiled)))
    for phase, its_spans in ("prefill", profiled_prompts), ("decode", spans):
        for name, of_kernel in kernel_figures(its_spans, num_steps[phase]):
            emit("device_kernel", config | {"phase": phase, "kernel": name}, of_kernel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, and the demo model's tokenizer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization", help="of the linear layers: fp8")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of keys and values: fp8")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--profiled-steps", type=int, default=20)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--bandwidth", type=float, help="of the device's memory, in bytes per second")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, to prove the script")
    args = parser.parse_args()
    if args.dry_run:
        args.batch, args.context, args.steps, args.profiled_steps = [1, 2], 16, 4, 2
    options = build.make_options(
        model=args.model,
        load_format=args.load_format,
        device=args.device,
        tokenizer="demo" if args.load_format == "dummy" else None,
        max_num_seqs=max(args.batch),
        max_model_len=args.context + args.steps + args.profiled_steps,
        enforce_eager=args.enforce_eager,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    if args.bandwidth:
        args.spec = read_spec(json.loads((Path(args.model) / "config.json").read_text()))
    parts = build.load(options, lambda _: None)
    try:
        for batch in args.batch:
            asyncio.run(bench(parts, batch, args))
    finally:
        parts.runner.close()


if __name__ == "__main__":
    main()
