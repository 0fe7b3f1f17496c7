"""What a step costs the host, by stage: medians of microseconds, at several numbers of running sequences.

    plan     the scheduler decides who computes what
    build    the plan becomes the tensors of a batch (--runner real)
    launch   the step is handed to the runner
    land     the event loop waits for it: with --runner real this is the model; else what the event loop itself takes
    commit   the scheduler takes the tokens in
    publish  tokens become text, events, HTTP chunks and bytes handed to each request's transport, and tasks run for it

`total` is all of them but land. Every request is a stream over the whole HTTP path (step_stages.py). With --runner
scripted, the default, no model is computed; --runner real serves --model. `plan_commit` is plan and commit on their
own, with nothing else in the processor's caches, as scheduler benchmarks have it.
One JSON line a size. --viewers: how many follow the inspector's feed meanwhile.

    python scripts/bench_step.py --sizes 1,64,256,1024 --steps 500
    python scripts/bench_step.py --sizes 1,64 --steps 200 --runner real --model demo
"""

import argparse
import asyncio
import gc
import sys
import time

from report import emit
from step_stages import NUM_PROMPT_TOKENS, NUM_SPARE_TOKENS, Stages, Stopwatch, measure, scripted_loader, timed

from aserve.build import loader, make_options
from aserve.core.ids import RequestId
from aserve.core.params import SamplingParams
from aserve.core.plan import StepPlan, StepResult
from aserve.core.request import Request
from aserve.engine import Loader
from aserve.load.figures import percentile
from aserve.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
MIN_PROMPT_TOKENS = 96
NUM_WARMUP_STEPS = 32
TOKEN_ID = 7


