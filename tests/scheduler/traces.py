"""Random traces: a seed to a whole life of a scheduler under pressure. Faster than Hypothesis, and shrinks nothing."""

import random
from collections.abc import Mapping

from aserve.core.errors import InvalidRequestError, OverloadedError
from aserve.core.graph_sizes import GraphSizes
from aserve.core.params import BeamParams
from aserve.core.request import Request
from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.queue import first_come_first_served, priority_with_ageing
from tests.scheduler.sync_loop import EOS, LETTERS, SEEDS_OF_A_SALT, Guesser, SyncLoop, request

NUM_MOVES = 60
STOPS = (frozenset(), frozenset(), frozenset({EOS}))
MODES = ("auto", "recompute", "swap")
STEMS = tuple(tuple(random.Random(seed).choices(LETTERS, k=8)) for seed in range(3))
"""Beginnings that many prompts share."""
GRAPH_SIZES = GraphSizes((0, 2, 8), (3, 6, 10), num_prompts=3, cheap_tokens=4)


def run_trace(
    seed: int,
    *,
    depth: int = 2,
    checked: bool = True,
    options: Mapping[str, object] | None = None,
    kind: type[SyncLoop] = SyncLoop,
) -> SyncLoop:
    """Drive a scheduler through the trace with that seed, drain it, and compare every answer with the oracle's.

    options: of `SyncLoop`, besides those that the seed decides. kind: a subclass of it.
    """
    rng = random.Random(seed)
    limits: dict[str, object] = {
        "block_size": rng.choice((1, 2, 4)),
        "num_blocks": rng.randint(6, 16),
        "max_num_batched_tokens": rng.randint(1, 16),
        "max_num_seqs": rng.randint(1, 5),
        "max_model_len": rng.choice((1000, 1000, 16)),
        "watermark": rng.choice((0.0, 0.0, 0.3)),
        "enable_prefix_caching": rng.random() < 0.8,
        "num_host_blocks": rng.choice((0, 3, 16)),
        "preemption": PreemptionRule(rng.choice(MODES), swap_cost_s=rng.choice((5e-6, 80e-6))),
        "policy": rng.choice((first_come_first_served, priority_with_ageing(3.0))),
        "long_prefill_token_threshold": rng.choice((0, 0, 2)),
        "scheduler_delay_factor": rng.choice((0.0, 0.0, 0.5)),
        "target_itl_s": random.Random(-1 - seed).choice((0.0, 0.0, None, 0.001, 0.014)),  # its own draw: others stay
        "graph_sizes": random.Random(-2001 - seed).choice((None, GRAPH_SIZES)),
        "proposer": Guesser() if random.Random(-1001 - seed).random() < 0.4 else None,
        "plans_behind_prompts": seed % 5 > 0,
        "max_loras": seed % 3,
    }
    loop = kind(depth=depth, checked=checked, **limits | dict(options or {}))
    for _ in range(NUM_MOVES):
        _move(loop, rng)
    loop.drain()
    loop.compare()
    return loop


def _move(loop: SyncLoop, rng: random.Random) -> None:
    names = list(loop.answers)
    loop.now += rng.choice((0.0, 0.5))
    verbs = ("add", "step", "cancel", "finish", "plan", "commit", "fail", "fork", "reset")
    match rng.choices(verbs, (25, 55, 4, 4, 6, 6, 3, 3, 1))[0]:
        case "add":
            _add(loop, rng)
        case "cancel" if names:
            loop.cancel(rng.choice(names))
        case "finish" if names:
            loop.finish(rng.choice(names), rng.choice((0, 0, 1)))
        case "plan" if loop.may_plan:
            loop.plan()
        case "commit" if loop.in_flight:
            loop.commit()
        case "fail" if loop.in_flight:
            loop.fail(rng.randrange(len(loop.in_flight)), out_of_memory=rng.random() < 0.3)
        case "fork" if names:
            _fork(loop, rng, rng.choice(names))
        case "reset":
            loop.scheduler.reset_prefix_cache()
        case _:
            loop.step()


def _add(loop: SyncLoop, rng: random.Random) -> None:
    prompt = rng.choice(STEMS)[: rng.randint(0, 8)] + tuple(rng.choices(LETTERS, k=rng.randint(1, 4)))
    wanted = request(
        f"r{len(loop.answers)}",
        prompt,
        rng.randint(1, 10),
        salt=int(rng.random() < 0.2),
        stop_ids=rng.choice(STOPS),
        min_tokens=rng.choice((0, 0, 3)),
        arrival_s=len(loop.answers) - rng.choice((0.0, 0.0, 2.0)),
        priority=rng.choice((0, 0, 2)),
        seed=rng.randint(1, 9),
        adapter=random.Random(len(loop.answers)).choice((None, None, None, 1, 2)),
        **_params(rng),
        **_terms(loop),
    )
    _add_if_it_fits(loop, wanted)


def _terms(loop: SyncLoop) -> dict[str, object]:
    """Under the fair policy there are three tenants, and one request in three has little time."""
    if not loop.limits.get("is_fair"):
        return {}
    number = len(loop.answers)
    deadline_s = loop.now + 2.0 if number % 3 == 2 else None
    return {"tenant": "abc"[number % 3], "weight": 1.0 + number % 3, "deadline_s": deadline_s}


def _params(rng: random.Random) -> dict[str, object]:
    """Half of the requests are plain; the others have several sequences, or scores."""
    match rng.choices(("plain", "n", "best_of", "beam", "scored"), (50, 15, 10, 15, 10))[0]:
        case "n":
            return {"temperature": 1.0, "n": rng.randint(2, 4)}
        case "best_of":
            return {"temperature": 1.0, "n": rng.randint(1, 2), "best_of": rng.randint(3, 4)}
        case "beam":
            early_stopping = rng.choice((True, False, "never"))
            beam = BeamParams(
                width=rng.randint(1, 2), length_penalty=rng.choice((0.0, 1.0, -1.0, 2.0)), early_stopping=early_stopping
            )
            return {"beam": beam, "n": rng.randint(1, beam.width)}
        case "scored":
            return {"temperature": 1.0, "logprobs": rng.randint(0, 2), "prompt_logprobs": rng.choice((None, 1))}
        case _:
            return {}


def _add_if_it_fits(loop: SyncLoop, wanted: Request) -> None:
    try:
        loop.add(wanted)
    except (InvalidRequestError, OverloadedError):
        return


def _fork(loop: SyncLoop, rng: random.Random, name: str) -> None:
    answer = loop.answers[name]
    salt = answer.request.seed // SEEDS_OF_A_SALT
    branches = [
        request(
            f"r{len(loop.answers) + k}",
            (),
            rng.randint(1, 6),
            salt=salt,
            seed=rng.randint(1, 9),
            temperature=1.0,
            n=rng.choice((1, 1, 2)),
            arrival_s=float(len(loop.answers)),
        )
        for k in range(rng.randint(1, 2))
    ]
    try:
        loop.fork(name, rng.randrange(len(answer.choices)), branches)
    except (InvalidRequestError, OverloadedError):
        return
