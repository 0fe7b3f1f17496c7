"""What a step costs the host: microseconds of `Scheduler.plan` + `Scheduler.commit` in steady decode.

No model and no device: the results are scripted, so that the scheduler and the block bookkeeping are all that is
timed. Prints one JSON line for each number of running sequences.

    python scripts/bench_step.py --sizes 1,64,256,1024 --steps 500
"""

import argparse
import gc
import time

from report import emit, percentile

from aserve.core.ids import RequestId
from aserve.core.params import SamplingParams
from aserve.core.plan import StepPlan, StepResult
from aserve.core.request import Request
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
    return StepResult(plan.step_id, (TOKEN_ID,) * sum(piece.samples for piece in plan.slices))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,64,256,1024", help="numbers of running sequences")
    parser.add_argument("--steps", type=int, default=500, help="steps timed for each size")
    arguments = parser.parse_args()
    for num_seqs in map(int, arguments.sizes.split(",")):
        gc.collect()
        gc.freeze()  # as the server does after warm-up
        times_us = step_times_us(num_seqs, arguments.steps)
        gc.unfreeze()
        figures = {"plan_commit_us_p50": percentile(times_us, 50), "plan_commit_us_p99": percentile(times_us, 99)}
        emit("step", {"num_running": num_seqs, "num_steps": arguments.steps}, figures)


if __name__ == "__main__":
    main()
