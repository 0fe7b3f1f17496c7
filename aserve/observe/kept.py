"""Kept steps: steps that are over, and are told of some time later, many at once.

    a step is over   it is noted how much is noted of blocks by then, and how those are who have moved
    a look           several -> a Run of those that only decode one behind the other, a Record of any other

Told of by itself, at its end, each would take several times as long: by then the processor's caches have forgotten how.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from aserve.core.ids import SeqId
from aserve.observe.mirror import Change, Mirror
from aserve.observe.records import NO_CHANGE, BlockChange, Record, Run, Work
from aserve.observe.step import Computed, ObservedStep, microseconds, times_of, work_of
from aserve.scheduler.readings import Noted


def tell(number: int, kept: Sequence[ObservedStep], noted: Noted, mirror: Mirror) -> Iterator[Record | Run]:
    """What is told of steps one behind the other. number: of the first record. noted: up to the last of them."""
    grown, rehashed, _ = noted
    num_grown = num_rehashed = 0
    for decodes, several in groupby(kept, _decodes_alone):
        steps: list[tuple[int, ...]] = []
        decoded: list[tuple[int, ...]] = []
        blocks: list[tuple[int, BlockChange]] = []
        for step in several:
            to_grown, to_rehashed = step.num_grown, step.num_rehashed
            changed = grown[num_grown:to_grown], rehashed[num_rehashed:to_rehashed]
            num_grown, num_rehashed = to_grown, to_rehashed
            if decodes is None:
                assert step.more is not None, "it is no run's"
                came, ends, news = step.more
                yield record_of(number, step, work_of(step, came), came, mirror.follow(news, ends, *changed))
                number += 1
                continue
            if any(changed) and (change := mirror.grow(*changed)) is not NO_CHANGE:
                blocks.append((len(steps), change))
            steps.append((step.step_id, *times_of(step)))
            decoded.append(step.token_ids)
        if decodes is not None:
            yield Run(number, decodes, steps, decoded, blocks)
            number += len(steps)


def _decodes_alone(step: ObservedStep) -> tuple[SeqId, ...] | None:
    return step.decodes if step.more is None else None


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
