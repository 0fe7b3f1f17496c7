"""The engine loop without asyncio: the real scheduler over `FakeKV`, one call a verb, and the oracle beside it."""

import random
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from aserve.core.ids import AdapterId, BlockId, RequestId, Row, SeqId
from aserve.core.layout import Window
from aserve.core.outputs import DEADLINE, FinishReason, SeqDelta
from aserve.core.params import SamplingParams
from aserve.core.plan import RowInit, SeqSlice, StepPlan, StepResult, TokenScores
from aserve.core.request import Request
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduler.step_cost import DECODES_PER_LOOK
from tests.fakes import AllowedAfter, FakeKV, FakeStructure, Foreseer, continuation, deltas_of, scores_of, seen_by
from tests.scheduler.reference_beams import reference_beam_search

LETTERS = range(3)
EOS = 2
SEEDS_OF_A_SALT = 1000
STEP_S, TOKEN_S = 0.01, 0.001


def mark_of_row(init: RowInit) -> int:
    """The salt, which the seeds of a request tell, and the adapter: a block shared across either changes the token."""
    return init.sampling.columns.seed // SEEDS_OF_A_SALT + 10 * (init.adapter or 0)


def mark_of(wanted: Request) -> int:
    """The same, as a request tells it."""
    return wanted.seed // SEEDS_OF_A_SALT + 10 * (wanted.adapter or 0)


def request(
    name: str,
    prompt: tuple[int, ...],
    max_tokens: int = 4,
    *,
    salt: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    arrival_s: float = 0.0,
    priority: int = 0,
    seed: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    deadline_s: float | None = None,
    adapter: int | None = None,
    allowed_after: AllowedAfter | None = None,
    **params: object,
) -> Request:
    """A greedy request unless `params` (of SamplingParams) say otherwise. Its seed tells its salt, see `mark_of`.

    allowed_after: what its constraint is made of.
    """
    params = {"temperature": 0.0, "min_tokens": min(min_tokens, max_tokens)} | params
    return Request(
        id=RequestId(name),
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]  # a mapping of mixed fields
        max_tokens=max_tokens,
        seed=salt * SEEDS_OF_A_SALT + seed,
        cache_salt=bytes(salt),
        arrival_s=arrival_s,
        stop_ids=stop_ids,
        eos_ids=stop_ids & {EOS},
        priority=priority,
        tenant=tenant,
        weight=weight,
        deadline_s=deadline_s,
        structure=None if allowed_after is None else FakeStructure(allowed_after),
        adapter=None if adapter is None else AdapterId(adapter),
    )


def two_of_three(said: Sequence[int]) -> Collection[int]:
    """Each token of the answer changes which letter may not follow."""
    return set(LETTERS) - {(2 * sum(said) + len(said)) % 3}


