"""A scheduler all of whose requests asked for an explanation, on a clock that goes on with each verb."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from aserve.core.explanation import Explanation
from aserve.core.ids import AdapterId, RequestId
from aserve.core.outputs import SeqDelta
from aserve.core.plan import StepPlan, StepResult
from aserve.core.request import Request
from aserve.observe.observer import Observer
from aserve.observe.step import ObservedStep
from tests.scheduler.sync_loop import SyncLoop

PLAN_S, FLIGHT_S, WAIT_S = 0.001, 0.01, 0.0001


class Names:
    """What answers."""

    def __init__(self, adapters: Mapping[int, str] = {}) -> None:
        self.model_name = "model"
        self.adapter_names: Callable[[], Mapping[AdapterId, str]] = lambda: {
            AdapterId(number): name for number, name in adapters.items()
        }


class ExplainedLoop(SyncLoop):
    """Tells an observer of its steps as the engine loop does. plain: requests that ask for nothing."""

    def __init__(self, *, adapters: Mapping[int, str] = {}, plain: Collection[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self.observer = Observer(self.scheduler.readings, lambda: self.now, Names(adapters))
        self._plain = plain
        self._seen: dict[int, ObservedStep] = {}
        self._last_landed_s = 0.0
        self._commit, self.scheduler.commit = self.scheduler.commit, self._seen_commit  # type: ignore[method-assign]

    def _listen(self, wanted: Request) -> None:
        super()._listen(wanted)
        self.now += WAIT_S
        if wanted.id not in self._plain:
            self.observer.explain(wanted)

    def plan(self) -> StepPlan | None:
        began_s = self.now
        plan = super().plan()
        self.now += PLAN_S
        if plan is not None and self.observer.is_watched:
            self._seen[plan.step_id] = seen = ObservedStep(began_s, self.now)
            self.observer.planned(plan, seen)
        return plan

    def _seen_commit(self, result: StepResult, took_s: float = 0.0) -> Any:
        self._step = self._commit(result, took_s)
        return self._step

    def commit(self) -> list[SeqDelta]:
        plan, result = self.in_flight[0]
        self.now += FLIGHT_S
        deltas = super().commit()
        seen = self._seen.pop(plan.step_id, None)
        if seen is not None:
            seen.took_s = self.now - max(seen.began_s, self._last_landed_s)
            seen.landed_s = seen.committed_s = self.now
        self._last_landed_s = self.now
        if seen is not None and self.observer.is_watched:
            self.now += WAIT_S
            self.observer.published(plan, result, self._step, seen)
        return deltas

    def fail(self, index: int = 0, *, out_of_memory: bool = False) -> str | None:
        for _ in range(index):
            self.commit()
        if self.observer.is_watched:
            self.observer.taken_back(self.in_flight[0][0].step_id)
        return super().fail(out_of_memory=out_of_memory)

    def cancel(self, name: str) -> None:
        super().cancel(name)
        if name in self.answers:
            self.leave(name)

    def leave(self, name: str) -> None:
        """Its reader is gone."""
        self.observer.leave(self.answers[name].request)

    def explanation(self, name: str) -> Explanation:
        """So far."""
        found = self.observer.explanation(RequestId(name))
        assert found is not None, name
        check(found)
        return found

    def explained(self, *wanted: Request) -> list[Explanation]:
        """Of requests that run together to their ends."""
        for one in wanted:
            self.add(one)
        self.drain()
        self.compare()
        return [self.explanation(one.id) for one in wanted]


def micro(milliseconds: float) -> int:
    """Whole microseconds, which it is to be."""
    number = round(milliseconds * 1000)
    assert abs(milliseconds * 1000 - number) < 1e-3, f"{milliseconds} is not of whole microseconds"
    return number


def check(found: Explanation) -> None:
    """What holds of every explanation, at any time."""
    phases = {name: micro(one) for name, one in found.phases_ms.items()}
    assert sum(phases.values()) == micro(found.total_ms)
    assert min(phases.values()) >= 0
    assert found.queue is not None
    assert sum(micro(hold.ms) for hold in found.queue.holds) == phases["queued"]
    assert 0 <= found.queue.ahead <= found.queue.waiting
    assert found.steps is not None
    assert found.steps.share_ms <= found.steps.total_ms
    for course in found.choices:
        assert len(course.preemptions) == min(course.num_preemptions, 64)
        assert len(course.chunks) == min(course.num_chunks, 128)
        for loss in course.preemptions:
            assert micro(loss.lost_ms) == micro(loss.waited_ms) + micro(loss.recompute_ms)
            assert min(loss.waited_ms, loss.recompute_ms, loss.recomputed_tokens) >= 0
            assert (loss.blocks_out > 0) or loss.kind == "recompute"
        if course.prefix is not None:
            assert course.prefix.cached_tokens <= course.prefix.shared_tokens < found.prompt_tokens
            assert (course.prefix.source == "none") == (course.prefix.shared_tokens == 0)
            assert course.prefix.source == "fork" or course.prefix.cached_tokens == course.prefix.shared_tokens
