"""Where the time of a step goes on a CPU: milliseconds by kernel and by operator, of decoding steps and of prompts.

Steps are timed without any profiler first, since that slows small operators; `step_ms` is their median. Then some are
profiled: `kernels_ms` has our own kernels, `operators_ms` torch's operators that take most, without those they call,
and `rest_ms` what is left of the profiled step: other operators, and Python.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from aserve.cli.bench.step_plans import Rows
from aserve.core.config import Options
from aserve.core.plan import StepPlan
from aserve.core.ports import Runner

NUM_WARMUP_STEPS: Final = 3
NUM_OPERATORS: Final = 8


async def times_s(runner: Runner, plans: list[StepPlan]) -> list[float]:
    """Of each step, one at a time."""
    times = []
    for plan in plans:
        start = time.perf_counter()
        await runner.launch(plan).land()
        times.append(time.perf_counter() - start)
    return times


async def figures(runner: Runner, plans: list[StepPlan]) -> dict[str, Any]:
    """Of equal steps: half of them are timed, half profiled."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    await times_s(runner, plans[:NUM_WARMUP_STEPS])
    plans = plans[NUM_WARMUP_STEPS:]
    timed, profiled = plans[: len(plans) // 2], plans[len(plans) // 2 :]
    step_s = statistics.median(await times_s(runner, timed))
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with (
        profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler,
        kernels_timed() as kernels_s,
    ):
        profiled_s = await times_s(runner, profiled)
    times_ms = {event.key: event.self_cpu_time_total / 1000 / len(profiled) for event in profiler.key_averages()}
    largest = sorted(times_ms, key=lambda key: -times_ms[key])[:NUM_OPERATORS]
    operators_ms = {key: float(f"{times_ms[key]:.3g}") for key in largest}
    by_time = sorted(kernels_s.items(), key=lambda item: -item[1])
    kernels_ms = {name: float(f"{1e3 * took_s / len(profiled):.3g}") for name, took_s in by_time}
    rest_ms = 1e3 * statistics.mean(profiled_s) - sum(operators_ms.values()) - sum(kernels_ms.values())
    return {"step_ms": 1e3 * step_s, "kernels_ms": kernels_ms, "operators_ms": operators_ms, "rest_ms": rest_ms}


@contextmanager
def kernels_timed() -> Iterator[dict[str, float]]:
    """What our own kernels take meanwhile, in seconds by name. Those of a table are called one by one."""
    from aserve.kernels.native.call_table import CallTable
    from aserve.kernels.native.library import Kernel

    seconds: dict[str, float] = defaultdict(float)
    clock = time.perf_counter
    call_one = Kernel.__call__

    def timed(kernel: Kernel, *arguments: object) -> None:
        start_s = clock()
        call_one(kernel, *arguments)
        seconds[kernel.name] += clock() - start_s

    def timed_table(table: CallTable, num_calls: int | None = None) -> None:
        start_s = clock()
        for kernel in table.one_by_one(num_calls):
            end_s = clock()
            seconds[kernel.name] += end_s - start_s
            start_s = end_s

    with patch.object(Kernel, "__call__", timed), patch.object(CallTable, "call", timed_table):
        yield seconds


async def profile_steps(
    options: Options, decode: Sequence[int], prefill: Sequence[int], context: int, num_steps: int
) -> AsyncGenerator[tuple[dict[str, Any], dict[str, Any]]]:
    """Load a model, and profile every kind of step: what it was, and its figures.

    decode: rows of decoding steps, after `context` tokens each. prefill: tokens of a prompt. num_steps: that are timed,
    and as many profiled.
    """
    from msgspec.structs import replace

    from aserve import build

    num_steps = NUM_WARMUP_STEPS + 2 * num_steps
    max_model_len = max(context + num_steps, 1 + max(prefill))
    parts = build.load(
        replace(options, device="cpu", max_num_seqs=max(decode), max_model_len=max_model_len), lambda _: None
    )
    sizes = (parts.config.block_size, parts.info.vocab_size)
    try:
        for batch in decode:
            rows = Rows(batch, context, *sizes, num_steps)
            await times_s(parts.runner, rows.prefill(context))
            found = await figures(parts.runner, [rows.decode(step) for step in range(num_steps)])
            yield {"kind": "decode", "rows": batch, "context": context}, found
        for num_tokens in prefill:
            [plan] = Rows(1, num_tokens, *sizes, 1).prefill(num_tokens)
            found = await figures(parts.runner, [plan] * num_steps)
            yield {"kind": "prefill", "tokens": num_tokens}, found
    finally:
        parts.runner.close()
