"""Where the time of a step goes on a CPU: milliseconds by operator, of decoding steps and of prompts.

Steps are timed without torch's profiler first, since that slows small operators; `step_ms` is their median. Then some
run under it: `operators_ms` has the operators that take most, without those they call, and `rest_ms` what is left of
the profiled step: other operators, and Python. One JSON line a kind of step.

    python scripts/profile_step.py --model models/q05 --decode 1 32 --prefill 128 512
"""

import argparse
import asyncio
import statistics
import time

from bench_decode import Rows
from report import emit

from aserve import build
from aserve.core.plan import StepPlan
from aserve.core.ports import Runner

NUM_WARMUP_STEPS = 3
NUM_OPERATORS = 8


async def times_s(runner: Runner, plans: list[StepPlan]) -> list[float]:
    """Of each step, one at a time."""
    times = []
    for plan in plans:
        start = time.perf_counter()
        await runner.launch(plan).land()
        times.append(time.perf_counter() - start)
    return times


async def figures(runner: Runner, plans: list[StepPlan]) -> dict[str, object]:
    """Of equal steps: half of them are timed, half profiled."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    await times_s(runner, plans[:NUM_WARMUP_STEPS])
    plans = plans[NUM_WARMUP_STEPS:]
    timed, profiled = plans[: len(plans) // 2], plans[len(plans) // 2 :]
    step_s = statistics.median(await times_s(runner, timed))
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        profiled_s = await times_s(runner, profiled)
    times_ms = {event.key: event.self_cpu_time_total / 1000 / len(profiled) for event in profiler.key_averages()}
    largest = sorted(times_ms, key=lambda key: -times_ms[key])[:NUM_OPERATORS]
    operators_ms = {key: float(f"{times_ms[key]:.3g}") for key in largest}
    rest_ms = 1e3 * statistics.mean(profiled_s) - sum(operators_ms.values())
    return {"step_ms": 1e3 * step_s, "operators_ms": operators_ms, "rest_ms": rest_ms}


async def run(args: argparse.Namespace) -> None:
    """Load, then every kind of step."""
    num_steps = NUM_WARMUP_STEPS + 2 * args.steps
    max_model_len = max(args.context + num_steps, 1 + max(args.prefill))
    options = build.make_options(
        model=args.model,
        quantization=args.quantization,
        device="cpu",
        max_num_seqs=max(args.decode),
        max_model_len=max_model_len,
    )
    parts = build.load(options, lambda _: None)
    sizes = (parts.config.block_size, parts.info.vocab_size)
    model = {"model": args.model, "quantization": args.quantization}
    try:
        for batch in args.decode:
            rows = Rows(batch, args.context, *sizes, num_steps)
            await times_s(parts.runner, rows.prefill(args.context))
            found = await figures(parts.runner, [rows.decode(step) for step in range(num_steps)])
            emit("profile", model | {"kind": "decode", "rows": batch, "context": args.context}, found)
        for num_tokens in args.prefill:
            [plan] = Rows(1, num_tokens, *sizes, 1).prefill(num_tokens)
            found = await figures(parts.runner, [plan] * num_steps)
            emit("profile", model | {"kind": "prefill", "tokens": num_tokens}, found)
    finally:
        parts.runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization", help="as of aserve")
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 32], help="rows of decoding steps")
    parser.add_argument("--prefill", type=int, nargs="+", default=[128, 512], help="tokens of a prompt")
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--steps", type=int, default=20, help="timed, and as many profiled")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
