"""Ranks as threads of one process: the same groups, shards and weights as processes have, at no cost to start."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aserve.models.sharding import Shard
from aserve.runner.groups import MeetingFile, RankGroup

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Shard], T]) -> list[T]:
    """What the work comes to on each rank, in order; they have met when it begins."""
    meeting = MeetingFile()

    def of(rank: int) -> T:
        group = RankGroup(rank, size, meeting.path, timeout_s=60.0)
        group.join()
        try:
            return work(Shard(rank, size, group))
        finally:
            group.leave()

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(of, range(size)))
    finally:
        meeting.close()
