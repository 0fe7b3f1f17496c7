"""Small real programs that stand where a seam is: a runner without a model, a clock without time. No torch.

`FakeKV` is what makes the runner worth its name. It keeps tokens where a model keeps keys and values, block by block,
and derives the next token from all that it reads through the row's block table. A wrong, stale, evicted or overwritten
block therefore changes the token that comes out, as it would with a model, and `continuation` says which was right.
It scores tokens too, by a function of the same context; what is sampled does not depend on that.
"""

import asyncio
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import exp, log

import msgspec

from aserve.core.ids import BlockId, HostBlockId, Row, SeqId
from aserve.core.layout import Window
from aserve.core.outputs import SeqDelta, StepTokens
from aserve.core.plan import (
    TO_COME,
    BlockOps,
    RowInit,
    RowSampling,
    SeqSlice,
    StepPlan,
    StepResult,
    TokenMask,
    TokenScores,
)

BYTE_TOKENS = range(256, 512)
"""Ids that a tokenizer of bytes and merges has, and that spell no single byte."""

NO_TOKEN = -1

Mark = Callable[[RowInit], int]
"""Something of a row that its keys and values depend on besides the tokens."""


def no_mark(_init: RowInit) -> int:
    """Keys and values depend on tokens and positions alone, as those of a model do."""
    return 0


Context = Sequence[tuple[int, int, int]]
"""What a token is made from: (position, token, mark) of all before it."""


def seen_by(context: Context, windows: Sequence[Window]) -> Context:
    """What layers with these windows see of a context: one group after the other."""
    if tuple(windows) == (None,):
        return context
    return [entry for window in windows for entry in (context if window is None else context[-window:])]


def next_token(
    context: Context,
    vocabulary: Sequence[int],
    banned_ids: Iterable[int] = (),
    seed: int = 0,
    mask: Collection[int] | None = None,
) -> int:
    """The fake model: a token from all that it attends to, of those that a mask leaves. Seed 0 is greedy.

    Never a banned one, unless the mask leaves no other. NO_TOKEN where the mask leaves nothing.
    """
    digest = zlib.crc32(repr(context).encode(), seed)
    allowed = vocabulary if mask is None else [token_id for token_id in vocabulary if token_id in mask]
    if not allowed:
        return NO_TOKEN
    if banned_ids:
        allowed = [token_id for token_id in allowed if token_id not in banned_ids] or allowed
    return allowed[digest % len(allowed)]


AllowedAfter = Callable[[Sequence[int]], Collection[int]]
"""The tokens that may follow those of an answer."""


