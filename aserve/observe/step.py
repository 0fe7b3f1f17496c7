"""ObservedStep: of a step while somebody looks on, when what was done about it, and what came of it."""

from typing import NamedTuple

import msgspec

from aserve.core.ids import ChoiceId, SeqId
from aserve.core.plan import BlockOps, SeqSlice, StepPlan, StepResult
from aserve.observe.mirror import Mirror, News
from aserve.observe.records import NO_TOKEN, Admission, Card, Phases, Piece, Work


class Computed(NamedTuple):
    """What came of a plan's slices: the fields of `Work` and `Record`."""

    decodes: tuple[SeqId, ...]
    decoded: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    token_ids: tuple[tuple[int, tuple[int, ...]], ...] = ()


class More(NamedTuple):
    """What is needed besides to tell of a step that did more than decode, or behind which more has changed.

    ends: why choices have ended in it.
    """

    came: Computed
    ends: dict[ChoiceId, str]
    news: News


class ObservedStep(msgspec.Struct, gc=False):
    """When what was done about a step, by the engine's clock, as it is noted by who steps; and what to tell of it.

    waited_s: when the loop had nothing else to do. took_s: how long, since it was begun and the one before had landed.
    admitted: who took a row in it. known: slices of tokens that are known when it is planned, and their places: looked
    for when the plan is made, and still in a cache. Of one that is over:

    decodes, token_ids: the sequences of which it computed the next token, and all that it sampled. num_grown,
    num_rehashed: what was noted of blocks up to its end. more: None where it computed nothing else, as most do, and
    nothing has changed but blocks. Its plan is not kept, or that memory would not be the next plans', which every cache
    has.
    """

    began_s: float
    planned_s: float
    launched_s: float = 0.0
    waited_s: float = 0.0
    landed_s: float = 0.0
    committed_s: float = 0.0
    took_s: float = 0.0
    published_s: float = 0.0
    admitted: tuple[Admission, ...] = ()
    known: tuple[tuple[int, SeqSlice], ...] = ()
    step_id: int = -1
    decodes: tuple[SeqId, ...] = ()
    token_ids: tuple[int, ...] = ()
    num_grown: int = 0
    num_rehashed: int = 0
    more: More | None = None


def times_of(seen: ObservedStep) -> tuple[int, int, int, int, int, int, int, int]:
    """When a step that is over was published and when it began, and how long its parts took: the fields of `Phases`."""
    began_s, planned_s, launched_s, landed_s = seen.began_s, seen.planned_s, seen.launched_s, seen.landed_s
    committed_s, published_s = seen.committed_s, seen.published_s
    flight, wait = landed_s - launched_s, landed_s - max(launched_s, seen.waited_s)
    phases = (
        planned_s - began_s,
        launched_s - planned_s,
        flight,
        wait,
        committed_s - landed_s,
        published_s - committed_s,
    )
    return tuple([int(seconds * 1e6) for seconds in (published_s, began_s, *phases)])  # type: ignore[return-value]


def work_of(seen: ObservedStep, came: Computed, plan: StepPlan | None = None) -> Work:
    """What was done in a step that is over. plan: where a draft model's steps were before it, or blocks were moved."""
    _, began_us, *phases = times_of(seen)
    work = Work(seen.step_id, began_us, Phases(*phases), came.decodes, came.pieces)
    if plan is None:
        return work
    num_drafts, ops = sum([one.num_tokens for one in plan.drafting]), plan.block_ops or BlockOps()
    moves = {"copies": ops.copies, "swap_outs": ops.swap_outs, "swap_ins": ops.swap_ins}
    return msgspec.structs.replace(work, num_draft_tokens=num_drafts, **moves)


def computed(plan: StepPlan, seen: ObservedStep, result: StepResult, mirror: Mirror) -> Computed:
    """Who computed one more token, who more than that, and which tokens came of it."""
    slices, sampled = plan.slices, result.token_ids
    if len(seen.decodes) == len(slices):  # as in most steps
        return Computed(seen.decodes, sampled)
    has_one_each = len(sampled) == len(seen.decodes) + len(seen.known) and not (result.num_accepted or result.vectors)
    if has_one_each and mirror.only_grows and all(piece.num_tokens > 1 for _, piece in seen.known):
        return _with_ends_of_prompts(seen, sampled)  # as in most of the others
    pools, first = bool(result.vectors), 0
    accepted = iter(result.num_accepted)
    decodes: list[SeqId] = []
    decoded: list[int] = []
    pieces: list[Piece] = []
    others: list[tuple[int, tuple[int, ...]]] = []
    for piece in slices:
        num_accepted, card = 0, mirror.card(piece.seq_id)
        token_ids: tuple[int, ...] = ()
        if piece.num_samples and not pools:
            num_accepted = next(accepted, 0)
            token_ids = sampled[first : first + num_accepted + 1] if card is not None and card.shows_tokens else ()
            first += num_accepted + 1
        if piece.num_tokens == 1 and _is_next(piece, card):
            decodes.append(piece.seq_id)
            decoded.append(token_ids[0] if token_ids else NO_TOKEN)
            continue
        num_drafts = max(0, piece.num_samples - 1)
        kind = "draft" if num_drafts else "pooled" if pools and piece.num_samples else "prefill"
        pieces.append(Piece(piece.seq_id, kind, piece.start, piece.num_tokens, num_drafts, num_accepted))
        if token_ids:
            others.append((piece.seq_id, token_ids))
    return Computed(tuple(decodes), tuple(decoded), tuple(pieces), tuple(others))


def _with_ends_of_prompts(seen: ObservedStep, sampled: tuple[int, ...]) -> Computed:
    """Of a step in which each slice got one token, and those that are no decodes were the last of prompts."""
    decoded = list(sampled)
    for place, _ in reversed(seen.known):
        del decoded[place]
    pieces = [Piece(piece.seq_id, "prefill", piece.start, piece.num_tokens) for _, piece in seen.known]
    token_ids = [(piece.seq_id, (sampled[place],)) for place, piece in seen.known]
    return Computed(seen.decodes, tuple(decoded), tuple(pieces), tuple(token_ids))


def _is_next(piece: SeqSlice, card: Card | None) -> bool:
    """Whether a slice is of the newest token: that is on the device alone, or was waited for, as beams do."""
    return piece.num_samples == 1 and (not piece.token_ids or (card is not None and piece.start >= card.num_prompt))


def microseconds(seconds: float) -> int:
    """Of a time in seconds."""
    return int(seconds * 1e6)
