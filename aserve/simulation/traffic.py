"""Traffic: who came when, how long their answers were and what their prompts shared; and what each step took.

All of it is read from a recording in one pass. Beams are taken for as many choices, and branches for requests whose
prompts the cache has.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

import msgspec

from aserve.core.errors import RecordingError
from aserve.core.graph_sizes import GraphSizes
from aserve.core.ids import RequestId
from aserve.recording.files import Recording
from aserve.recording.records import (
    Arrived,
    CacheForgotten,
    Ended,
    Header,
    Landed,
    Plan,
    Planned,
    Record,
    TakenBack,
)
from aserve.scheduler.step_cost import Load
from aserve.simulation.meter import Figures, Meter

MAX_TOKEN: Final = 2**31
STOP: Final = 2**32 - 1
"""Ends an answer; no other token is as large."""


class Answer(NamedTuple):
    """One choice: how many tokens it had, and the names of its first full blocks."""

    num_tokens: int
    chain: tuple[bytes, ...]
    ended_s: float


class Visit(msgspec.Struct):
    """A request. number: its place in the order of arrivals. answers: by index, of those that have ended.

    is_open: the recording ends before it does.
    """

    number: int
    arrived: Arrived
    answers: dict[int, Answer] = msgspec.field(default_factory=dict)
    is_open: bool = False

    @property
    def longest(self) -> int:
        """Tokens of its longest answer."""
        return max((answer.num_tokens for answer in self.answers.values()), default=0)

    @property
    def left_s(self) -> float | None:
        """When it was given up without a token; None where it had one, or has not ended."""
        if self.longest or not self.answers or self.is_open:
            return None
        return max(answer.ended_s for answer in self.answers.values())


class Kind(Enum):
    """Of steps, which run other kernels, or the same with other caches. BEHIND: one that only decodes, behind a prompt,
    whose batch is built from nothing and whose code and weights prompts have driven out of the caches.
    """

    DECODE = auto()
    BEHIND = auto()
    PROMPT = auto()


class Step(NamedTuple):
    """What a step had to compute, when it was planned and had landed, and what it took of the time between them.

    num_moved: blocks swapped. kind: what it is like. gap_s: from the landing before it to its plan, where somebody was
    there all the time; None where nobody was.
    """

    load: Load
    at_s: float
    took_s: float
    num_moved: int
    kind: Kind
    gap_s: float | None
    landed_s: float


class Traffic(NamedTuple):
    """What a recording says of these things. figures: as recorded. forgotten_s: when the cache was emptied.

    cut_s: when it ends, if somebody was still being served then; else None.
    """

    header: Header
    visits: list[Visit]
    steps: list[Step]
    forgotten_s: list[float]
    figures: Figures
    cut_s: float | None = None


def step_of(
    plan: Plan,
    kind: Kind,
    graph_sizes: GraphSizes | None,
    at_s: float,
    took_s: float = 0.0,
    gap_s: float | None = None,
    landed_s: float = 0.0,
) -> Step:
    """That of a plan. graph_sizes: see `Load.of`."""
    ops = plan.block_ops
    num_moved = 0 if ops is None else len(ops.swap_outs) + len(ops.swap_ins)
    return Step(Load.of(plan.slices, graph_sizes), at_s, took_s, num_moved, kind, gap_s, landed_s)


def kind_of(plan: Plan, before: Kind) -> Kind:
    """That of the step of a plan, by the kind of the step before it."""
    if any(piece.num_tokens > 1 for piece in plan.slices):
        return Kind.PROMPT
    return Kind.BEHIND if before is Kind.PROMPT else Kind.DECODE


class TrafficReader:
    """Takes the records one by one. graph_sizes: see `Load.of`."""

    def __init__(self, graph_sizes: GraphSizes | None = None) -> None:
        self._graph_sizes = graph_sizes
        self.meter = Meter()
        self.visits: list[Visit] = []
        self.steps: list[Step] = []
        self.forgotten_s: list[float] = []
        self.last_s = 0.0
        self._open: dict[RequestId, Visit] = {}
        self._planned: dict[int, tuple[Planned, Kind, float | None]] = {}
        self._kind = Kind.DECODE
        self._landed_s: float | None = None

    def take(self, record: Record) -> None:
        """What happened next."""
        match record:
            case Arrived():
                self._open[record.request_id] = visit = Visit(len(self.visits), record)
                self.visits.append(visit)
            case Planned():
                gap_s = None if self._landed_s is None else max(0.0, record.at_s - self._landed_s)
                self._kind = kind_of(record.plan, self._kind)
                self._planned[record.plan.step_id] = record, self._kind, gap_s
                self._landed_s = None
            case Landed():
                planned, kind, gap_s = self._planned.pop(record.step_id)
                if planned.plan.slices and record.took_s > 0.0:
                    of_plan = planned.plan, kind, self._graph_sizes
                    self.steps.append(step_of(*of_plan, planned.at_s, record.took_s, gap_s, record.at_s))
                self._landed_s = record.at_s
            case TakenBack():
                for step_id in record.step_ids:
                    self._planned.pop(step_id, None)
            case Ended():
                self._ended(record)
            case CacheForgotten():
                self.forgotten_s.append(record.at_s)
        self.last_s = record.at_s
        self.meter.tell(record)
        if not self.meter.open_ids:
            self._landed_s = None  # whoever comes next has let the device wait

    def cut_s(self) -> float | None:
        """To be called at the end: as a Traffic's."""
        for request_id in self.meter.open_ids:
            self._open[request_id].is_open = True
        return self.last_s if self.meter.open_ids else None

    def _ended(self, record: Ended) -> None:
        """Of a request that has arrived: one whose arrival broke the bookkeeping ends without."""
        if (visit := self._open.get(record.request_id)) is not None:
            visit.answers[record.index] = Answer(record.num_tokens, record.chain, record.at_s)


