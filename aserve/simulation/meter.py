"""Meter: from records of what happened, real or simulated, to figures. The same arithmetic for both."""

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from aserve.core.ids import RequestId, SeqId
from aserve.load.figures import percentile
from aserve.recording.records import Arrived, Ended, Landed, Plan, Planned, Record, TakenBack


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run. Times are seconds; NaN where there was nothing to measure.

    requests: that came; refused: that were not taken. output_tokens_per_s, total_tokens_per_s: from the first arrival
    to the last landing, the latter with the prompts. ttft: from a request's arrival to its first token. itl: between
    two landings of one sequence. preemptions: of sequences. hit_rate: share of the prompts that the prefix cache had.
    """

    requests: int
    refused: int
    seconds: float
    steps: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    latency_p50_s: float
    latency_p99_s: float
    preemptions: int
    hit_rate: float


class Owner(NamedTuple):
    """Whose a sequence is."""

    request_id: RequestId
    choice: int


class Meter:
    """Is told of records in their order. refused: requests that were not taken."""

    def __init__(self) -> None:
        self.refused = 0
        self._arrivals: dict[RequestId, float] = {}
        self._num_open: dict[RequestId, int] = {}
        self._waits_first: set[RequestId] = set()
        self._owners: dict[SeqId, Owner] = {}
        self._running: dict[Owner, SeqId] = {}
        self._last_s: dict[SeqId, float] = {}
        self._plans: dict[int, Plan] = {}
        self._num_requests = self._num_steps = self._num_out = self._num_in = 0
        self._num_preemptions = self._num_cached = self._num_looked_up = 0
        self._num_prompt: dict[RequestId, int] = {}
        self._first_s = self._end_s = 0.0
        self._ttfts: list[float] = []
        self._itls: list[float] = []
        self._latencies: list[float] = []

    @property
    def open_ids(self) -> Collection[RequestId]:
        """Requests that have come and have not ended."""
        return self._num_open.keys()

    def tell(self, record: Record) -> None:
        """What happened next."""
        match record:
            case Arrived():
                self._arrived(record)
            case Planned():
                self._planned(record.plan)
            case Landed():
                self._landed(record)
            case TakenBack():
                for step_id in record.step_ids:
                    self._plans.pop(step_id, None)
            case Ended():
                self._ended(record)

    def figures(self) -> Figures:
        """Of all that was told."""
        seconds = max(self._end_s - self._first_s, 1e-9)
        return Figures(
            requests=self._num_requests + self.refused,
            refused=self.refused,
            seconds=seconds,
            steps=self._num_steps,
            output_tokens=self._num_out,
            output_tokens_per_s=self._num_out / seconds,
            total_tokens_per_s=(self._num_out + self._num_in) / seconds,
            ttft_p50_s=percentile(self._ttfts, 50),
            ttft_p99_s=percentile(self._ttfts, 99),
            itl_p50_s=percentile(self._itls, 50),
            itl_p99_s=percentile(self._itls, 99),
            latency_p50_s=percentile(self._latencies, 50),
            latency_p99_s=percentile(self._latencies, 99),
            preemptions=self._num_preemptions,
            hit_rate=self._num_cached / max(1, self._num_looked_up),
        )

    def _arrived(self, record: Arrived) -> None:
        if not self._num_requests:
            self._first_s = record.arrival_s
        self._num_requests += 1
        self._num_in += record.num_prompt
        self._num_prompt[record.request_id] = record.num_prompt
        self._arrivals[record.request_id] = record.arrival_s
        self._num_open[record.request_id] = record.num_sequences
        self._waits_first.add(record.request_id)

    def _planned(self, plan: Plan) -> None:
        self._plans[plan.step_id] = plan
        for init in plan.inits:
            self._num_preemptions += init.seq_id in self._owners
            owner = Owner(init.request_id, init.index)
            self._owners[init.seq_id], self._running[owner] = owner, init.seq_id

    def _landed(self, record: Landed) -> None:
        plan = self._plans.pop(record.step_id)
        self._num_steps += 1
        self._end_s = record.at_s
        accepted = iter(record.num_accepted)
        for piece in plan.slices:
            if not piece.num_samples:
                continue
            num_tokens = 1 + next(accepted, 0)
            owner = self._owners.get(piece.seq_id)
            if owner is None:  # it has ended
                continue
            self._num_out += num_tokens
            if owner.request_id in self._waits_first:
                self._waits_first.remove(owner.request_id)
                self._ttfts.append(record.at_s - self._arrivals[owner.request_id])
            last_s = self._last_s.get(piece.seq_id)
            if last_s is not None:
                self._itls.append(record.at_s - last_s)
            self._last_s[piece.seq_id] = record.at_s

    def _ended(self, record: Ended) -> None:
        request_id = record.request_id
        if request_id not in self._num_open:  # its arrival broke the bookkeeping, and is none
            return
        seq_id = self._running.pop(Owner(request_id, record.index), None)
        if seq_id is not None:
            self._num_cached += record.num_cached
            self._num_looked_up += self._num_prompt[request_id]
            self._owners.pop(seq_id, None)
            self._last_s.pop(seq_id, None)
        self._num_open[request_id] -= 1
        if not self._num_open[request_id]:
            del self._num_open[request_id]
            arrival_s = self._arrivals.pop(request_id)
            if request_id not in self._waits_first:
                self._latencies.append(record.at_s - arrival_s)
            self._waits_first.discard(request_id)
            self._num_prompt.pop(request_id, None)
