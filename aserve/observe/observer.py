"""Observer: tells whoever looks on what happens in an engine's steps. Costs a look at `is_watched` where nobody does.

Those who look on are viewers, and the explainer, while requests are open that asked for an explanation.

    engine loop   planned   launched   committed   published ...      a look ten times a second, steps or none
                     '---------'-----------'-----------'--> Record --> each Viewer's queue --> who reads it, in his time

Where telling takes long, as of hundreds of steps a second, looks are farther apart: it takes no more than `SHARE` of
the event loop's time, or comes once in `MAX_REST_S`.

A viewer who reads slowly loses records, never their order: when his queue is full it is emptied, he is told how many
are gone, and goes on from a new snapshot. So what he holds is bounded, and nothing waits for him. What is raised here
is told to the log by whoever calls, and ends nobody's request; the viewers then begin anew.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aserve.core.errors import OverloadedError, UnavailableError
from aserve.core.explanation import Explanation
from aserve.core.ids import ChoiceId, RequestId, SeqId
from aserve.core.outputs import StepTokens
from aserve.core.plan import StepPlan, StepResult
from aserve.core.ports import Clock, Flight
from aserve.core.request import Request
from aserve.observe.explainer import Explainer, known_now
from aserve.observe.kept import record_of, tell
from aserve.observe.mirror import Change, Mirror, ends_of
from aserve.observe.prefixes import Names
from aserve.observe.records import Admission, Record, Run, Snapshot
from aserve.observe.step import More, ObservedStep, computed, microseconds, work_of
from aserve.observe.viewer import Viewer
from aserve.scheduler.readings import Readings
from aserve.scheduler.sequence import Sequence

MAX_VIEWERS: Final = 8
MAX_RECORDS: Final = 1024
"""That wait for a viewer. At a thousand steps a second he has a second to take them."""
MAX_ADMITTED_BLOCKS: Final = 1024
"""Of those that an admission tells."""
SHARE: Final = 1 / 256
"""Of the event loop's time, that telling may take."""
MAX_REST_S: Final = 0.25
"""Between two looks, however long telling takes."""

_NONE: Final = "none"