class FakeConstraint:
    """A `Constraint` that is a function of the answer. Says so where it is told of a token that it did not allow.

    What is forced is what is left of one token, again and again, up to three: a run of letters that a grammar spells.
    """

    def __init__(self, allowed_after: AllowedAfter, said: Sequence[int] = ()) -> None:
        self._allowed_after = allowed_after
        self._num_before = len(said)
        self._said = list(said)

    @property
    def num_tokens(self) -> int:
        return len(self._said) - self._num_before

    @property
    def failure(self) -> str | None:
        return None if self._allowed_after(self._said) else "nothing is allowed"

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert token_id in self._allowed_after(self._said), f"{token_id} after {self._said}"
            self._said.append(token_id)

    def masks(self, draft_ids: Sequence[int] = ()) -> bytes:
        valid = self.num_valid(draft_ids)
        masks = [self._mask([*self._said, *draft_ids[:k]] if k <= valid else None) for k in range(len(draft_ids) + 1)]
        return b"".join(masks)

    def forced(self) -> tuple[int, ...]:
        forced: list[int] = []
        while len(forced) < 3 and len(allowed := tuple(self._allowed_after([*self._said, *forced]))) == 1:
            forced += allowed
        return tuple(forced)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        for num, token_id in enumerate(token_ids):
            if token_id not in self._allowed_after([*self._said, *token_ids[:num]]):
                return num
        return len(token_ids)

    def _mask(self, said: Sequence[int] | None) -> bytes:
        bits = 0 if said is None else sum(1 << token_id for token_id in self._allowed_after(said))
        return bits.to_bytes(BYTE_TOKENS.stop // 8, "little")


class FakeStructure:
    """A `Structure` of such constraints."""

    def __init__(self, allowed_after: AllowedAfter, said: Sequence[int] = ()) -> None:
        self._allowed_after = allowed_after
        self._said = tuple(said)

    def constraint(self) -> FakeConstraint:
        return FakeConstraint(self._allowed_after, self._said)

    def after(self, token_ids: Sequence[int]) -> "FakeStructure":
        return FakeStructure(self._allowed_after, (*self._said, *token_ids))

    def going_on(self, *, ignores_end: bool) -> "FakeStructure":
        del ignores_end  # what is allowed is a function of the answer
        return self


def ids_of(mask: bytes) -> set[int]:
    """The tokens that a mask leaves."""
    return {byte * 8 + bit for byte, bits in enumerate(mask) for bit in range(8) if bits >> bit & 1}


def masks_of(mask: TokenMask, draft_ids: Sequence[int]) -> list[set[int]]:
    """The tokens that each of its masks leaves."""
    masks = mask.masks(draft_ids)
    num_bytes = len(masks) // (len(draft_ids) + 1)
    return [ids_of(masks[first : first + num_bytes]) for first in range(0, len(masks), num_bytes)]


def scores_of(
    context: Context, vocabulary: range, token_id: int, num_top: int, named_ids: Sequence[int] = ()
) -> TokenScores:
    """How likely the fake model finds a token after that context, and the likeliest, or those that are named."""
    parent = zlib.crc32(repr(context).encode())
    weights = {other: exp(zlib.crc32(str(other).encode(), parent) % 4096 / 1024) for other in vocabulary}
    total = sum(weights.values())
    order = sorted(vocabulary, key=lambda other: -weights[other])
    logprobs = {other: log(weights[other] / total) for other in order}
    top_ids = tuple(named_ids or order[:num_top])
    rank = sum(weights[other] >= weights[token_id] for other in vocabulary)
    return TokenScores(token_id, logprobs[token_id], rank, top_ids, tuple(logprobs[other] for other in top_ids))


def continuation(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    *,
    vocabulary: range = BYTE_TOKENS,
    mark: int = 0,
    stop_ids: Iterable[int] = (),
    min_tokens: int = 0,
    seed: int = 0,
    windows: Sequence[Window] = (None,),
    allowed_after: AllowedAfter | None = None,
) -> list[int]:
    """The oracle: what `ScriptedRunner` must generate, from the tokens alone; an ending token is the last."""
    context = [(position, token_id, mark) for position, token_id in enumerate(prompt_token_ids)]
    generated: list[int] = []
    while len(generated) < num_tokens and not (generated and generated[-1] in stop_ids):
        banned_ids = stop_ids if len(generated) < min_tokens else ()
        mask = None if allowed_after is None else allowed_after(generated)
        token_id = next_token(seen_by(context, windows), vocabulary, banned_ids, seed, mask)
        context.append((len(context), token_id, mark))
        generated.append(token_id)
    return generated


def deltas_of(step: StepTokens) -> list[SeqDelta]:
    """All that a step brought as deltas, each choice once."""
    tokens = zip(step.choices, step.token_ids, strict=True)
    deltas = [
        *step.deltas,
        *(SeqDelta(request_id, (token_id,), index=index) for (request_id, index), token_id in tokens),
    ]
    choices = {(delta.request_id, delta.index) for delta in deltas}
    assert len(choices) == len(deltas), "a choice comes up once"
    return deltas


class FakeRow:
    """What a runner keeps of a row."""

    def __init__(self, init: RowInit, mark: int) -> None:
        self.seq_id = init.seq_id
        self.sampling = init.sampling
        self.block_ids = list(init.block_ids)
        self.mark = mark
        self.mask = init.mask
        self.last_token: int | None = None
        self.is_spoiled = False


class FakeKV:
    """Rows and blocks of (position, token, mark). Runs plans in order, like a device's stream.

    seeded: rows that are not greedy depend on their seed, as those of a model do. windows: of each layer group; every
    group keeps the same, and sees what its window shows. draft_model: computes what plans have of `drafting`.
    masked_vocabulary: what rows that have a mask may say, if not what all say.
    """

    def __init__(
        self,
        block_size: int,
        vocabulary: range = BYTE_TOKENS,
        mark: Mark = no_mark,
        *,
        seeded: bool = False,
        windows: Sequence[Window] = (None,),
        draft_model: "FakeKV | None" = None,
        masked_vocabulary: Sequence[int] | None = None,
    ) -> None:
        self._draft_model = draft_model
        self._masked_vocabulary = masked_vocabulary or vocabulary
        self._windows = tuple(windows)
        self._block_size = block_size
        self._vocabulary = vocabulary
        self._mark = mark
        self._seeded = seeded
        self._rows: dict[Row, FakeRow] = {}
        self._blocks: dict[BlockId, dict[int, tuple[int, int, int]]] = {}
        self._host_blocks: dict[HostBlockId, dict[int, tuple[int, int, int]]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step: blocks are moved first, and every slice writes its tokens before any slice reads."""
        if plan.drafting:
            plan = self._with_drafts(plan)
        if plan.block_ops is not None:
            self._move(plan.block_ops)
        for init in plan.inits:
            self._rows[init.row] = FakeRow(init, self._mark(init))
        written: set[tuple[BlockId, int]] = set()
        for piece in plan.slices:
            self._write(piece, written)
        for piece in plan.slices:
            self._context(self._rows[piece.row], piece.start + 1)  # its first position reads too, sampled or not
        sampling = [piece for piece in plan.slices if piece.num_samples]
        runs = [self._sample(piece) for piece in sampling]
        scores = [score for piece, run in zip(sampling, runs, strict=True) for score in self._scores(piece, run)]
        return StepResult(
            plan.step_id,
            tuple(token_id for run in runs for token_id in run),
            tuple(scores) if any(score is not None for score in scores) else (),
            tuple(self._prompt_scores(piece) for piece in plan.slices if piece.target_ids),
            tuple(piece.seq_id for piece, run in zip(sampling, runs, strict=True) if run[-1] == NO_TOKEN),
            num_accepted=tuple(len(run) - 1 for run in runs) if any(piece.draft_ids for piece in sampling) else (),
        )

    def _with_drafts(self, plan: StepPlan) -> StepPlan:
        """The plan with the drafts that its draft model makes in place of those that are to come."""
        assert self._draft_model is not None, "somebody has to make the drafts"
        made: dict[SeqId, list[int]] = {}
        for step in plan.drafting:
            result = self._draft_model.run(step)
            sampling = (piece for piece in step.slices if piece.num_samples)
            for piece, token_id in zip(sampling, result.token_ids, strict=True):
                made.setdefault(piece.seq_id, []).append(token_id)
        slices = tuple(_filled(piece, made[piece.seq_id]) if piece.seq_id in made else piece for piece in plan.slices)
        assert not any(TO_COME in piece.token_ids for piece in slices), "a draft never came"
        return msgspec.structs.replace(plan, slices=slices, drafting=())

    def spoil(self, plan: StepPlan) -> None:
        """The step raised half way: garbage stands wherever it wrote, and what its rows know may be of the step.

        Call it before any later plan runs.
        """
        for step in plan.drafting:
            assert self._draft_model is not None
            self._draft_model.spoil(step)
        garbage = dict.fromkeys(range(self._block_size), (-1, -1, -1))
        ops = plan.block_ops or BlockOps()
        for _, host_id in ops.swap_outs:
            self._host_blocks[host_id] = dict(garbage)
        for _, block_id in (*ops.copies, *ops.swap_ins):
            self._blocks[block_id] = dict(garbage)
        for piece in plan.slices:
            row = self._rows[piece.row]
            if row.seq_id == piece.seq_id:  # else a later step took the row over, and failed with this one
                for position in range(piece.start, piece.start + piece.num_tokens):
                    for group in range(len(self._windows)):
                        block_id, offset = self._slot(row, position, group)
                        self._blocks.setdefault(block_id, {})[offset] = (-1, -1, -1)
                row.is_spoiled = True

    def poison(self, block_ids: Iterable[BlockId]) -> None:
        """Nobody may read what is in these blocks: it is gone."""
        for block_id in block_ids:
            self._blocks.pop(block_id, None)

    def _move(self, ops: BlockOps) -> None:
        self.poison(ops.scrubs)
        for moves in (ops.swap_outs, ops.copies, ops.swap_ins):
            targets = [target for _, target in moves]
            assert len(set(targets)) == len(targets), "I4: a block is moved to twice"
        assert not {a for a, _ in ops.copies} & {b for _, b in ops.copies}, "I4: a block is copied from and to"
        for block_id, host_id in ops.swap_outs:
            self._host_blocks[host_id] = dict(self._blocks.get(block_id, {}))  # reserved, perhaps not written yet
        for source, target in ops.copies:
            self._blocks[target] = dict(self._blocks.get(source, {}))
        for host_id, block_id in ops.swap_ins:
            self._blocks[block_id] = dict(self._host_blocks.get(host_id, {}))

    def _write(self, piece: SeqSlice, written: set[tuple[BlockId, int]]) -> None:
        row = self._rows[piece.row]
        assert row.seq_id == piece.seq_id, f"row {piece.row} is that of sequence {row.seq_id}, not {piece.seq_id}"
        assert not row.is_spoiled, f"I6: row {piece.row} went through a step that failed, and is not set up anew"
        row.block_ids.extend(piece.new_blocks)
        token_ids = piece.token_ids
        if not token_ids:
            assert row.last_token is not None, "the row has sampled nothing yet"
            token_ids = (row.last_token,)
        assert len(token_ids) == piece.num_tokens > 0, "a slice brings its tokens"
        for position, token_id in enumerate(token_ids, start=piece.start):
            for group in range(len(self._windows)):
                slot = self._slot(row, position, group)
                assert slot[0] != 0, "I5: the null block is written"
                assert slot not in written, "I4: two sequences write one slot"
                written.add(slot)
                self._blocks.setdefault(slot[0], {})[slot[1]] = (position, token_id, row.mark)

    def _sample(self, piece: SeqSlice) -> list[int]:
        """The tokens that a slice yields: drafts as long as they are what is sampled, and the one after them."""
        row = self._rows[piece.row]
        seed = row.sampling.columns.seed if self._seeded and row.sampling.columns.temperature > 0 else 0
        masks = None if row.mask is None else masks_of(row.mask, piece.draft_ids)
        vocabulary = self._vocabulary if masks is None else self._masked_vocabulary
        run: list[int] = []
        for position, draft_id in enumerate((*piece.draft_ids, None), start=_first_sampled(piece)):
            banned_ids = row.sampling.banned_ids if position < row.sampling.banned_before else ()
            mask = None if masks is None else masks[len(run)]
            row.last_token = next_token(self._context(row, position), vocabulary, banned_ids, seed, mask)
            run.append(row.last_token)
            if draft_id != row.last_token:
                break
        if row.mask is not None and run[-1] != NO_TOKEN:
            row.mask.advance(run)
        return run

    def _scores(self, piece: SeqSlice, run: Sequence[int]) -> list[TokenScores | None]:
        row = self._rows[piece.row]
        num_top = row.sampling.num_logprobs
        if num_top is None:
            return [None] * len(run)
        return [
            scores_of(self._context(row, position), self._vocabulary, token_id, num_top, row.sampling.named_ids)
            for position, token_id in enumerate(run, start=_first_sampled(piece))
        ]

    def _prompt_scores(self, piece: SeqSlice) -> tuple[TokenScores, ...]:
        row = self._rows[piece.row]
        assert row.sampling.num_prompt_logprobs is not None, "the row's prompt is scored"
        return tuple(
            scores_of(self._context(row, position), self._vocabulary, token_id, row.sampling.num_prompt_logprobs)
            for position, token_id in enumerate(piece.target_ids, start=piece.start + 1)
        )

    def _context(self, row: FakeRow, num_positions: int) -> list[tuple[int, int, int]]:
        """What the last of so many positions sees."""
        context = []
        for group, window in enumerate(self._windows):
            for position in range(max(0, num_positions - window) if window else 0, num_positions):
                block_id, offset = self._slot(row, position, group)
                written = self._blocks.get(block_id, {})
                assert offset in written, f"I6: position {position} of group {group} is read and not written"
                context.append(written[offset])
        return context

    def _slot(self, row: FakeRow, position: int, group: int) -> tuple[BlockId, int]:
        span, offset = divmod(position, self._block_size)
        return row.block_ids[span * len(self._windows) + group], offset


def _filled(piece: SeqSlice, draft_ids: Sequence[int]) -> SeqSlice:
    """The slice with these drafts."""
    assert piece.draft_ids == (TO_COME,) * len(draft_ids), "as many as are asked for"
    known = piece.token_ids[: piece.num_tokens - len(draft_ids)]
    return msgspec.structs.replace(piece, token_ids=(*known, *draft_ids))


def _first_sampled(piece: SeqSlice) -> int:
    """The position that the first token takes which a slice yields."""
    return piece.start + piece.num_tokens - piece.num_samples + 1


class Foreseer:
    """What a `Proposer` needs that has no model: its `propose` is another's to say."""

    foresees = True

    def steps(self, step_id: int, slices: Sequence[SeqSlice]) -> tuple[StepPlan, ...]:
        """As the Protocol says."""
        del step_id, slices
        return ()

    def seconds(self, num_tokens: int) -> float:
        """As the Protocol says."""
        del num_tokens
        return 0.0


class FakeScript:
    """Instead of a model: every sequence says the same, from the beginning and over again. Stores nothing.

    Scores tokens for rows that ask for it, as `scores_of` does without a context.
    """

    def __init__(self, token_ids: Sequence[int], vocabulary: range = range(BYTE_TOKENS.stop)) -> None:
        self._token_ids = token_ids
        self._vocabulary = vocabulary
        self._num_sampled: dict[SeqId, int] = {}
        self._samplings: dict[Row, RowSampling] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """The next token of the script for each slice that samples."""
        self._samplings |= {init.row: init.sampling for init in plan.inits}
        token_ids, scores = [], []
        for piece in plan.slices:
            assert piece.num_samples < 2, "a script verifies no drafts"
            if piece.num_samples:
                count = self._num_sampled.get(piece.seq_id, 0)
                self._num_sampled[piece.seq_id] = count + 1
                script = self._script(self._samplings[piece.row])
                token_ids.append(script[count % len(script)])
                sampling = self._samplings[piece.row]
                num_top = sampling.num_logprobs
                scores.append(None if num_top is None else self._score(token_ids[-1], num_top, sampling.named_ids))
        return StepResult(
            plan.step_id,
            tuple(token_ids),
            tuple(scores) if any(score is not None for score in scores) else (),
            tuple(self._prompt_scores(piece) for piece in plan.slices if piece.target_ids),
        )

    def _script(self, sampling: RowSampling) -> Sequence[int]:
        """What a row says that is sampled so."""
        del sampling
        return self._token_ids

    def _score(self, token_id: int, num_top: int, named_ids: Sequence[int] = ()) -> TokenScores:
        return scores_of((), self._vocabulary, token_id, num_top, named_ids)

    def _prompt_scores(self, piece: SeqSlice) -> tuple[TokenScores, ...]:
        num_top = self._samplings[piece.row].num_prompt_logprobs
        assert num_top is not None, "targets are for prompts that are scored"
        return tuple(self._score(token_id, num_top) for token_id in piece.target_ids)


class FakeScripts(FakeScript):
    """Of several scripts each sequence says the one that its seed, counted round them, tells."""

    def __init__(self, scripts: Sequence[Sequence[int]]) -> None:
        super().__init__(())
        self._scripts = scripts

    def _script(self, sampling: RowSampling) -> Sequence[int]:
        return self._scripts[sampling.columns.seed % len(self._scripts)]


class FakePooler:
    """Makes of each sequence (its number of tokens, its first, its last, where a second text begins or -1).

    Of each of its tokens, where they are asked for: (its place, the token, the last, -1).
    """

    def __init__(self) -> None:
        self._rows: dict[Row, tuple[list[int], int | None, bool]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """The step's result: no token, a vector for each slice that samples."""
        for init in plan.inits:
            self._rows[init.row] = ([], init.second_at, init.per_token)
        vectors = []
        for piece in plan.slices:
            tokens, second_at, per_token = self._rows[piece.row]
            tokens[piece.start :] = piece.token_ids
            if piece.num_samples:
                place = -1 if second_at is None else second_at
                whole = (len(tokens), tokens[0], tokens[-1], place)
                of_tokens = [number for i, token in enumerate(tokens) for number in (i, token, tokens[-1], -1)]
                vectors.append(array("f", of_tokens if per_token else whole))
        return StepResult(plan.step_id, (0,) * len(vectors), vectors=tuple(vectors))


class ScriptedFlight:
    """A step that was computed when it was launched, and lands when it is asked to and not held."""

    def __init__(self, outcome: StepResult | BaseException, cleared: asyncio.Event) -> None:
        self._outcome = outcome
        self._cleared = cleared

    async def land(self) -> StepResult:
        """Yields once, like every flight."""
        await asyncio.sleep(0)
        await self._cleared.wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class ScriptedRunner:
    """A `Runner` whose tokens are a pure function of its plans.

    model: computes a step; by default a `FakeKV` of `block_size` and `vocabulary`, else e.g. a `FakeScript`.
    launch_errors, land_errors: what to raise, by step id, from `launch` and from `land`.
    poison: says of a plan, before it runs, what it makes `land` raise; None lets it run.
    lost: what signs of life raise.
    plans: every plan launched so far. `hold` keeps flights in the air until `let_land`.
    """

    def __init__(
        self,
        *,
        block_size: int = 16,
        vocabulary: range = BYTE_TOKENS,
        model: FakeKV | FakeScript | FakePooler | None = None,
        launch_errors: Mapping[int, BaseException] | None = None,
        land_errors: Mapping[int, BaseException] | None = None,
        poison: Callable[[StepPlan], BaseException | None] = lambda _plan: None,
        lost: BaseException | None = None,
    ) -> None:
        self._model = model if model is not None else FakeKV(block_size, vocabulary)
        self._launch_errors = launch_errors or {}
        self._land_errors = land_errors or {}
        self._poison = poison
        self._lost = lost
        self._failed: BaseException | None = None
        self._cleared = asyncio.Event()
        self._cleared.set()
        self.plans: list[StepPlan] = []
        self.closed = False

    def launch(self, plan: StepPlan) -> ScriptedFlight:
        """Compute the step at once; steps run in the order of their launches, until one fails."""
        assert not self.closed, "launched after close"
        if plan.step_id in self._launch_errors:
            raise self._launch_errors[plan.step_id]
        self.plans.append(plan)
        if self._failed is not None:
            return ScriptedFlight(self._failed, self._cleared)
        self._failed = self._land_errors.get(plan.step_id) or self._poison(plan)
        result = self._model.run(plan)
        if self._failed is not None and isinstance(self._model, FakeKV):
            self._model.spoil(plan)
        return ScriptedFlight(self._failed or result, self._cleared)

    def recover(self) -> ScriptedFlight:
        """As the Protocol says."""
        self._failed = None
        return ScriptedFlight(self._lost or StepResult(-1, ()), self._cleared)

    def hold(self) -> None:
        """From now on no flight lands."""
        self._cleared.clear()

    def let_land(self) -> None:
        """Flights land again."""
        self._cleared.set()

    def close(self) -> None:
        """Idempotent."""
        self.closed = True


class FakeClock:
    """A `Clock` that stands still until it is told to go on. Seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
