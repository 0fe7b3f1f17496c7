"""Many requests through the real scheduler on a virtual clock: a step costs what a simple device takes. No tokens."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from aserve.core.errors import OverloadedError
from aserve.core.ids import RequestId
from aserve.core.params import SamplingParams
from aserve.core.plan import StepPlan, StepResult
from aserve.core.request import Request
from aserve.scheduler.queue import priority_with_ageing
from aserve.scheduler.scheduler import Scheduler
from tests.fakes import deltas_of

STEP_S, TOKEN_S = 0.010, 50e-6
"""Of a step, and of each token in it."""
LIMITS = {
    "block_size": 16,
    "num_blocks": 4096,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "long_prefill_token_threshold": 256,
    "max_model_len": 4096,
    "enable_prefix_caching": False,
    "policy": priority_with_ageing(10.0),
}


@dataclass(frozen=True)
class Arrival:
    """A request to come."""

    at_s: float
    tenant: str
    num_prompt: int
    num_tokens: int
    weight: float = 1.0
    timeout_s: float | None = None


@dataclass
class Outcome:
    """What happened. Times are seconds from arrival to the first token; service is by tenant, as counters count it."""

    first_token_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    service: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    admissions: list[RequestId] = field(default_factory=list)
    planned: set[RequestId] = field(default_factory=set)
    finished: set[RequestId] = field(default_factory=set)
    unserved: set[RequestId] = field(default_factory=set)
    refused: dict[RequestId, OverloadedError] = field(default_factory=dict)
    num_tokens: int = 0

    def p95(self, tenant: str) -> float:
        times = sorted(self.first_token_s[tenant])
        return times[int(0.95 * len(times))]


class Simulation:
    """scheduler: looked into by tests while it runs. until_s: when it ends, finished or not."""

    def __init__(self, arrivals: Iterable[Arrival], **limits: object) -> None:
        self.scheduler = Scheduler(**LIMITS | limits)
        self.outcome = Outcome()
        self.now = 0.0
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.at_s)
        self._by_id: dict[RequestId, Arrival] = {}
        self._waits_for_first: set[RequestId] = set()

    def run(self, until_s: float = 1e9) -> Outcome:
        while self.now < until_s:
            self._admit_arrivals()
            expired = self.scheduler.expire(self.now)
            if expired is not None:
                self.outcome.unserved.update(expired.unserved)
                self.outcome.finished.update(delta.request_id for delta in expired.deltas)
            plan = self.scheduler.plan(self.now)
            if plan is not None:
                self._step(plan)
            elif self._arrivals:
                self.now = max(self.now, self._arrivals[0].at_s)
            else:
                break
        return self.outcome

    def _admit_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0].at_s <= self.now:
            arrival = self._arrivals.pop(0)
            request_id = RequestId(f"{arrival.tenant}{len(self._by_id)}")
            self._by_id[request_id] = arrival
            request = Request(
                id=request_id,
                prompt_token_ids=(0,) * arrival.num_prompt,
                params=SamplingParams(temperature=0.0),
                max_tokens=arrival.num_tokens,
                seed=0,
                arrival_s=arrival.at_s,
                tenant=arrival.tenant,
                weight=arrival.weight,
                deadline_s=None if arrival.timeout_s is None else arrival.at_s + arrival.timeout_s,
            )
            try:
                self.scheduler.add(request)
            except OverloadedError as error:
                self.outcome.refused[request_id] = error

    def _step(self, plan: StepPlan) -> None:
        sequences = self.scheduler._roster.sequences
        self.outcome.admissions += [sequences[init.seq_id].request_id for init in plan.inits]
        owners = {piece.seq_id: sequences[piece.seq_id].request_id for piece in plan.slices}
        self.outcome.planned.update(owners.values())
        for piece in plan.slices:
            cost = 2.0 * piece.num_samples + len(piece.token_ids)
            self.outcome.service[self._by_id[owners[piece.seq_id]].tenant] += cost
        self.now += STEP_S + TOKEN_S * plan.num_tokens
        self._waits_for_first.update(self.outcome.admissions[-len(plan.inits) :] if plan.inits else ())
        result = StepResult(plan.step_id, (1,) * sum(piece.num_samples for piece in plan.slices))
        for delta in deltas_of(self.scheduler.commit(result, STEP_S + TOKEN_S * plan.num_tokens)):
            self.outcome.num_tokens += len(delta.token_ids)
            if delta.request_id in self._waits_for_first:
                self._waits_for_first.remove(delta.request_id)
                arrival = self._by_id[delta.request_id]
                self.outcome.first_token_s[arrival.tenant].append(self.now - arrival.at_s)
            if delta.finish_reason is not None:
                self.outcome.finished.add(delta.request_id)


def simulate(arrivals: Iterable[Arrival], until_s: float = 1e9, **limits: object) -> Outcome:
    """Run them to their end, or to `until_s`."""
    return Simulation(arrivals, **limits).run(until_s)


def jain(values: Iterable[float]) -> float:
    """Jain's index: 1 where all have the same."""
    each = list(values)
    return sum(each) ** 2 / (len(each) * sum(value**2 for value in each))
