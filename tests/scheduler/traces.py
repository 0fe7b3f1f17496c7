"""Random traces: a seed to a whole life of a scheduler under pressure. Faster than Hypothesis, and shrinks nothing."""

import random

from tests.scheduler.sync_loop import EOS, LETTERS, SyncLoop, request

NUM_MOVES = 60
STOPS = (frozenset(), frozenset(), frozenset({EOS}))
STEMS = tuple(tuple(random.Random(seed).choices(LETTERS, k=8)) for seed in range(3))
"""Beginnings that many prompts share."""


def run_trace(seed: int, *, depth: int = 2, checked: bool = True) -> SyncLoop:
    """Drive a scheduler through the trace with that seed, drain it, and compare every answer with the oracle's."""
    rng = random.Random(seed)
    loop = SyncLoop(
        depth=depth,
        checked=checked,
        block_size=rng.choice((1, 2, 4)),
        num_blocks=rng.randint(6, 16),
        max_num_batched_tokens=rng.randint(1, 16),
        max_num_seqs=rng.randint(1, 5),
        max_model_len=rng.choice((1000, 1000, 16)),
        watermark=rng.choice((0.0, 0.0, 0.3)),
        enable_prefix_caching=rng.random() < 0.9,
    )
    for _ in range(NUM_MOVES):
        _move(loop, rng)
    loop.drain()
    loop.compare()
    return loop


def _move(loop: SyncLoop, rng: random.Random) -> None:
    names = list(loop.answers)
    match rng.choices(("add", "step", "cancel", "finish", "plan", "commit", "fail"), (25, 55, 4, 3, 6, 6, 1))[0]:
        case "add":
            _add(loop, rng)
        case "cancel" if names:
            loop.cancel(rng.choice(names))
        case "finish" if names:
            loop.finish(rng.choice(names))
        case "plan" if len(loop.in_flight) < loop.depth:
            loop.plan()
        case "commit" if loop.in_flight:
            loop.commit()
        case "fail" if loop.in_flight:
            loop.fail(rng.randrange(len(loop.in_flight)))
        case _:
            loop.step()


def _add(loop: SyncLoop, rng: random.Random) -> None:
    prompt = rng.choice(STEMS)[: rng.randint(0, 8)] + tuple(rng.choices(LETTERS, k=rng.randint(1, 4)))
    count = len(loop.answers)
    if len(prompt) < loop.context_len:
        loop.add(
            request(
                f"r{count}",
                prompt,
                rng.randint(1, 10),
                salt=int(rng.random() < 0.2),
                stop_ids=rng.choice(STOPS),
                min_tokens=rng.choice((0, 0, 3)),
                arrival_s=count - rng.choice((0.0, 0.0, 2.0)),
            )
        )