class Observer:
    """Of one engine. is_watched: whether anything but `is_watched` is to be asked or called.

    names: of what answers, for explanations. processor_clock: the time that this thread has run.
    """

    def __init__(
        self,
        readings: Readings,
        clock: Clock,
        names: Names,
        *,
        max_viewers: int = MAX_VIEWERS,
        max_records: int = MAX_RECORDS,
        processor_clock: Clock = time.thread_time,
    ) -> None:
        self.is_watched = False
        self._names = names
        self._explainer: Explainer | None = None
        self._readings = readings
        self._clock = clock
        self._processor_clock = processor_clock
        self._max_viewers = max_viewers
        self._max_records = max_records
        self._viewers: list[Viewer] = []
        self._mirror: Mirror | None = None
        self._has_moved = False
        """Whether tables may have done more than grow since the last record."""
        self._ran: list[Sequence] = []
        """Those who ran in the latest plan that computed the next token of each of them, and nothing else."""
        self._decodes: tuple[SeqId, ...] = ()
        """Their numbers: one value for as long as they are the same, so that it is still in a cache."""
        self._kept: list[ObservedStep] = []
        """Steps of which nothing is offered yet."""
        self._has_stepped = False
        """Whether one was over since the last look."""
        self._is_due = False
        """Whether a look is to be told of."""
        self._lag_s = 0.0
        """How late the event loop was at most, at looks that were not told of yet."""
        self._looked_s = self._spent_s = 0.0
        """When a look was told of, and what telling has taken since: processor time."""
        self._number = 0
        self._has_closed = False

    # Who looks on.

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Look on, inside the block. Raises `OverloadedError` where enough do, `UnavailableError` at the end."""
        if self._has_closed:
            raise UnavailableError("the engine has stopped")
        if len(self._viewers) >= self._max_viewers:
            raise OverloadedError(f"{self._max_viewers} look on already, which is the most there may be")
        viewer = Viewer(self.snapshot, self._catch_up, self._spend, self._max_records)
        self._viewers.append(viewer)
        self.is_watched = True
        try:
            yield viewer
        finally:
            if viewer in self._viewers:
                self._viewers.remove(viewer)
            self._rest()

    # Requests that ask for an explanation.

    def explain(self, request: Request) -> None:
        """From now on note where a request's time goes, which the scheduler has just taken."""
        if self._explainer is None:
            self._explainer = Explainer(self._readings, self._clock, self._names)
        self._explainer.begin(request)
        self.is_watched = True

    def leave(self, request: Request) -> None:
        """Such a request is over."""
        if self._explainer is not None:
            try:
                self._explainer.end(request.id)
            finally:
                self._rest()

    def explanation(self, request_id: RequestId) -> Explanation | None:
        """Of a request that asked for one, and is open or lately ended; None where nothing is known of such a one."""
        return None if self._explainer is None else self._explainer.explanation(request_id)

    def find(self, name: str, tenant: str) -> Explanation | None:
        """What is known of the newest of a tenant's requests with that id, or name. See `Explanation.explained`."""
        found = None if self._explainer is None else self._explainer.find(name, tenant)
        return found or known_now(self._readings, self._names, name, tenant, self._clock())

    def close(self) -> None:
        """The engine ends, and so does looking on."""
        self._has_closed = True
        for viewer in self._viewers:
            viewer.end()
        self._viewers.clear()
        self._rest()

    def snapshot(self) -> Snapshot:
        """What is there after the newest record."""
        self._catch_up()
        return self._looking().snapshot(self._number, self.now_us())

    def now_us(self) -> int:
        """The engine's clock."""
        return microseconds(self._clock())

    def _rest(self) -> None:
        """Somebody has left: do no more than those need who look on still."""
        self.is_watched = bool(self._viewers) or (self._explainer is not None and self._explainer.is_busy)
        if not self._viewers:
            self._kept.clear()
            self._ran, self._decodes = [], ()
            self._mirror, self._is_due, self._lag_s = None, False, 0.0
            self._readings.note(on=False)

    # What happens. To be called only while `is_watched`.

    def planned(self, plan: StepPlan, seen: ObservedStep) -> None:
        """A plan was made, just now. seen: will be written to as it goes on."""
        if self._viewers:
            running = self._readings.all_who_decode(plan)
            if running is None:
                seen.known = tuple([one for one in enumerate(plan.slices) if one[1].token_ids])
                seen.decodes = tuple([piece.seq_id for piece in plan.slices if not piece.token_ids])
            elif running != self._ran:
                self._ran = [*running]
                self._decodes = seen.decodes = tuple([sequence.id for sequence in running])
            else:
                seen.decodes = self._decodes
            if plan.block_ops is not None:
                self._has_moved = True
            if plan.inits:
                seen.admitted = tuple(self._admissions(plan))
        if self._explainer is not None and self._explainer.is_busy:
            self._explainer.planned(plan, seen.planned_s)

    def published(self, plan: StepPlan, result: StepResult, step: StepTokens, seen: ObservedStep) -> None:
        """It has been published, at this moment: it is over, and told, or kept to be told with others."""
        if self._explainer is not None and self._explainer.is_busy:
            self._explainer.landed(plan, seen.took_s, seen.landed_s)
        if not self._viewers:
            return
        mirror, seen.published_s = self._mirror or self._looking(), self._clock()
        self._has_stepped, seen.step_id = True, plan.step_id
        seen.token_ids = result.token_ids
        num = None if self._has_moved or plan.block_ops is not None or plan.drafting else mirror.num_noted()
        if num is None:
            self._catch_up()
            came = computed(plan, seen, result, mirror)
            change = self._change(ends_of(step.deltas), has_swapped=plan.block_ops is not None)
            self._offer(record_of(self._number + 1, seen, work_of(seen, came, plan), came, change))
        else:
            seen.num_grown, seen.num_rehashed, has_news = num
            if has_news or len(seen.decodes) != len(plan.slices):
                with self._all_or_anew():
                    came = computed(plan, seen, result, mirror)
                    seen.more = More(came, ends_of(step.deltas), mirror.take_news())
            kept = self._kept  # and told with others
            kept.append(seen)
            if len(kept) == 1:
                for viewer in self._viewers:
                    viewer.ring()
            if len(kept) >= self._max_records:
                self._catch_up()
        if self._is_due:
            self._tell_look()

    def _catch_up(self) -> None:
        """Tell of the steps that are kept. That comes before any later record."""
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        with self._all_or_anew():
            noted = self._readings.take_blocks(kept[-1].num_grown, kept[-1].num_rehashed)
            for told in tell(self._number + 1, kept, noted, self._looking()):
                self._offer(told)

    def taken_back(self, step_id: int | None) -> None:
        """A step raised, and those on top of it are gone as well; None where what holds what is made anew."""
        if self._explainer is not None and self._explainer.is_busy:
            self._explainer.taken_back()
        if self._viewers:
            self._tell(None, step_id, has_swapped=True)

    def looked(self, lag_s: float, awaited: Flight | None) -> None:
        """It was looked how late the event loop is. While a step is under way that is told behind it, since whoever
        tells it takes a processor from the step; unless none was over since the last look. awaited: its flight.
        """
        if not self._viewers:
            return
        self._lag_s = max(self._lag_s, lag_s)
        if self._clock() < self._looked_s + min(self._spent_s / SHARE, MAX_REST_S):
            return
        self._is_due, self._has_stepped = self._has_stepped and awaited is not None, False
        if not self._is_due:
            self._tell_look()

    def _tell_look(self) -> None:
        """Tell of it, and all that has changed."""
        began_s, self._looked_s, self._spent_s = self._processor_clock(), self._clock(), 0.0
        lag_s, self._lag_s, self._is_due = self._lag_s, 0.0, False
        try:
            self._tell(microseconds(lag_s), None, has_swapped=False)
        finally:
            for viewer in self._viewers:
                viewer.looked()
            self._spend(self._processor_clock() - began_s)

    def _spend(self, seconds: float) -> None:
        """Telling has taken so much processor time."""
        self._spent_s += seconds

    def _tell(self, lag_us: int | None, failed_step: int | None, *, has_swapped: bool) -> None:
        """Make a record of what is no step, and of all that has changed, and offer it to everybody."""
        change = self._change({}, has_swapped=has_swapped)
        self._offer(
            Record(
                self._number + 1,
                self.now_us(),
                cards=tuple(change.cards),
                moves=tuple(change.moves),
                queue=change.queue,
                blocks=change.blocks,
                lag_us=lag_us,
                failed_step=failed_step,
            )
        )

    def _offer(self, told: Record | Run) -> None:
        self._number += len(told.steps) if isinstance(told, Run) else 1
        for viewer in self._viewers:
            viewer.offer(told)

    def _change(self, ends: dict[ChoiceId, str], *, has_swapped: bool) -> Change:
        """What has changed since the last record. ends: why choices have ended in the step that is told."""
        self._catch_up()
        has_moved, self._has_moved = has_swapped or self._has_moved, False
        with self._all_or_anew():
            mirror = self._looking()
            return mirror.change(ends, self._readings.take_noted(), has_moved=has_moved, has_swapped=has_swapped)

    def _looking(self) -> Mirror:
        """The mirror; it is made when the first viewer's first news are."""
        if self._mirror is None:
            self._mirror = Mirror(self._readings)
        return self._mirror

    @contextmanager
    def _all_or_anew(self) -> Iterator[None]:
        """What is raised inside leaves unknown what has been told: all who look on begin anew."""
        try:
            yield
        except BaseException:
            self._mirror = None
            self._kept.clear()
            for viewer in self._viewers:
                viewer.begin_anew(1)
            raise

    def _admissions(self, plan: StepPlan) -> Iterator[Admission]:
        """Of those who took a row in a plan that was just made."""
        mirror = self._looking()
        starts = {piece.seq_id: piece.start for piece in plan.slices}
        coming = [init.seq_id for init in plan.inits]
        for place, init in enumerate(plan.inits):
            sequence = self._readings.sequence(init.seq_id)
            if sequence is None or sequence.settled_in != plan.step_id:
                continue  # it has its row anew, and has run
            num_matched = starts.get(init.seq_id, 0)
            source = _NONE
            if num_matched:
                before = _siblings(sequence, coming[place:])
                source = "swap" if mirror.was_swapped(init.seq_id) else self._source(sequence, num_matched, before)
            mirror.meet(sequence)
            yield Admission(init.seq_id, num_matched, source, init.block_ids[:MAX_ADMITTED_BLOCKS])

    def _source(self, sequence: Sequence, num_matched: int, before: list[Sequence]) -> str:
        """Where a newcomer has what it need not compute: what is found by hash ends with a block."""
        first = sequence.table.block_ids[:1]
        is_fork = num_matched % self._readings.cache.block_size or any(
            one.table.block_ids[:1] == first for one in before
        )
        return "fork" if is_fork else "cache"


def _siblings(sequence: Sequence, coming: list[SeqId]) -> list[Sequence]:
    """Those of its group that run already, without who comes later in the same step."""
    group = sequence.group
    return [] if group is None else [one for one in group.running() if one.id not in coming]
