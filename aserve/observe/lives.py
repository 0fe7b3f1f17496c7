"""Lives: what becomes of the requests that asked for an explanation, step by step; what an `Explanation` is made of.

    _Course (a sequence)   queued -> prefill -> decode -> preempted -> recompute -> decode -> publish
    Life (its request)     prepare, then the phase of whichever of its courses is furthest, then publish

Told of plans and of what has landed, in whole microseconds of the engine's clock. Changes nothing that it looks at.
"""

from typing import Final

from aserve.core.explanation import PHASES, Chunk, Course, Explanation, Held, Preemption, Prefix, Queued, Steps
from aserve.core.ids import SeqId
from aserve.core.plan import SeqSlice, StepPlan
from aserve.core.request import Request
from aserve.observe.prefixes import Relative
from aserve.scheduler.readings import Readings
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.states import State

MAX_CHUNKS: Final = 128
MAX_PREEMPTIONS: Final = 64
"""Of a sequence, that are told one by one."""

OVER: Final = "publish"
_FURTHEST: Final = ("decode", "prefill", "recompute", "preempted", "queued", OVER)
_NO_PLAN_YET: Final = "step"


class _Loss:
    """A preemption, as it goes on."""

    def __init__(self, at_us: int, because: str, reached: int, num_blocks_out: int) -> None:
        self.at_us = at_us
        self.because = because
        self.reached = reached
        self.kind = "swap" if num_blocks_out else "recompute"
        self.num_out, self.num_in = num_blocks_out, 0
        self.num_again = 0
        self.back_us: int | None = None
        self.over_us: int | None = None

    def told(self, came_us: int, now_us: int) -> Preemption:
        """What it has cost so far."""
        back_us = now_us if self.back_us is None else self.back_us
        waited_us, again_us = back_us - self.at_us, (now_us if self.over_us is None else self.over_us) - back_us
        return Preemption(
            at_ms=ms(self.at_us - came_us),
            kind=self.kind,  # type: ignore[arg-type]  # one of the two
            because=self.because,  # type: ignore[arg-type]  # likewise
            computed_tokens=self.reached,
            blocks_out=self.num_out,
            blocks_in=self.num_in,
            recomputed_tokens=self.num_again,
            waited_ms=ms(waited_us),
            recompute_ms=ms(again_us),
            lost_ms=ms(waited_us + again_us),
        )