@dataclass
class Choice:
    """What came out for a choice. last: its newest delta. dropped: it was cancelled, finished or failed."""

    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)
    prompt_scores: list[TokenScores] = field(default_factory=list)
    last: SeqDelta | None = None
    dropped: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether its terminal delta has come."""
        return self.last is not None and self.last.finish_reason is not None

    @property
    def is_cut(self) -> bool:
        """Whether its time was up."""
        return self.last is not None and self.last.stop_reason == DEADLINE

    @property
    def is_open(self) -> bool:
        """Whether more tokens may come."""
        return not self.dropped and not self.has_ended


@dataclass
class Answer:
    """What came out for a request. Of its first choice, where it has one."""

    request: Request
    choices: list[Choice]
    is_cut: bool = False
    """Whether its time was up before it had ended."""

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def last(self) -> SeqDelta | None:
        return self.choices[0].last

    @property
    def is_open(self) -> bool:
        return any(choice.is_open for choice in self.choices)

    @property
    def dropped(self) -> bool:
        return any(choice.dropped for choice in self.choices)

    def drop(self) -> None:
        for choice in self.choices:
            choice.dropped |= choice.is_open


class Guesser(Foreseer):
    """A `Proposer` that guesses letters, of which one in three is right. known: sequences that have not ended."""

    most = 4

    def __init__(self) -> None:
        self.known: set[SeqId] = set()

    def propose(self, seq_id: SeqId, token_ids: Iterable[int], most: int) -> tuple[int, ...]:
        """A function of the tokens alone, so that equal calls give equal plans."""
        self.known.add(seq_id)
        rng = random.Random(repr(tuple(token_ids)))
        return tuple(rng.choices(LETTERS, k=rng.randint(0, most)))

    def forget(self, seq_id: SeqId) -> None:
        self.known.discard(seq_id)


class SyncLoop:
    """Verbs in any order that the scheduler allows; `step` is the order of the engine loop.

    depth: 1 lands each step before the next is planned, 2 runs one step ahead, 4 three, or with windows one all the
    same. checked: check() after every move. Where `target_itl_s` is among the limits, what steps take is known already:
    `STEP_S`, and `TOKEN_S` for each token.
    """

    def __init__(self, *, depth: int = 2, checked: bool = True, **limits: object) -> None:
        limits = {
            "block_size": 2,
            "num_blocks": 9,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 8,
            "max_model_len": 1000,
        } | limits
        self.depth = min(depth, 2) if any(limits.get("windows", ())) else depth  # type: ignore[call-overload]
        self.limits = limits
        self.block_size = int(limits["block_size"])  # type: ignore[call-overload]
        self.scheduler = Scheduler(**limits, max_in_flight=max(self.depth, 2))  # type: ignore[arg-type]  # a mapping of mixed numbers
        for _ in range(DECODES_PER_LOOK):
            for num_tokens in (1, 8, 1):
                known = SeqSlice(SeqId(0), Row(0), 0, num_tokens, (0,) * num_tokens)
                self.scheduler.step_cost.landed((known,), STEP_S + num_tokens * TOKEN_S)
        self.context_len = self.scheduler._admission.context_len
        self.plans: list[StepPlan] = []
        self.answers: dict[str, Answer] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.windows: tuple[Window, ...] = tuple(limits.get("windows", (None,)))  # type: ignore[arg-type]
        small = FakeKV(self.block_size, LETTERS)
        self._kv = FakeKV(self.block_size, LETTERS, mark_of_row, seeded=True, windows=self.windows, draft_model=small)
        self._checked = checked
        self.now = 0.0
        self.num_failures = 0
        self._unclean: set[BlockId] = set()
        """Blocks of who made a step fail, which have to be scrubbed before the next step."""

    def add(self, wanted: Request) -> None:
        self.scheduler.add(wanted)
        self._listen(wanted)

    def fork(self, name: str, index: int, branches: Iterable[Request]) -> list[Request]:
        """Branch a choice; the branches' own prompts are replaced by what it has come to."""
        history = self.scheduler.history(RequestId(name), index)
        adapter = self.answers[name].request.adapter
        made = [msgspec.structs.replace(branch, prompt_token_ids=history, adapter=adapter) for branch in branches]
        self.scheduler.fork(RequestId(name), index, made)
        for branch in made:
            self._listen(branch)
        return made

    def _listen(self, wanted: Request) -> None:
        self.answers[wanted.id] = Answer(wanted, [Choice() for _ in range(wanted.params.n)])
        self.check()

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(RequestId(name))
        if name in self.answers:
            self.answers[name].drop()
        self.check()

    def finish(self, name: str, index: int = 0) -> None:
        self.scheduler.finish(RequestId(name), index)
        if name in self.answers and index < len(self.answers[name].choices) and not is_held_back(self.answers[name]):
            choice = self.answers[name].choices[index]
            choice.dropped |= choice.is_open
        self.check()

    def expire(self) -> tuple[str, ...]:
        """End what is over its deadline. Returns those who were not served."""
        expired = self.scheduler.expire(self.now)
        if expired is None:
            return ()
        self._take(expired.deltas)
        for delta in expired.deltas:
            self.answers[delta.request_id].is_cut = True
        for name in expired.unserved:
            assert not any(choice.token_ids for choice in self.answers[name].choices), f"{name} was served"
            self.answers[name].drop()
        self.check()
        return expired.unserved

    @property
    def may_plan(self) -> bool:
        """Whether the loop has no more steps in flight than it wants, and the scheduler lets it."""
        return len(self.in_flight) < min(self.depth, self.scheduler.max_in_flight)

    def plan(self) -> StepPlan | None:
        """End what is over its deadline, plan and launch."""
        self.expire()
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self._unclean -= set(plan.block_ops.scrubs if plan.block_ops else ())
            assert not self._unclean, f"I6: not scrubbed: {self._unclean}"
            self.plans.append(plan)
            self.in_flight.append((plan, self._kv.run(plan)))
            self._poison_what_is_free()
        self.check()
        return plan

    def _poison_what_is_free(self) -> None:
        """Whoever reads what nobody holds and nobody can find reads nothing. (Before a plan, moves may be due.)"""
        pool = self.scheduler._cache._pool
        self._kv.poison(block_id for block_id in pool._free if pool.hash_of(block_id) is None)

    def commit(self) -> list[SeqDelta]:
        """Land the oldest step."""
        plan, result = self.in_flight.popleft()
        deltas = deltas_of(self.scheduler.commit(result, STEP_S + plan.num_tokens * TOKEN_S))
        self._take(deltas)
        self.check()
        return deltas

    def _take(self, deltas: Iterable[SeqDelta]) -> None:
        """What readers would."""
        for delta in deltas:
            choice = self.answers[delta.request_id].choices[delta.index]
            assert choice.is_open, f"I19: {delta} after the end"
            choice.token_ids.extend(delta.token_ids)
            choice.scores.extend(delta.scores)
            choice.prompt_scores.extend(delta.prompt_scores)
            choice.last = delta

    def fail(self, index: int = 0, *, out_of_memory: bool = False) -> str | None:
        """Let the step in flight with that index raise; those behind it go down with it. Returns who was to blame."""
        for _ in range(index):
            self.commit()
        plan, _ = self.in_flight[0]
        written = {name: self._written(name) for name in self.answers}
        culprit = self.scheduler.revert(plan.step_id, out_of_memory=out_of_memory)
        for fallen, _ in self.in_flight:
            self._unclean.update(fallen.block_ops.scrubs if fallen.block_ops else ())
        if culprit is not None:
            self._unclean |= {
                block_id for block_id in written[culprit] if not self.scheduler._cache._pool.refs(block_id)
            }
            answer = self.answers[culprit]
            assert answer.is_open or answer.dropped or answer.is_cut, f"I19: {culprit} failed after its end"
            answer.drop()
        while self.in_flight:
            fallen, _ = self.in_flight.pop()
            self._kv.spoil(fallen)
        self.num_failures += 1
        self.check()
        return culprit

    def _written(self, name: str) -> set[BlockId]:
        """Blocks that a request has computed something in, and not found in the prefix cache."""
        return {
            block_id
            for sequence in self.scheduler._roster.requests.get(RequestId(name), ())
            for block_id in sequence.table.block_ids[-(-sequence.num_cached // self.block_size) * len(self.windows) :]
            if block_id
        }

    def step(self) -> bool:
        """As the engine loop: plan, then land the step before. False when there was nothing to do."""
        plan = self.plan() if len(self.in_flight) < self.scheduler.max_in_flight else None
        if self.in_flight and (plan is None or not self.may_plan):
            self.commit()
            return True
        return plan is not None

    def drain(self) -> None:
        """Run until nothing is left; the bound is I15's: every token computed alone, and again at each preemption."""
        num_tokens = sum(
            (len(answer.request.prompt_token_ids) + answer.request.max_tokens) * num_sequences(answer.request)
            for answer in self.answers.values()
        )
        for _ in range(10 + 4 * num_tokens * (1 + len(self.answers) + self.num_failures)):
            if not self.step():
                break
        else:
            raise AssertionError(f"I15: not done: {self.scheduler.statistics()}")
        counts = self.scheduler.statistics()
        assert counts.num_used_blocks == counts.num_running == counts.num_waiting == counts.num_swapped == 0, (
            f"I12: {counts}"
        )
        assert counts.num_host_used_blocks == 0, f"I12: {counts}"
        assert not any(answer.is_open for answer in self.answers.values()), "I19: a request without an end"

    def check(self) -> None:
        if self._checked:
            self.scheduler.check()

    # The oracle.

    def compare(self) -> None:
        """Assert that every answer is the oracle's (I21), or, where it was cut short, a beginning of it."""
        for name, answer in self.answers.items():
            if is_held_back(answer):
                self._compare_ranked(name, answer)
                continue
            for index, choice in enumerate(answer.choices):
                self._compare_choice(f"{name}[{index}]", answer.request, choice, self.expected(answer.request, index))

    def _compare_choice(self, name: str, wanted: Request, choice: Choice, expected: list[int]) -> None:
        whole = expected
        if choice.dropped or choice.is_cut:
            expected = expected[: len(choice.token_ids)]
        if not choice.is_open:
            assert choice.token_ids == expected, f"I21: {name}: {choice.token_ids}, not {expected}"
        if choice.has_ended and not choice.is_cut:
            self._compare_end(name, wanted, choice, whole[-1])
        if wanted.params.logprobs is not None:
            assert choice.scores == self.scores(wanted, choice.token_ids, wanted.params.logprobs), (
                f"I21: {name}: scores"
            )
        is_first = choice is self.answers[wanted.id].choices[0]
        if wanted.params.prompt_logprobs is not None and is_first and choice.token_ids:
            self._compare_prompt_scores(name, wanted, choice)

    def _compare_end(self, name: str, wanted: Request, choice: Choice, last_token: int) -> None:
        stopped = last_token in wanted.stop_ids
        assert choice.last is not None
        assert choice.last.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH), name

    def _compare_prompt_scores(self, name: str, wanted: Request, choice: Choice) -> None:
        prompt, num_top = wanted.prompt_token_ids, wanted.params.prompt_logprobs
        assert num_top is not None
        salted = [(position, token, mark_of(wanted)) for position, token in enumerate(prompt)]
        expected = [
            scores_of(seen_by(salted[:end], self.windows), LETTERS, prompt[end], num_top)
            for end in range(1, len(prompt))
        ]
        assert choice.prompt_scores == expected, f"I21: {name}: prompt scores"

    def _compare_ranked(self, name: str, answer: Answer) -> None:
        """best_of and beams: all or nothing."""
        if answer.dropped:
            assert not any(choice.token_ids for choice in answer.choices), f"I21: {name}: came out too early"
            return
        if answer.is_cut:
            return  # the best of what there was, which is told in test_deadlines.py
        wanted = answer.request
        expected = self._expected_beams(wanted) if wanted.params.beam is not None else self._expected_best(wanted)
        for choice, (token_ids, logprob) in zip(answer.choices, expected, strict=True):
            assert choice.token_ids == token_ids, f"I21: {name}: {choice.token_ids}, not {token_ids}"
            assert choice.last is not None
            assert choice.last.cumulative_logprob is not None
            assert abs(choice.last.cumulative_logprob - logprob) < 1e-9, f"I21: {name}: {logprob}"
            self._compare_end(name, wanted, choice, token_ids[-1])

    def _expected_best(self, wanted: Request) -> list[tuple[list[int], float]]:
        runs = []
        for index in range(wanted.params.num_sequences):
            token_ids = self.expected(wanted, index)
            runs.append((token_ids, sum(score.logprob for score in self.scores(wanted, token_ids, 0))))
        return sorted(runs, key=lambda run: -run[1])[: wanted.params.n]

    def _expected_beams(self, wanted: Request) -> list[tuple[list[int], float]]:
        assert wanted.params.beam is not None
        context_len = self.scheduler._admission.context_len_for(wanted)
        return reference_beam_search(
            wanted.prompt_token_ids,
            wanted.params.beam,
            num_returned=wanted.params.n,
            max_tokens=min(wanted.max_tokens, context_len - len(wanted.prompt_token_ids)),
            stop_ids=wanted.stop_ids,
            min_tokens=wanted.params.min_tokens,
            vocabulary=LETTERS,
            mark=mark_of(wanted),
            windows=self.windows,
        )

    def expected(self, wanted: Request, index: int = 0) -> list[int]:
        """What a choice of the request yields when it is alone in the world."""
        return continuation(
            wanted.prompt_token_ids,
            min(wanted.max_tokens, self.context_len - len(wanted.prompt_token_ids)),
            vocabulary=LETTERS,
            mark=mark_of(wanted),
            stop_ids=wanted.stop_ids,
            min_tokens=wanted.params.min_tokens,
            seed=0 if wanted.params.is_greedy else wanted.seed + index,
            windows=self.windows,
            allowed_after=None if wanted.structure is None else two_of_three,
        )

    def scores(self, wanted: Request, token_ids: list[int], num_top: int) -> list[TokenScores]:
        """Those of an answer's tokens."""
        mark = mark_of(wanted)
        context = [(at, token, mark) for at, token in enumerate((*wanted.prompt_token_ids, *token_ids))]
        start = len(wanted.prompt_token_ids)
        return [
            scores_of(seen_by(context[: start + i], self.windows), LETTERS, token, num_top)
            for i, token in enumerate(token_ids)
        ]


def is_held_back(answer: Answer) -> bool:
    """Whether nothing comes out before the end."""
    params = answer.request.params
    return params.beam is not None or params.num_sequences > params.n


def num_sequences(wanted: Request) -> int:
    """Sequences that run for a request."""
    return wanted.params.num_sequences if wanted.params.beam is None else wanted.params.beam.width
