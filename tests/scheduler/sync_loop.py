"""The engine loop without asyncio: the real scheduler over `FakeKV`, one call a verb, and the oracle beside it."""

from collections import deque
from dataclasses import dataclass, field

from aserve.core.ids import RequestId
from aserve.core.outputs import FinishReason, SeqDelta
from aserve.core.params import SamplingParams
from aserve.core.plan import StepPlan, StepResult
from aserve.core.request import Request
from aserve.scheduler.scheduler import MAX_IN_FLIGHT, Scheduler
from tests.fakes import FakeKV, continuation, seed_mark

LETTERS = range(3)
EOS = 2


def request(
    name: str,
    prompt: tuple[int, ...],
    max_tokens: int = 4,
    *,
    salt: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    arrival_s: float = 0.0,
) -> Request:
    """A request whose seed stands for its salt, so that `seed_mark` tells a block shared across salts."""
    return Request(
        id=RequestId(name),
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0.0, min_tokens=min(min_tokens, max_tokens)),
        max_tokens=max_tokens,
        seed=salt,
        cache_salt=bytes(salt),
        arrival_s=arrival_s,
        stop_ids=stop_ids,
        eos_ids=stop_ids & {EOS},
    )


@dataclass
class Answer:
    """What came out for a request. `ended`: the terminal delta, or None where it was cancelled, finished or failed."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    last: SeqDelta | None = None
    dropped: bool = False

    @property
    def is_open(self) -> bool:
        """Whether more tokens may come."""
        return not self.dropped and (self.last is None or self.last.finish_reason is None)


class SyncLoop:
    """Verbs in any order that the scheduler allows; `step` is the order of the engine loop.

    depth: 1 lands each step before the next is planned, 2 runs one step ahead. checked: check() after every move.
    """

    def __init__(self, *, depth: int = 2, checked: bool = True, **limits: float) -> None:
        self.block_size = int(limits.setdefault("block_size", 2))
        limits = {"num_blocks": 9, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 1000} | limits
        self.scheduler = Scheduler(**limits)  # type: ignore[arg-type]  # a mapping of mixed numbers
        self.context_len = min(limits["max_model_len"], (limits["num_blocks"] - 1) * limits["block_size"])
        self.plans: list[StepPlan] = []
        self.answers: dict[str, Answer] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self._kv = FakeKV(self.block_size, LETTERS, seed_mark)
        self.depth = depth
        self._checked = checked

    def add(self, wanted: Request) -> None:
        self.scheduler.add(wanted)
        self.answers[wanted.id] = Answer(wanted)
        self.check()

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(RequestId(name))
        if name in self.answers:
            self.answers[name].dropped |= self.answers[name].is_open
        self.check()

    def finish(self, name: str) -> None:
        self.scheduler.finish(RequestId(name))
        if name in self.answers:
            self.answers[name].dropped |= self.answers[name].is_open
        self.check()

    def plan(self) -> StepPlan | None:
        """Plan and launch."""
        plan = self.scheduler.plan(0.0)
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self._kv.run(plan)))
        self.check()
        return plan

    def commit(self) -> tuple[SeqDelta, ...]:
        """Land the oldest step."""
        _, result = self.in_flight.popleft()
        deltas = self.scheduler.commit(result)
        for delta in deltas:
            answer = self.answers[delta.request_id]
            assert answer.is_open, f"I19: {delta} after the end"
            answer.token_ids.extend(delta.token_ids)
            answer.last = delta
        self.check()
        return deltas

    def fail(self, index: int = 0) -> tuple[str, ...]:
        """Let the step in flight with that index raise; those behind it go down with it."""
        plan, _ = self.in_flight[index]
        doomed = {piece.seq_id for flying, _ in list(self.in_flight)[index:] for piece in flying.slices}
        failed = self.scheduler.fail(plan.step_id)
        assert len(failed) == len(set(failed)) <= len(doomed), "I19: a request fails once"
        for name in failed:
            assert self.answers[name].is_open, f"I19: {name} failed after its end"
            self.answers[name].dropped = True
        while len(self.in_flight) > index:
            fallen, _ = self.in_flight.pop()
            self._kv.spoil(fallen)
        self.check()
        return failed

    def step(self) -> bool:
        """As the engine loop: plan, then land the step before. False when there was nothing to do."""
        plan = self.plan() if len(self.in_flight) < MAX_IN_FLIGHT else None
        if self.in_flight and (plan is None or len(self.in_flight) >= self.depth):
            self.commit()
            return True
        return plan is not None

    def drain(self) -> None:
        """Run until nothing is left; the bound is I15's: every token computed alone, and again at each preemption."""
        num_tokens = sum(len(a.request.prompt_token_ids) + a.request.max_tokens for a in self.answers.values())
        for _ in range(10 + 4 * num_tokens * (1 + len(self.answers))):
            if not self.step():
                break
        else:
            raise AssertionError(f"I15: not done: {self.scheduler.statistics()}")
        counts = self.scheduler.statistics()
        assert counts.num_used_blocks == counts.num_running == counts.num_waiting == 0, f"I12: {counts}"
        assert not any(answer.is_open for answer in self.answers.values()), "I19: a request without an end"

    def check(self) -> None:
        if self._checked:
            self.scheduler.check()

    def compare(self) -> None:
        """Assert that every answer is the oracle's (I21), or, where it was cut short, a beginning of it."""
        for name, answer in self.answers.items():
            expected = self.expected(answer.request)
            if answer.dropped:
                expected = expected[: len(answer.token_ids)]
            if not answer.is_open:
                assert answer.token_ids == expected, f"I21: {name}: {answer.token_ids}, not {expected}"
            if answer.last is not None and answer.last.finish_reason is not None:
                stopped = expected[-1] in answer.request.stop_ids
                assert answer.last.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH), name

    def expected(self, wanted: Request) -> list[int]:
        """What the request yields when it is alone in the world."""
        return continuation(
            wanted.prompt_token_ids,
            min(wanted.max_tokens, int(self.context_len) - len(wanted.prompt_token_ids)),
            vocabulary=LETTERS,
            mark=wanted.seed,
            stop_ids=wanted.stop_ids,
            min_tokens=wanted.params.min_tokens,
        )
