"""What it costs here to move a block to host memory or back, and to compute its tokens anew. Measured, in seconds.

Both are marginal: a prompt's tokens ride in a step that runs anyway, and blocks move several at a time. The steps are
of one sequence on the null block, as those of the warm-up, after which they are to be measured.
"""

import statistics
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from aserve.core.ids import BlockId, HostBlockId
from aserve.core.plan import BlockOps, StepPlan, StepResult
from aserve.runner.warm_up import GREEDY, one_slice

NUM_TOKENS: Final = 256
"""Of a prompt that is computed anew: enough that a token's share of the step is no longer rounding."""
NUM_BLOCKS: Final = 16
NUM_ROUNDS: Final = 3


class MemoryCosts(NamedTuple):
    """recompute_s: of one token's part in a step. swap_s: of one block, one way."""

    recompute_s: float
    swap_s: float


def measure_costs(
    run: Callable[[StepPlan], StepResult],
    *,
    max_model_len: int,
    block_size: int,
    num_host_blocks: int,
    clock: Callable[[], float] = time.perf_counter,
) -> MemoryCosts:
    """run: computes a step, blocking. max_model_len: at least 2. num_host_blocks: at least 1. clock: in seconds."""

    def median_s(plan: StepPlan) -> float:
        run(plan)  # memory is touched for the first time
        return statistics.median(elapsed_s(plan) for _ in range(NUM_ROUNDS))

    def elapsed_s(plan: StepPlan) -> float:
        start_s = clock()
        run(plan)
        return clock() - start_s

    num_tokens, num_blocks = min(NUM_TOKENS, max_model_len), min(NUM_BLOCKS, num_host_blocks)
    here, hosts = BlockId(0), [HostBlockId(host) for host in range(num_blocks)]
    moves = BlockOps(swap_outs=tuple((here, host) for host in hosts), swap_ins=tuple((host, here) for host in hosts))
    long_s, short_s = (median_s(one_slice(0, length, GREEDY, block_size)) for length in (num_tokens, 1))
    return MemoryCosts(
        recompute_s=max(0.0, long_s - short_s) / (num_tokens - 1),
        swap_s=median_s(StepPlan(0, (), (), moves)) / (2 * num_blocks),
    )