def read_traffic(recording: Recording) -> Traffic:
    """All that a simulation needs. Raises `RecordingError` for a recording that none can be made of."""
    if recording.header.config.speculative_config is not None:
        raise RecordingError(f"{recording.path}: recorded with speculative_config, and drafts are not simulated")
    reader = TrafficReader(recording.header.config.graph_sizes)
    for record in recording.records():
        reader.take(record)
    if not reader.steps:
        raise RecordingError(f"{recording.path}: no step has landed in it, so that nothing is known of what steps take")
    heard = reader.visits, reader.steps, reader.forgotten_s, reader.meter.figures()
    return Traffic(recording.header, *heard, reader.cut_s())


class Contents:
    """Made-up token ids: equal where two sequences shared a block, and nowhere else. block_size: the recording's."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def prompt(self, visit: Visit) -> tuple[int, ...]:
        """A request's. Its last block is named only where an answer has filled it."""
        chain = max((answer.chain for answer in visit.answers.values()), key=len, default=())
        return tuple(self._token(visit, chain, position) for position in range(visit.arrived.num_prompt))

    def answer(self, visit: Visit, index: int, place: int) -> int:
        """A token of a choice; STOP is its last one. It has no last one where the recording does not say which."""
        answer = visit.answers.get(index)
        unknown = visit.arrived.max_tokens if visit.is_open else visit.longest
        num_tokens = max(1, answer.num_tokens if answer is not None else unknown)
        if place >= num_tokens - 1:
            return STOP
        return self._token(visit, () if answer is None else answer.chain, visit.arrived.num_prompt + place)

    def _token(self, visit: Visit, chain: Sequence[bytes], position: int) -> int:
        block, offset = divmod(position, self._block_size)
        name = (
            int.from_bytes(chain[block], "big") if block < len(chain) else visit.number * 0x9E3779B97F4A7C15 + position
        )
        return (name + offset * 0x85EBCA6B) % MAX_TOKEN
