"""ObservedStep: of a step while somebody looks on, when what was done about it, and what came of it."""

from typing import NamedTuple

import msgspec

from aserve.core.ids import SeqId
from aserve.core.plan import SeqSlice, StepPlan, StepResult
from aserve.observe.mirror import Mirror
from aserve.observe.records import NO_TOKEN, Admission, Card, Phases, Piece, Work


class StepTimes(msgspec.Struct, gc=False):
    """When what was done about a step, by the engine's clock, as it is noted by who steps.

    waited_s: when the loop had nothing else to do. took_s: how long, since it was begun and the one before had landed.
    """

    began_s: float
    planned_s: float
    launched_s: float = 0.0
    waited_s: float = 0.0
    landed_s: float = 0.0
    committed_s: float = 0.0
    took_s: float = 0.0


class ObservedStep:
    """A step that has been planned. admitted: who took a row in it. times: for who steps to write to."""

    __slots__ = ("admitted", "plan", "times")

    def __init__(self, plan: StepPlan, times: StepTimes) -> None:
        self.plan, self.times = plan, times
        self.admitted: tuple[Admission, ...] = ()

    def work(self, published_s: float, decodes: tuple[SeqId, ...], pieces: tuple[Piece, ...]) -> Work:
        """What was done, once it is over."""
        plan, times = self.plan, self.times
        phases = Phases(
            microseconds(times.planned_s - times.began_s),
            microseconds(times.launched_s - times.planned_s),
            microseconds(times.landed_s - times.launched_s),
            microseconds(times.landed_s - max(times.waited_s, times.launched_s)),
            microseconds(times.committed_s - times.landed_s),
            microseconds(published_s - times.committed_s),
        )
        began_us, num_drafts = microseconds(times.began_s), sum([one.num_tokens for one in plan.drafting])
        ops = plan.block_ops
        moves = () if ops is None else (ops.copies, ops.swap_outs, ops.swap_ins)
        return Work(plan.step_id, began_us, phases, decodes, pieces, num_drafts, *moves)


class Computed(NamedTuple):
    """What came of a plan's slices: the fields of `Work` and `Record`."""

    decodes: tuple[SeqId, ...]
    decoded: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    token_ids: tuple[tuple[int, tuple[int, ...]], ...] = ()


def computed(plan: StepPlan, result: StepResult, mirror: Mirror) -> Computed:
    """Who computed one more token, who more than that, and which tokens came of it."""
    slices, sampled = plan.slices, result.token_ids
    newest = tuple([piece.seq_id for piece in slices if not piece.token_ids])
    if len(newest) == len(slices):  # as in most steps
        return Computed(newest, sampled)
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


def _is_next(piece: SeqSlice, card: Card | None) -> bool:
    """Whether a slice is of the newest token: that is on the device alone, or was waited for, as beams do."""
    return piece.num_samples == 1 and (not piece.token_ids or (card is not None and piece.start >= card.num_prompt))


def microseconds(seconds: float) -> int:
    """Of a time in seconds."""
    return int(seconds * 1e6)
