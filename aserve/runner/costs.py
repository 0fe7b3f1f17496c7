"""What it costs here to move a block to host memory or back, to compute its tokens anew, and to have a model draft.

Measured, in seconds.

Both are marginal: a prompt's tokens ride in a step that runs anyway, and blocks move several at a time. The steps are
of one sequence on the null block, as those of the warm-up, after which they are to be measured.
"""

import statistics
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from aserve.core.ids import BlockId, HostBlockId, Row, SeqId
from aserve.core.plan import BlockOps, RowInit, SeqSlice, StepPlan, StepResult
from aserve.core.speculation import StepSeconds
from aserve.runner.warm_up import GREEDY, one_slice

NUM_TOKENS: Final = 256
"""Of a prompt that is computed anew: enough that a token's share of the step is no longer rounding."""
NUM_BLOCKS: Final = 16
NUM_ROUNDS: Final = 3
NUM_DRAFTED: Final = 8
"""Sequences that have drafts made."""
NUM_DRAFTING_ROUNDS: Final = 7


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


def measure_drafting(
    run: Callable[[StepPlan], StepResult],
    *,
    num_rows: int,
    num_drafts: int,
    clock: Callable[[], float] = time.perf_counter,
) -> StepSeconds:
    """run: computes a step, blocking. num_rows, num_drafts: sequences and drafts of each, at most. clock: in seconds.

    Drafts ride in steps of one token, and what such a step takes without them is taken off.
    """
    plain = one_slice(0, 1, GREEDY, block_size=1)

    def drafting_s(num_sequences: int) -> float:
        step = draft_step(num_sequences)
        again = msgspec.structs.replace(step, inits=())
        plan = msgspec.structs.replace(plain, drafting=(step, *[again] * (num_drafts - 1)))
        run(plan)
        return max(0.0, fastest_s(plan) - fastest_s(plain)) / num_drafts

    def fastest_s(plan: StepPlan) -> float:
        return min(elapsed_s(plan) for _ in range(NUM_DRAFTING_ROUNDS))

    def elapsed_s(plan: StepPlan) -> float:
        start_s = clock()
        run(plan)
        return clock() - start_s

    alone_s, most = drafting_s(1), min(NUM_DRAFTED, num_rows)
    token_s = max(0.0, drafting_s(most) - alone_s) / (most - 1) if most > 1 else 0.0
    return StepSeconds(base=max(0.0, alone_s - token_s), token=token_s)


def draft_step(num_sequences: int) -> StepPlan:
    """A step of the draft model: a token each of so many sequences, on the null block."""
    pieces = [SeqSlice(SeqId(i), Row(i), 0, 1, (0,), num_samples=1) for i in range(num_sequences)]
    inits = [RowInit(piece.row, piece.seq_id, GREEDY, (BlockId(0),)) for piece in pieces]
    return StepPlan(0, tuple(pieces), tuple(inits))
