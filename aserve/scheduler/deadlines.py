"""Deadlines: whose time is up, and what is told of those who end by that, or because somebody says so.

A heap that is looked at before each plan, and no timer for any request.
"""

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

import msgspec

from aserve.core.ids import RequestId
from aserve.core.outputs import DEADLINE, FinishReason, SeqDelta
from aserve.core.request import Request
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.states import State

MIN_SWEEP: Final = 64
"""Entries below which it does not matter how many are of requests that have ended."""


class Expired(msgspec.Struct, frozen=True):
    """Requests whose time was up. deltas: the last of those that had begun. unserved: those that had not."""

    deltas: tuple[SeqDelta, ...]
    unserved: tuple[RequestId, ...]


class Deadlines:
    """When each open request has to end. Those that ended by themselves are forgotten sooner or later.

    members: the sequences of all open requests that have not ended. next_s: before that nobody is due; infinity if
    nobody ever is.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0
        self.next_s = inf

    def add(self, request: Request, members: Mapping[RequestId, list[Sequence]]) -> None:
        """Remember when a request has to end, if ever."""
        if request.deadline_s is None:
            return
        heappush(self._heap, (request.deadline_s, self._num_added, request))
        self._num_added += 1
        if len(self._heap) > MIN_SWEEP + 2 * len(members):
            self._heap = [entry for entry in self._heap if entry[2].id in members]
            heapify(self._heap)
        self.next_s = self._heap[0][0]

    def due(self, now: float, members: Mapping[RequestId, list[Sequence]]) -> list[list[Sequence]]:
        """The members, by request, of those that have to end at `now` or had to before; the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            of_request = members.get(request.id)
            if of_request and of_request[0].request is request:  # else it has ended, and its id may be another's by now
                found.append(list(of_request))
        self.next_s = self._heap[0][0] if self._heap else inf
        return found


def expire(due: Iterable[list[Sequence]]) -> Expired:
    """What is told of requests that end now. They have not ended yet."""
    deltas: list[SeqDelta] = []
    unserved: list[RequestId] = []
    for members in due:
        if _has_begun(members):
            deltas.extend(_last_deltas(members, FinishReason.LENGTH, DEADLINE))
        else:
            unserved.append(members[0].request_id)
    return Expired(tuple(deltas), tuple(unserved))


def best_so_far(members: list[Sequence]) -> Iterable[SeqDelta]:
    """What is told of a request that is aborted, if its choices are ranked, and have begun. They have not ended yet.

    Of one whose choices come as they grow that is nothing: its reader has all that there is.
    """
    if members and members[0].is_held_back and _has_begun(members):
        return _last_deltas(members, FinishReason.ABORT, None)
    return ()


def _has_begun(members: Iterable[Sequence]) -> bool:
    """Whether any of a request's sequences, of which these have not ended, has ever been admitted."""
    first = next(iter(members))  # no sibling is admitted before the first, or ends before that
    return first.index > 0 or first.state is not State.WAITING or first.num_preemptions > 0


def _last_deltas(members: list[Sequence], reason: FinishReason, stop_reason: str | None) -> Iterable[SeqDelta]:
    """Of a request that ends with what it has: of each choice that is open, or of those that are chosen."""
    group = members[0].group
    if group is not None and group.beams is not None:
        return group.beams.cut_short(members[0].num_cached, members[0].queued_s, reason, stop_reason)
    deltas = [_last_delta(member, reason, stop_reason) for member in members]
    if group is None or group.ranking is None:
        return deltas
    return [chosen for delta in deltas for chosen in group.ranking.add(delta, 0.0)]


def _last_delta(sequence: Sequence, reason: FinishReason, stop_reason: str | None) -> SeqDelta:
    return SeqDelta(
        sequence.request_id,
        (),
        reason,
        stop_reason,
        sequence.index,
        sequence.num_cached,
        prompt_scores=sequence.prompt_scores,
        queued_s=sequence.queued_s,
    )
