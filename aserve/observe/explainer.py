"""Explainer: keeps the lives of the requests that asked for an explanation, and the latest explanations. There is none
before the first asks, and it is told of steps while one of them is open.

    begin --> planned, landed, planned ... --> end        Life, as it goes on   --> explanation(id)
                                                '-------> Explanation, kept     --> find(name, tenant)

What it raises is told to the log by whoever calls; then nothing is known of those that were open, rather than something
wrong, and their answers come without an explanation.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aserve.core.explanation import Explanation
from aserve.core.ids import AdapterId, RequestId, SeqId
from aserve.core.plan import SeqSlice, StepPlan
from aserve.core.ports import Clock
from aserve.core.request import Request
from aserve.observe.lives import Life, known_of, us
from aserve.observe.prefixes import Names, Relative, prefix_of
from aserve.scheduler.readings import Readings
from aserve.scheduler.states import State

MAX_KEPT: Final = 256
"""Explanations of requests that have ended."""
MAX_REMEMBERED_TOKENS: Final = 1 << 20
"""Of requests that have ended, to compare prompts with; those of the newest, which are MAX_KEPT at most."""
_NONE: Final[dict[SeqId, SeqSlice]] = {}
_Parts = dict[Life, dict[SeqId, SeqSlice]]
"""Of a plan: slices by who has them, of those who asked."""
_NOBODY: Final[_Parts] = {}


class Explainer:
    """Of one engine. names: of what answers. unix: the time of day, in seconds."""

    def __init__(self, readings: Readings, clock: Clock, names: Names, *, unix: Clock = time.time) -> None:
        self._readings = readings
        self._clock = clock
        self._names = names
        self._unix = unix
        self._lives: dict[RequestId, Life] = {}
        self._life_of: dict[SeqId, Life] = {}
        self._under_way: dict[int, _Parts] = {}
        self._kept: dict[RequestId, tuple[str, Explanation]] = {}
        self._remembered: deque[Relative] = deque()
        self._num_remembered_tokens = 0
        self._after_fault = False
        readings.cache.note_evictions()

    @property
    def is_busy(self) -> bool:
        """Whether it is to be told of steps."""
        return bool(self._lives)

    def begin(self, request: Request) -> None:
        """The scheduler has just taken a request that asks for an explanation."""
        model = model_of(self._names, request.adapter)
        self._kept.pop(request.id, None)
        life = Life(request, self._readings, us(self._clock()), self._unix(), model)
        self._lives[request.id] = life
        self._life_of.update(dict.fromkeys(life.courses, life))

    def end(self, request_id: RequestId) -> None:
        """Nobody waits for the request any more. One that did not begin is nobody's."""
        life = self._lives.pop(request_id, None)
        if life is None:
            return
        for seq_id in life.courses:
            self._life_of.pop(seq_id, None)
        if not self._lives:
            self._under_way.clear()  # whoever begins next has no part in them
        life.end(us(self._clock()))
        self._keep(life.request.tenant, self._whole(life))
        for relative in life.relatives():
            self._remember(relative)

    def explanation(self, request_id: RequestId) -> Explanation | None:
        """Of a request that asked for one: as far as it has come, or, of those that ended lately, the whole."""
        life = self._lives.get(request_id)
        if life is not None:
            life.settle(us(self._clock()))
            return self._whole(life)
        _, kept = self._kept.get(request_id, (None, None))
        return kept

    def find(self, name: str, tenant: str) -> Explanation | None:
        """Of the newest of the tenant's requests with that id or name that asked for one."""
        for life in reversed(self._lives.values()):
            if life.request.tenant == tenant and name in (life.request.id, life.request.name):
                return self.explanation(life.request.id)
        kept = (one for whose, one in reversed(self._kept.values()) if whose == tenant)
        return next((one for one in kept if name in (one.id, one.name)), None)

    # What happens. To be called only while `is_busy`.

    def planned(self, plan: StepPlan, now_s: float) -> None:
        """A plan was made."""
        with self._all_or_nothing():
            now_us, after_fault = us(now_s), self._after_fault
            parts = self._under_way[plan.step_id] = self._parts(plan)
            for life in self._lives.values():
                mine = parts.get(life, _NONE)
                life.planned(plan, mine, now_us, after_fault=after_fault)
                self._look_at_prefixes(life, mine)
            self._after_fault = False

    def landed(self, plan: StepPlan, took_s: float, now_s: float) -> None:
        """A step was taken in that landed at `now_s`, and had the device for so long."""
        with self._all_or_nothing():
            took_us, now_us = us(took_s), us(now_s)
            for life, mine in self._under_way.pop(plan.step_id, _NOBODY).items():
                life.landed(plan, mine, took_us, now_us)
            for life in self._lives.values():
                life.settle(now_us)  # a stop string, say, has ended it

    def taken_back(self) -> None:
        """The steps that are under way were undone."""
        with self._all_or_nothing():
            self._after_fault = True
            for parts in self._under_way.values():
                for life in parts:
                    life.failed()
            self._under_way.clear()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._lives.clear()
            self._life_of.clear()
            self._under_way.clear()
            raise

    def _parts(self, plan: StepPlan) -> _Parts:
        found: _Parts = {}
        for piece in plan.slices:
            if (life := self._life_of.get(piece.seq_id)) is not None:
                found.setdefault(life, {})[piece.seq_id] = piece
        return found

    def _look_at_prefixes(self, life: Life, mine: dict[SeqId, SeqSlice]) -> None:
        """Of those that have got their first row."""
        for seq_id, piece in mine.items():
            course = life.courses[seq_id]
            if course.prefix is None and course.sequence.state is State.RUNNING:
                args = self._readings, self._remembered, self._names
                course.prefix = prefix_of(course.sequence, piece.start, *args)

    def _whole(self, life: Life) -> Explanation:
        """It ends, once it is over, where it is first asked for."""
        kept = life.final
        if kept is None:
            kept = life.told(us(self._clock()))
            if life.is_over:
                life.final = kept
        return kept

    def _keep(self, tenant: str, explanation: Explanation) -> None:
        request_id = RequestId(explanation.id)
        self._kept.pop(request_id, None)
        self._kept[request_id] = (tenant, explanation)
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def _remember(self, relative: Relative) -> None:
        self._remembered.append(relative)
        self._num_remembered_tokens += len(relative.token_ids)
        while self._num_remembered_tokens > MAX_REMEMBERED_TOKENS or len(self._remembered) > MAX_KEPT:
            self._num_remembered_tokens -= len(self._remembered.popleft().token_ids)


def known_now(readings: Readings, names: Names, name: str, tenant: str, now_s: float) -> Explanation | None:
    """Of the newest of the tenant's requests with that id or name that has not ended, and asked for no explanation."""
    for sequence in reversed([*readings.sequences]):
        request = sequence.request
        if request.tenant == tenant and name in (request.id, request.name):
            model = model_of(names, request.adapter)
            return known_of(readings.of_request(request.id), us(now_s), time.time(), model)
    return None


def model_of(names: Names, adapter: AdapterId | None) -> str:
    """The adapter's name, or the model's."""
    name = None if adapter is None else names.adapter_names().get(adapter)
    return name or names.model_name
