"""Kept steps: steps that are over, and are told of some time later, many at once.

    a step is over   KeptStep: how much is noted of blocks by then, and how those are who have moved
    a look           several -> a Run of those that only decode one behind the other, a Record of any other

Told of by itself, at its end, each would take several times as long: by then the processor's caches have forgotten how.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from aserve.core.ids import SeqId
from aserve.core.outputs import SeqDelta
from aserve.core.plan import StepPlan, StepResult
from aserve.observe.mirror import Change, Mirror, News
from aserve.observe.records import NO_CHANGE, Record, Run
from aserve.observe.step import Computed, ObservedStep, computed, microseconds, times_of, work_of
from aserve.scheduler.readings import Grown, Noted, NumBlocks, Rehashed


class More(msgspec.Struct, frozen=True, gc=False):
    """What is needed besides to tell of a step that did more than decode, or behind which more has changed."""

    plan: StepPlan
    result: StepResult
    deltas: Sequence[SeqDelta]
    news: News


class KeptStep(msgspec.Struct, frozen=True, gc=False):
    """num_blocks: what was noted of blocks up to its end.

    more: None where it computed the next token of its `decodes`, as most do, and nothing has changed but blocks. Its
    plan is not kept then, or that memory would not be the next plans', which every cache has.
    """

    step_id: int
    seen: ObservedStep
    token_ids: tuple[int, ...]
    num_blocks: NumBlocks
    more: More | None = None


_WithBlocks = tuple[KeptStep, list[Grown], list[Rehashed]]


def tell(number: int, kept: Sequence[KeptStep], noted: Noted, mirror: Mirror) -> Iterator[Record | Run]:
    """What is told of steps one behind the other. number: of the first record. noted: up to the last of them."""
    for decodes, several in groupby(_with_blocks(kept, noted), _decodes_alone):
        if decodes is not None:
            run = _run(number, decodes, several, mirror)
            number += len(run.steps)
            yield run
        else:
            for step, grown, rehashed in several:
                more = step.more
                assert more is not None, "it is no run's"
                came = computed(more.plan, step.seen, more.result, mirror)
                change = mirror.follow(more.news, more.deltas, grown, rehashed)
                yield record_of(number, more.plan, step.seen, came, change)
                number += 1


def record_of(number: int, plan: StepPlan, seen: ObservedStep, came: Computed, change: Change) -> Record:
    """Of one step, at length. change: what else is to be told."""
    return Record(
        number,
        microseconds(seen.published_s),
        tuple(change.cards),
        work_of(plan, seen, came),
        came.decoded,
        came.token_ids,
        seen.admitted,
        tuple(change.moves),
        change.queue,
        change.blocks,
    )


def _with_blocks(kept: Sequence[KeptStep], noted: Noted) -> Iterator[_WithBlocks]:
    """Each with what was noted since the one before."""
    grown = rehashed = 0
    for step in kept:
        to_grown, to_rehashed = step.num_blocks
        yield step, noted.grown[grown:to_grown], noted.rehashed[rehashed:to_rehashed]
        grown, rehashed = to_grown, to_rehashed


def _decodes_alone(one: _WithBlocks) -> tuple[SeqId, ...] | None:
    step, *_ = one
    return step.seen.decodes if step.more is None else None


def _run(number: int, decodes: tuple[SeqId, ...], several: Iterable[_WithBlocks], mirror: Mirror) -> Run:
    steps, decoded, blocks = [], [], []
    for place, (step, grown, rehashed) in enumerate(several):
        steps.append((step.step_id, *times_of(step.seen)))
        decoded.append(step.token_ids)
        if (grown or rehashed) and (change := mirror.grow(grown, rehashed)) is not NO_CHANGE:
            blocks.append((place, change))
    return Run(number, decodes, tuple(steps), tuple(decoded), tuple(blocks))