class _Course:
    """One sequence. reached: where its newest slice ends. num_landed: of its tokens, that were computed. prefix: known
    from its first row on."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.phase = "queued"
        self.prefix: Prefix | None = None
        self.reached = self.num_landed = 0
        self._num_preemptions = sequence.num_preemptions
        self._losses: list[_Loss] = []
        self._num_losses = self._num_chunks = 0
        self._chunks: list[Chunk] = []

    def planned(self, piece: SeqSlice | None, plan: StepPlan, now_us: int, *, after_fault: bool) -> None:
        """A plan was made, in which it has that slice."""
        sequence = self.sequence
        if sequence.num_preemptions != self._num_preemptions:
            self._num_preemptions = sequence.num_preemptions
            self._lost(now_us, "failed_step" if after_fault else "memory")
        elif self.phase == "preempted" and sequence.state is State.WAITING:
            self._losses[-1].kind = "recompute"  # if it was swapped out, its copy is lost
        if piece is None:
            return
        if self.phase == "queued":
            self.phase = "prefill"
        elif self.phase == "preempted":
            self._back(piece, plan, now_us)
        self.reached = piece.start + piece.num_tokens

    def _lost(self, now_us: int, because: str) -> None:
        """It has no row any more."""
        num_out = sum(block is not None for block in self.sequence.table.host_ids)
        self._num_losses += 1
        del self._losses[MAX_PREEMPTIONS - 1 :]  # of those that are not told, the newest alone is needed
        self._losses.append(_Loss(now_us, because, self.reached, num_out))
        self.phase = "preempted"

    def _back(self, piece: SeqSlice, plan: StepPlan, now_us: int) -> None:
        """It has a row again."""
        loss = self._losses[-1]
        loss.back_us = now_us
        loss.num_again = max(0, loss.reached - piece.start)
        if plan.block_ops is not None:
            own = set(self.sequence.table.block_ids)
            loss.num_in = sum(block in own for _, block in plan.block_ops.swap_ins)
        if loss.num_again:
            self.phase = "recompute"
        else:  # it goes on where it was
            self._go_on(now_us)

    def _go_on(self, now_us: int) -> None:
        self._losses[-1].over_us = now_us
        self.phase = "decode" if len(self.sequence.token_ids) > self.sequence.num_prompt else "prefill"

    def landed(self, step_id: int, piece: SeqSlice, took_us: int, now_us: int) -> None:
        """What a slice computed is there."""
        end = piece.start + piece.num_tokens
        self.num_landed = max(self.num_landed, end)
        if piece.start < self.sequence.num_prompt or (piece.num_tokens > 1 and piece.num_samples <= 1):
            self._num_chunks += 1
            if len(self._chunks) < MAX_CHUNKS:
                again = self.phase == "recompute"
                self._chunks.append(Chunk(step_id, piece.start, piece.num_tokens, ms(took_us), again))
        if self.phase == "recompute" and (piece.num_samples or end >= self._losses[-1].reached):
            self._go_on(now_us)
        elif self.phase == "prefill" and piece.num_samples:
            self.phase = "decode"

    def told(self, came_us: int, now_us: int) -> Course:
        """All of it, so far."""
        sequence = self.sequence
        return Course(
            index=sequence.index,
            state=sequence.state.value,
            tokens=len(sequence.token_ids) - sequence.num_prompt,
            prefix=self.prefix,
            num_chunks=self._num_chunks,
            chunks=tuple(self._chunks),
            num_preemptions=self._num_losses,
            preemptions=tuple(loss.told(came_us, now_us) for loss in self._losses),
        )


class Life:
    """One request, from now on. unix_s: the time of day now. model: what answers it. final: its explanation, once that
    was asked for after all was computed: it ended then."""

    def __init__(self, request: Request, readings: Readings, now_us: int, unix_s: float, model: str) -> None:
        self.request = request
        self.final: Explanation | None = None
        self._readings = readings
        self._came_us = us(request.arrival_s - request.spent_s)
        self._arrived = unix_s - (now_us - self._came_us) / 1e6
        self._model = model
        self._phase, self._since_us = "prepare", self._came_us
        self._spent_us = dict.fromkeys(PHASES, 0)
        self._hold = _NO_PLAN_YET
        self._holds: dict[str, list[int]] = {_NO_PLAN_YET: [0, 0]}
        sequences = readings.of_request(request.id)
        self.courses = {sequence.id: _Course(sequence) for sequence in sequences}
        num_waiting = readings.num_waiting - len(sequences)
        num_ahead = readings.num_ahead(sequences[0]) if sequences else 0
        self._found = num_waiting, num_ahead, readings.num_running, readings.num_swapped
        self._num_steps = self._num_failed = 0
        self._share_us = 0.0
        self._steps_us = 0
        self._enter("queued", now_us)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is computed for it."""
        return self._phase == OVER

    def planned(self, plan: StepPlan, mine: dict[SeqId, SeqSlice], now_us: int, *, after_fault: bool) -> None:
        """A plan was made, with those slices of its sequences."""
        for seq_id, course in self.courses.items():
            course.planned(mine.get(seq_id), plan, now_us, after_fault=after_fault)
        self.settle(now_us)
        if self._phase == "queued":
            hold = self._readings.hold
            self._hold = _NO_PLAN_YET if hold is None else hold.value
            self._holds.setdefault(self._hold, [0, 0])[1] += 1

    def landed(self, plan: StepPlan, mine: dict[SeqId, SeqSlice], took_us: int, now_us: int) -> None:
        """A step has landed, with those slices of its sequences; to be settled behind it."""
        num_tokens = 0
        for seq_id, piece in mine.items():
            self.courses[seq_id].landed(plan.step_id, piece, took_us, now_us)
            num_tokens += piece.num_tokens
        self._num_steps += 1
        self._steps_us += took_us
        self._share_us += took_us * num_tokens / plan.num_tokens

    def failed(self) -> None:
        """A step in which it had a part was undone."""
        self._num_failed += 1

    def settle(self, now_us: int) -> None:
        """Which phase it is in."""
        if self.is_over:
            return
        phases = {OVER if c.sequence.state is State.FINISHED else c.phase for c in self.courses.values()}
        phase = OVER
        for phase in _FURTHEST:
            if phase in phases:
                break
        if phase != self._phase or phase == "queued":  # then what it waits for may be another thing from now on
            self._enter(phase, now_us)

    def end(self, now_us: int) -> None:
        """Nothing more is computed for it."""
        self.settle(now_us)
        if not self.is_over:
            self._enter(OVER, now_us)

    def _enter(self, phase: str, now_us: int) -> None:
        """From now on it is in that phase, and was in the last until now."""
        now_us = max(now_us, self._since_us)
        past_us = now_us - self._since_us
        self._spent_us[self._phase] += past_us
        if self._phase == "queued":
            self._holds[self._hold][0] += past_us
        self._phase, self._since_us = phase, now_us

    def relatives(self) -> list[Relative]:
        """Its sequences, for later prompts to be compared with."""
        return [Relative.of(course.sequence, course.num_landed) for course in self.courses.values()]

    def told(self, now_us: int) -> Explanation:
        """All that is known by now, which is then the end of the newest phase."""
        self._enter(self._phase, now_us)
        now_us, request = self._since_us, self.request
        is_waiting = not self.is_over and all(c.sequence.state is State.WAITING for c in self.courses.values())
        holds = tuple(Held(reason, ms(past_us), num) for reason, (past_us, num) in self._holds.items())
        return Explanation(
            id=request.id,
            name=request.name,
            model=self._model,
            state="ended" if self.is_over else "waiting" if is_waiting else "running",
            explained=True,
            arrived=round(self._arrived, 6),
            total_ms=ms(now_us - self._came_us),
            phases_ms={phase: ms(past_us) for phase, past_us in self._spent_us.items()},
            prompt_tokens=len(request.prompt_token_ids),
            queue=Queued(*self._found, holds),
            steps=Steps(self._num_steps, self._num_failed, ms(self._share_us), ms(self._steps_us)),
            choices=tuple(course.told(self._came_us, now_us) for course in self.courses.values()),
        )