def decoding_scheduler(num_seqs: int, num_steps: int) -> Scheduler:
    """A scheduler in which `num_seqs` sequences decode, with room for as many steps."""
    max_model_len = MIN_PROMPT_TOKENS + BLOCK_SIZE + num_steps + 2
    scheduler = Scheduler(
        block_size=BLOCK_SIZE,
        num_blocks=1 + num_seqs * -(-max_model_len // BLOCK_SIZE),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * max_model_len,
        max_model_len=max_model_len,
        watermark=0.0,
    )
    for index in range(num_seqs):
        # No two share a first token, so no block is shared; their lengths differ, so that each step fills some blocks.
        prompt = (1000 + index, *range(MIN_PROMPT_TOKENS - 1 + index % BLOCK_SIZE))
        scheduler.add(
            Request(
                id=RequestId(str(index)),
                prompt_token_ids=prompt,
                params=SamplingParams(),
                max_tokens=num_steps + 2,
                seed=index,
                arrival_s=0.0,
                stop_ids=frozenset({1, 2}),
            )
        )
    return scheduler


def sampled(plan: StepPlan) -> StepResult:
    """What a runner would have brought back."""
    return StepResult(plan.step_id, (TOKEN_ID,) * sum(piece.num_samples for piece in plan.slices))


def step_times_us(num_seqs: int, num_steps: int) -> list[float]:
    """Microseconds of plan + commit for each step, the device one step ahead as in the engine loop."""
    scheduler = decoding_scheduler(num_seqs, num_steps + NUM_WARMUP_STEPS)
    flying = scheduler.plan(0.0)
    times_us = []
    for _ in range(num_steps + NUM_WARMUP_STEPS):
        assert flying is not None, "every sequence has room for every step"
        result = sampled(flying)
        start = time.perf_counter_ns()
        launched = scheduler.plan(0.0)
        scheduler.commit(result)
        times_us.append((time.perf_counter_ns() - start) / 1000)
        flying = launched
    return times_us[NUM_WARMUP_STEPS:]


def build_times_us(num_seqs: int, num_steps: int) -> list[float]:
    """Microseconds of the batch building of each step, on the CPU, in steady decode."""
    import torch

    from aserve.runner.batch import BatchBuilder
    from aserve.runner.controls import ControlTable
    from aserve.runner.device import step_device
    from aserve.runner.rows import RowTable
    from aserve.runner.steady import SteadyBuilder

    scheduler = decoding_scheduler(num_seqs, num_steps + NUM_WARMUP_STEPS)
    cpu = torch.device("cpu")
    device = step_device(cpu)
    num_spans = (MIN_PROMPT_TOKENS + num_steps + NUM_WARMUP_STEPS) // BLOCK_SIZE + 3
    rows = RowTable(num_seqs, num_spans, cpu)
    builder = SteadyBuilder(BatchBuilder(rows, ControlTable(num_seqs, 1000, cpu, device), device, BLOCK_SIZE), rows)
    times_us = []
    with torch.inference_mode():
        for _ in range(num_steps + NUM_WARMUP_STEPS):
            plan = scheduler.plan(0.0)
            assert plan is not None, "every sequence has room for every step"
            start = time.perf_counter_ns()
            builder.build(plan)
            times_us.append((time.perf_counter_ns() - start) / 1000)
            scheduler.commit(sampled(plan))
    return times_us[NUM_WARMUP_STEPS:]


def stage_times_us(load: Loader, num_seqs: int, num_steps: int, *, scripted: bool, num_viewers: int = 0) -> Stages:
    """Microseconds by stage, of steps in a serving process."""

    async def run() -> Stages:
        watch = Stopwatch()
        in_time = timed(load, watch, waits=scripted)
        return await measure(in_time, watch, num_seqs, num_steps, NUM_WARMUP_STEPS, num_viewers)

    with asyncio.Runner(loop_factory=_event_loop) as runner:
        return runner.run(run())


def _event_loop() -> asyncio.AbstractEventLoop:
    """The server's own choice."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def figures(num_seqs: int, num_steps: int, model: str | None, num_viewers: int = 0) -> dict[str, float]:
    """The medians of one size. model: None computes none."""
    max_model_len = NUM_PROMPT_TOKENS + NUM_WARMUP_STEPS + num_steps + NUM_SPARE_TOKENS + 1
    if model is None:
        load = scripted_loader(num_seqs, max_model_len)
    else:
        # As with the scripted runner: all of them begin in one step.
        limits = {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_seqs * NUM_PROMPT_TOKENS}
        load = loader(make_options(model=model, **limits))
    stages = stage_times_us(load, num_seqs, num_steps, scripted=model is None, num_viewers=num_viewers)
    medians = {name: percentile(stages[name], 50) for name in ("plan", "launch", "land", "commit")}
    medians["publish"] = percentile(stages["publish"], 50)
    if model is None:  # else tasks run while the model computes, and nobody waits for them
        medians["publish"] += percentile(stages["deliver"], 50)
    medians["total"] = sum(medians.values()) - medians["land"]
    if model is not None:
        medians["build"] = percentile(build_times_us(num_seqs, num_steps), 50)
    return {f"{name}_us": value for name, value in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,64,256,1024", help="numbers of running sequences")
    parser.add_argument("--steps", type=int, default=500, help="steps timed for each size")
    parser.add_argument("--runner", choices=("scripted", "real"), default="scripted")
    parser.add_argument("--model", default="demo", help="for --runner real")
    parser.add_argument("--viewers", type=int, default=0, help="of the inspector's feed")
    arguments = parser.parse_args()
    for num_seqs in map(int, arguments.sizes.split(",")):
        gc.collect()
        gc.freeze()  # as the server does after warm-up
        times_us = step_times_us(num_seqs, arguments.steps)
        model = arguments.model if arguments.runner == "real" else None
        stages_us = figures(num_seqs, arguments.steps, model, arguments.viewers)
        gc.unfreeze()
        config = {"num_running": num_seqs, "num_steps": arguments.steps, "runner": arguments.runner}
        plan_commit = {"plan_commit_us_p50": percentile(times_us, 50), "plan_commit_us_p99": percentile(times_us, 99)}
        emit("step", config, {**plan_commit, **stages_us})


if __name__ == "__main__":
    main()
