"""Observer: tells whoever looks on what happens in an engine's steps. Costs a look at `is_watched` where nobody does.

Those who look on are viewers, and the explainer, while requests are open that asked for an explanation.

    engine loop   planned   launched   committed   published ...      a look ten times a second, steps or none
                     '---------'-----------'-----------'--> Record --> each Viewer's queue --> who reads it, in his time

A viewer who reads slowly loses records, never their order: when his queue is full it is emptied, he is told how many
are gone, and goes on from a new snapshot. So what he holds is bounded, and nothing waits for him. What is raised here
is told to the log by whoever calls, and ends nobody's request; the viewers then begin anew.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import Final

from aserve.core.errors import OverloadedError, UnavailableError
from aserve.core.explanation import Explanation
from aserve.core.ids import RequestId, SeqId
from aserve.core.outputs import SeqDelta, StepTokens
from aserve.core.plan import StepPlan, StepResult
from aserve.core.ports import Clock
from aserve.core.request import Request
from aserve.observe.explainer import Explainer, known_now
from aserve.observe.mirror import Change, Mirror
from aserve.observe.prefixes import Names
from aserve.observe.records import Admission, Record, Snapshot
from aserve.observe.step import ObservedStep, PlainStep, computed, microseconds, run_of, work_of
from aserve.observe.viewer import Viewer
from aserve.scheduler.readings import Readings
from aserve.scheduler.sequence import Sequence

MAX_VIEWERS: Final = 8
MAX_RECORDS: Final = 1024
"""That wait for a viewer. At a thousand steps a second he has a second to take them."""
MAX_ADMITTED_BLOCKS: Final = 1024
"""Of those that an admission tells."""

_NONE: Final = "none"
_decodes: Final = attrgetter("seen.decodes")


class Observer:
    """Of one engine. is_watched: whether anything but `is_watched` is to be asked or called.

    names: of what answers, for explanations.
    """

    def __init__(
        self,
        readings: Readings,
        clock: Clock,
        names: Names,
        *,
        max_viewers: int = MAX_VIEWERS,
        max_records: int = MAX_RECORDS,
    ) -> None:
        self.is_watched = False
        self._names = names
        self._explainer: Explainer | None = None
        self._readings = readings
        self._clock = clock
        self._max_viewers = max_viewers
        self._max_records = max_records
        self._viewers: list[Viewer] = []
        self._mirror: Mirror | None = None
        self._explained: dict[int, StepPlan] = {}
        """Plans that the explainer was told of, and that are under way."""
        self._has_moved = False
        """Whether tables may have done more than grow since the last record."""
        self._plain: list[PlainStep] = []
        """Steps that are over, and of which nothing is offered yet."""
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
        viewer = Viewer(self.snapshot, self._catch_up, self._max_records)
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
        if not self.is_watched:
            self._explained.clear()
        if not self._viewers:
            self._plain.clear()
            self._mirror = None
            self._readings.note_blocks(on=False)

    # What happens. To be called only while `is_watched`.

    def planned(self, plan: StepPlan, seen: ObservedStep) -> None:
        """A plan was made. seen: will be written to as it goes on."""
        if self._viewers:
            newest = tuple([piece.seq_id for piece in plan.slices if not piece.token_ids])
            if len(newest) == len(plan.slices):
                seen.decodes = newest
            if plan.block_ops is not None or plan.inits:
                self._has_moved = True
                seen.admitted = tuple(self._admissions(plan))
        if self._explainer is not None and self._explainer.is_busy:
            self._explained[plan.step_id] = plan
            self._explainer.planned(plan, seen.planned_s)

    def published(self, plan: StepPlan, result: StepResult, step: StepTokens, seen: ObservedStep) -> None:
        """It has been published, at this moment: it is over, and told."""
        if self._explainer is not None and self._explainer.is_busy and plan.step_id in self._explained:
            del self._explained[plan.step_id]
            self._explainer.landed(plan, seen.took_s, seen.landed_s)
        if not self._viewers:
            return
        mirror, seen.published_s = self._mirror or self._looking(), self._clock()
        is_plain = seen.decodes is not None and not (self._has_moved or plan.block_ops or plan.drafting)
        if is_plain and (new := mirror.take_if_still()) is not None:
            self._keep(PlainStep(plan.step_id, seen, result.token_ids, new))
            return
        told = computed(plan, seen, result, mirror)
        change = self._change(step.deltas, has_swapped=plan.block_ops is not None)
        self._offer(
            Record(
                self._number + 1,
                microseconds(seen.published_s),
                tuple(change.cards),
                work_of(plan, seen, told),
                told.decoded,
                told.token_ids,
                seen.admitted,
                tuple(change.moves),
                change.queue,
                change.blocks,
            )
        )

    def _keep(self, step: PlainStep) -> None:
        """Tell of it with others: each by itself would take several times as long, since by the end of a step the
        processor's caches have forgotten how.
        """
        if not self._plain:
            for viewer in self._viewers:
                viewer.ring()
        self._plain.append(step)
        if len(self._plain) >= self._max_records:
            self._catch_up()

    def _catch_up(self) -> None:
        """Make runs of the steps of which nothing is offered yet. They come before any later record."""
        plain, self._plain = self._plain, []
        try:
            for _, steps in groupby(plain, _decodes):
                run = run_of(self._number + 1, list(steps), self._looking())
                self._number += len(run.steps)
                for viewer in self._viewers:
                    viewer.offer(run)
        except BaseException:
            self._begin_anew()
            raise

    def taken_back(self, step_id: int | None) -> None:
        """A step raised, and those on top of it are gone as well; None where what holds what is made anew."""
        plans = list(self._explained.values())
        self._explained.clear()
        if self._explainer is not None and self._explainer.is_busy:
            self._explainer.taken_back(plans)
        if self._viewers:
            self._tell(None, step_id, has_swapped=True)

    def looked(self, lag_s: float) -> None:
        """It was looked how late the event loop is."""
        if self._viewers:
            try:
                self._tell(microseconds(lag_s), None, has_swapped=False)
            finally:
                for viewer in self._viewers:
                    viewer.looked()

    def _tell(self, lag_us: int | None, failed_step: int | None, *, has_swapped: bool) -> None:
        """Make a record of what is no step, and of all that has changed, and offer it to everybody."""
        change = self._change((), has_swapped=has_swapped)
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

    def _offer(self, record: Record) -> None:
        self._number = record.number
        for viewer in self._viewers:
            viewer.offer(record)

    def _change(self, deltas: Several[SeqDelta], *, has_swapped: bool) -> Change:
        """What has changed since the last record. deltas: of the step that is told."""
        self._catch_up()
        grown = self._readings.take_grown()
        whose = None if has_swapped or self._has_moved else [seq_id for seq_id, _ in grown]
        self._has_moved = False
        try:
            return self._looking().change(deltas, whose, has_swapped=has_swapped)
        except BaseException:  # what has been told is not known any more
            self._begin_anew()
            raise

    def _looking(self) -> Mirror:
        """The mirror; it is made when the first viewer's first news are."""
        if self._mirror is None:
            self._mirror = Mirror(self._readings)
        return self._mirror

    def _begin_anew(self) -> None:
        self._mirror = None
        self._plain.clear()
        for viewer in self._viewers:
            viewer.begin_anew(1)

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