def known_of(sequences: list[Sequence], now_us: int, unix_s: float, model: str) -> Explanation:
    """What is known of a request that asked for no explanation, and has not ended. sequences: its own."""
    first = sequences[0]
    request, is_waiting = first.request, all(one.state is State.WAITING for one in sequences)
    came_us = us(request.arrival_s)
    total_us = max(0, now_us - came_us)
    is_new = is_waiting and not any(one.num_preemptions for one in sequences)
    queued_us = total_us if is_new else min(us(first.queued_s), total_us)
    return Explanation(
        id=request.id,
        name=request.name,
        model=model,
        state="waiting" if is_waiting else "running",
        explained=False,
        arrived=round(unix_s - total_us / 1e6, 6),
        total_ms=ms(total_us),
        phases_ms={"queued": ms(queued_us), "running": ms(total_us - queued_us)},
        prompt_tokens=first.num_prompt,
        queue=None,
        steps=None,
        choices=tuple(map(_bare, sequences)),
    )


def _bare(sequence: Sequence) -> Course:
    """Of which nothing was noted. What was found in the cache is not told: there is no saying why it was no more."""
    num_tokens = len(sequence.token_ids) - sequence.num_prompt
    return Course(sequence.index, sequence.state.value, num_tokens, None, 0, (), sequence.num_preemptions, ())


def us(seconds: float) -> int:
    """In whole microseconds."""
    return round(seconds * 1e6)


def ms(microseconds: float) -> float:
    """In milliseconds, to the microsecond."""
    return round(microseconds / 1e3, 3)
