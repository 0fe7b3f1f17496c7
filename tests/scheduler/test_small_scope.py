"""Every interleaving at small scope: three requests, four blocks of two, and each move at each moment.

Breadth first over the scheduler's states, up to what makes no difference to the future (ids, times, counters), so that
an order of moves which leads where another led is not followed twice. Out of memory comes by itself: the requests need
more blocks than there are.
"""

import copy
import pickle

import pytest

from aserve.scheduler.preemption import PreemptionRule
from tests.scheduler.sync_loop import SyncLoop, request

REQUESTS = (
    request("a", (0, 1, 2), max_tokens=3),
    request("b", (0, 1, 2, 0), max_tokens=3, n=2, temperature=1.0, seed=1),
    request("c", (1,), max_tokens=4),
)
Move = tuple[str, str]


def moves_of(loop: SyncLoop) -> list[Move]:
    """What can happen next."""
    moves = [("add", wanted.id) for wanted in REQUESTS if wanted.id not in loop.answers][:1]
    moves += [("cancel", name) for name, answer in loop.answers.items() if answer.is_open]
    if loop.may_plan:
        moves.append(("plan", ""))
    if loop.in_flight:
        moves += [("commit", ""), ("fail", "")]
    return moves


def made(loop: SyncLoop, move: Move) -> SyncLoop:
    """The loop after a move; the old one stays as it is."""
    loop = copy.deepcopy(loop)
    match move:
        case ("add", name):
            loop.add(next(wanted for wanted in REQUESTS if wanted.id == name))
        case ("cancel", name):
            loop.cancel(name)
        case ("fail", _):
            loop.fail()
        case ("commit", _):
            loop.commit()
        case _:
            loop.plan()
    return loop


def essence(loop: SyncLoop) -> bytes:
    """What the future depends on: sequences, blocks, rows, steps in flight, and what has come out."""
    scheduler = loop.scheduler
    pool = scheduler._cache._pool
    first_step = loop.in_flight[0][0].step_id if loop.in_flight else 0
    sequences = [
        (
            *(
                s.request_id,
                s.index,
                s.state.value,
                s.num_computed,
                s.num_prefill,
                s.num_bound,
                tuple(s.token_ids),
                s.row,
            ),
            *(tuple(s.table.block_ids), tuple(s.table.host_ids), s.table.num_sealed, s.table.num_shared),
            s.resume_after is not None and s.resume_after >= first_step and bool(loop.in_flight),
        )
        for s in scheduler._roster.sequences.values()
    ]
    answers = [
        (name, [(tuple(c.token_ids), c.dropped, c.has_ended) for c in answer.choices])
        for name, answer in loop.answers.items()
    ]
    flying = [[(s.seq_id, s.start, s.num_tokens) for s in plan.slices] for plan, _ in loop.in_flight]
    cached = [(block, pool.hash_of(block)) for block in pool._free]
    aftermath = scheduler._aftermath
    inquest = aftermath.is_inquest and (aftermath._inquest._suspects, aftermath.budget.num_tokens)
    return pickle.dumps((sequences, answers, flying, cached, list(scheduler._residents._free_rows), inquest))


def beginning(num_host_blocks: int) -> SyncLoop:
    """Nothing has happened yet."""
    return SyncLoop(
        num_blocks=5,
        block_size=2,
        max_num_seqs=3,
        max_num_batched_tokens=4,
        watermark=0.0,
        num_host_blocks=num_host_blocks,
        preemption=PreemptionRule("swap"),
    )


def explore(depth: int, *, num_host_blocks: int) -> int:
    """Make every sequence of `depth` moves, checking each; from each state drain, and compare. Returns the states."""
    first = beginning(num_host_blocks)
    seen = {essence(first)}
    frontier = [first]
    for _ in range(depth):
        following = []
        for loop in frontier:
            for move in moves_of(loop):
                reached = made(loop, move)
                key = essence(reached)
                if key not in seen:
                    seen.add(key)
                    following.append(reached)
        frontier = following
    for loop in frontier:
        loop.drain()
        loop.compare()
    return len(seen)


def test_what_a_failed_step_was_to_copy_is_not_swapped_out_afterwards():
    """A second choice shares a block, whose copy is in the step that fails, and is swapped out behind that step."""
    loop = beginning(num_host_blocks=4)
    loop = made(made(loop, ("add", "a")), ("add", "b"))
    for kind in ("plan", "plan", "commit", "plan", "commit", "commit", "plan", "plan", "commit", "plan", "fail"):
        loop = made(loop, (kind, ""))
    loop.drain()
    loop.compare()


def test_every_short_interleaving_keeps_every_invariant():
    assert explore(5, num_host_blocks=4) > 50


@pytest.mark.thorough
@pytest.mark.parametrize("num_host_blocks", [0, 4])
def test_every_interleaving_keeps_every_invariant(num_host_blocks):
    assert explore(17, num_host_blocks=num_host_blocks) > 5_000
