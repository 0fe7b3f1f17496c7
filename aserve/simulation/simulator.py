"""Simulator: recorded arrivals through a real Scheduler, on a clock of its own, with a price in the place of each step.

    arrivals <= now --> add        plan --> launched at now, lands at max(now, last landing) + seconds
    a landing       --> commit     now = its time + the gap until the next plan

As many steps are under way as the engine lets be. Answers end with the length that they were recorded with; who gave up
without a token gives up at the same time after its arrival. Nothing else is known of why somebody came when he did: a
client that waits for its answer before it asks again comes no earlier where answers are faster.
"""

from collections import deque
from functools import partial
from math import inf
from typing import Final

from aserve.core.config import EngineConfig
from aserve.core.errors import AserveError, RecordingError
from aserve.core.ids import RequestId, SeqId
from aserve.core.params import SamplingParams
from aserve.core.plan import StepPlan, StepResult
from aserve.core.request import Request
from aserve.recording.plans import Told, settled
from aserve.recording.records import Planned
from aserve.recording.scheduler import RecordedScheduler
from aserve.scheduling import make_scheduler
from aserve.simulation.costs import Costs
from aserve.simulation.meter import Figures, Meter
from aserve.simulation.traffic import STOP, Contents, Kind, Traffic, Visit, kind_of, step_of

MAX_CHOICES: Final = 128
MAX_STEPS: Final = 10**8


class Simulator:
    """Of one traffic under one configuration. speed: how much faster everybody comes."""

    def __init__(self, traffic: Traffic, config: EngineConfig, *, speed: float = 1.0, seed: int = 0) -> None:
        header = traffic.header
        self._costs = Costs(traffic.steps, header.config.swap_cost_s, seed)
        self._graph_sizes = header.config.graph_sizes
        self._contents = Contents(header.config.block_size)
        self._now = self._origin = traffic.visits[0].arrived.at_s if traffic.visits else 0.0
        self._speed = speed
        self._told: list[Told] = []
        self._meter = Meter()
        made = partial(RecordedScheduler, self._told.append, _raise, clock=lambda: self._now)
        self._scheduler = make_scheduler(config, made)
        self._visits = {RequestId(str(visit.number)): visit for visit in traffic.visits}
        self._events = deque(sorted(self._dues(traffic), key=lambda event: event[:2]))
        self._owners: dict[SeqId, tuple[Visit, int]] = {}
        self._cut_s = inf if traffic.cut_s is None else self._faster(traffic.cut_s)
        self._flying: deque[tuple[StepPlan, float, float]] = deque()
        self._planned: list[Planned] = []
        self._kind = Kind.DECODE
        self._last_landed_s = -inf

    def run(self) -> Figures:
        """All of it; up to its end, where the recording ends before all answers do."""
        for _ in range(MAX_STEPS):
            self._deliver()
            if self._now >= self._cut_s:
                return self._meter.figures()
            plan = self._scheduler.plan(self._now)
            self._take_in()
            if plan is not None:
                self._launch(plan)
            elif not self._flying and not self._events:
                return self._meter.figures()
            elif not self._flying:
                self._now = max(self._now, self._events[0][0])
                continue
            num_kept = self._scheduler.max_in_flight - 1 if plan is not None else len(self._flying) - 1
            while len(self._flying) > num_kept:
                if self._flying[0][1] > self._cut_s:
                    return self._meter.figures()
                self._land()
        raise RecordingError(f"the simulation has not come to its end in {MAX_STEPS} steps")

    def _dues(self, traffic: Traffic) -> list[tuple[float, int, str, Visit | None]]:
        """What comes from outside: when, in which order, what, and whose it is."""
        dues: list[tuple[float, int, str, Visit | None]] = []
        for visit in traffic.visits:
            at_s = self._faster(visit.arrived.at_s)
            dues.append((at_s, 0, "arrives", visit))
            if visit.left_s is not None:
                dues.append((at_s + visit.left_s - visit.arrived.at_s, 1, "leaves", visit))
        dues += [(self._faster(at_s), 2, "forgets", None) for at_s in traffic.forgotten_s]
        return dues

    def _faster(self, at_s: float) -> float:
        return self._origin + (at_s - self._origin) / self._speed

    def _recorded_s(self, at_s: float) -> float:
        """What the recording's clock said when it had come as far in the traffic."""
        return self._origin + (at_s - self._origin) * self._speed

    def _deliver(self) -> None:
        """What is due."""
        while self._events and self._events[0][0] <= self._now:
            at_s, _, what, visit = self._events.popleft()
            if visit is None:
                self._scheduler.reset_prefix_cache()
            elif what == "leaves":
                self._scheduler.cancel(RequestId(str(visit.number)))
            else:
                try:
                    self._scheduler.add(self._request(visit, at_s))
                except AserveError:
                    self._meter.refused += 1
        self._take_in()

    def _request(self, visit: Visit, at_s: float) -> Request:
        arrived = visit.arrived
        waited_s = max(0.0, arrived.at_s - arrived.arrival_s)  # before the scheduler: texts, hashes
        return Request(
            id=RequestId(str(visit.number)),
            prompt_token_ids=self._contents.prompt(visit),
            params=SamplingParams(n=min(arrived.num_sequences, MAX_CHOICES)),
            max_tokens=arrived.max_tokens,  # STOP ends it: whether a step is planned behind its end is as it was
            seed=visit.number,
            arrival_s=at_s - waited_s,
            stop_ids=frozenset((STOP,)),
            eos_ids=frozenset((STOP,)),
            cache_salt=b"%d" % visit.number if arrived.scores_prompt else b"",
            priority=arrived.priority,
            tenant=arrived.tenant,
            weight=arrived.weight,
            adapter=arrived.adapter,
        )

    def _launch(self, plan: StepPlan) -> None:
        [record] = [record for record in self._planned if record.plan.step_id == plan.step_id]
        self._planned.clear()
        for init in record.plan.inits:
            self._owners[init.seq_id] = self._visits[init.request_id], init.index
        begins_s = max(self._now, self._flying[-1][1] if self._flying else self._last_landed_s)
        self._kind = kind_of(record.plan, self._kind)
        step = step_of(record.plan, self._kind, self._graph_sizes, self._recorded_s(begins_s))
        seconds = self._costs.seconds(step, self._speed)
        self._flying.append((plan, begins_s + seconds, self._now))

    def _land(self) -> None:
        plan, lands_s, launched_s = self._flying.popleft()
        self._now = max(self._now, lands_s)
        took_s = self._now - max(launched_s, self._last_landed_s)
        self._last_landed_s = self._now
        self._scheduler.commit(StepResult(plan.step_id, self._sampled(plan)), took_s)
        self._take_in()
        if self._meter.open_ids:
            self._now += self._costs.gap_s(self._recorded_s(self._now))

    def _sampled(self, plan: StepPlan) -> tuple[int, ...]:
        token_ids = []
        for piece in plan.slices:
            if piece.num_samples:
                visit, index = self._owners[piece.seq_id]
                place = piece.start + piece.num_tokens - visit.arrived.num_prompt
                token_ids.append(self._contents.answer(visit, index, place))
        return tuple(token_ids)

    def _take_in(self) -> None:
        """What the scheduler has told."""
        for record in map(settled, self._told):
            if isinstance(record, Planned):
                self._planned.append(record)
            self._meter.tell(record)
        self._told.clear()


def _raise(error: BaseException) -> None:
    raise error
