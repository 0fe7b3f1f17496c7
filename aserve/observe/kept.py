"""Kept steps: steps that are over, and are told of some time later, many at once.

    a step is over   it is noted how much is noted of blocks by then, and how those are who have moved
    a look           several -> a Run of those that only decode one behind the other, a Record of any other

Told of by itself, at its end, each would take several times as long: by then the processor's caches have forgotten how.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from aserve.core.ids import SeqId
from aserve.observe.mirror import Change, Mirror
from aserve.observe.records import NO_CHANGE, Record, Run, Work
from aserve.observe.step import Computed, ObservedStep, microseconds, times_of, work_of
from aserve.scheduler.readings import Grown, Noted, Rehashed

_WithBlocks = tuple[ObservedStep, list[Grown], list[Rehashed]]


def tell(number: int, kept: Sequence[ObservedStep], noted: Noted, mirror: Mirror) -> Iterator[Record | Run]:
    """What is told of steps one behind the other. number: of the first record. noted: up to the last of them."""
    for decodes, several in groupby(_with_blocks(kept, noted), _decodes_alone):
        if decodes is not None:
            run = _run(number, decodes, several, mirror)
            number += len(run.steps)
            yield run
        else:
            for step, grown, rehashed in several:
                assert step.more is not None, "it is no run's"
                came, ends, news = step.more
                change = mirror.follow(news, ends, grown, rehashed)
                yield record_of(number, step, work_of(step, came), came, change)
                number += 1


def record_of(number: int, step: ObservedStep, work: Work, came: Computed, change: Change) -> Record:
    """Of one step, at length. change: what else is to be told."""
    return Record(
        number,
        microseconds(step.published_s),
        tuple(change.cards),
        work,
        came.decoded,
        came.token_ids,
        step.admitted,
        tuple(change.moves),
        change.queue,
        change.blocks,
    )


def _with_blocks(kept: Sequence[ObservedStep], noted: Noted) -> Iterator[_WithBlocks]:
    """Each with what was noted since the one before."""
    grown = rehashed = 0
    for step in kept:
        yield step, noted.grown[grown : step.num_grown], noted.rehashed[rehashed : step.num_rehashed]
        grown, rehashed = step.num_grown, step.num_rehashed


def _decodes_alone(one: _WithBlocks) -> tuple[SeqId, ...] | None:
    step, *_ = one
    return step.decodes if step.more is None else None


def _run(number: int, decodes: tuple[SeqId, ...], several: Iterable[_WithBlocks], mirror: Mirror) -> Run:
    steps, decoded, blocks = [], [], []
    for place, (step, grown, rehashed) in enumerate(several):
        steps.append((step.step_id, *times_of(step)))
        decoded.append(step.token_ids)
        if (grown or rehashed) and (change := mirror.grow(grown, rehashed)) is not NO_CHANGE:
            blocks.append((place, change))
    return Run(number, decodes, tuple(steps), tuple(decoded), tuple(blocks))
