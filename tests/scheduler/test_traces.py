"""Hundreds of random traces with overlapping requests, each answer equal to its solo run."""

from dataclasses import asdict, dataclass

import pytest

from tests.scheduler.sync_loop import SyncLoop
from tests.scheduler.traces import run_trace


@dataclass
class Coverage:
    """What happened in all traces together, lest they prove nothing."""

    preemptions: int = 0
    hits: int = 0
    evictions: int = 0
    resumptions: int = 0
    finished: int = 0
    dropped: int = 0
    mixed_steps: int = 0
    swap_outs: int = 0
    swap_ins: int = 0
    copies: int = 0
    choices: int = 0
    ranked: int = 0
    beams: int = 0
    cut: int = 0

    def add(self, loop: SyncLoop) -> None:
        counts = loop.scheduler.statistics()
        self.preemptions += counts.num_preemptions
        self.hits += counts.num_cache_hits
        self.evictions += counts.num_cache_evictions
        self.finished += sum(not answer.dropped for answer in loop.answers.values())
        self.dropped += sum(answer.dropped for answer in loop.answers.values())
        self.resumptions += sum(len(plan.inits) for plan in loop.plans) - counts.num_admitted
        self.swap_outs += counts.num_swap_outs
        self.swap_ins += sum(len(plan.block_ops.swap_ins) for plan in loop.plans if plan.block_ops)
        self.copies += counts.num_copied_blocks
        self.cut += sum(choice.is_cut for answer in loop.answers.values() for choice in answer.choices)
        whole = [answer.request.params for answer in loop.answers.values() if not answer.dropped]
        self.choices += sum(params.n > 1 for params in whole)
        self.ranked += sum(params.num_sequences > params.n for params in whole)
        self.beams += sum(params.beam is not None for params in whole)
        self.mixed_steps += sum(len({bool(piece.token_ids) for piece in plan.slices}) == 2 for plan in loop.plans)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(120), pytest.param(range(120, 500), marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_every_answer_of_a_trace_equals_its_solo_run(depth, seeds):
    coverage = Coverage()
    for seed in seeds:
        try:
            coverage.add(run_trace(seed, depth=depth, options={"is_fair": seed % 2 == 1}))
        except AssertionError as error:
            error.add_note(f"in the trace of seed {seed}, depth {depth}")
            raise
    assert all(count >= 25 for count in asdict(coverage).values()), coverage
