"""Plans as records, and back. What a record has instead of an object: a flag for each mask."""

from collections.abc import Callable, Sequence

import msgspec

from aserve.core.columns import SamplingColumns
from aserve.core.ids import RequestId, SeqId
from aserve.core.plan import TO_COME, RowControls, RowInit, RowSampling, SeqSlice, StepPlan, StepResult, TokenMask
from aserve.recording.records import HIDDEN, Init, Landed, Plan, Planned, Record

Owner = tuple[RequestId, int, int]
"""Whose a sequence is: the request, which choice of it, and tokens of the prompt."""
NOBODY: Owner = (RequestId(""), 0, 0)


Told = Record | tuple[float, StepPlan, tuple[Owner, ...]] | tuple[float, StepResult, float, bool]
"""A record, or what one is made of where nobody waits: a plan, when it was begun, and whose its inits are; or what a
step brought, when, how long it took, and whether its logprobs are told.
"""


def settled(told: Told) -> Record:
    """The record of it."""
    if not isinstance(told, tuple):
        return told
    if isinstance(told[1], StepPlan):
        at_s, plan, owners = told
        whose = dict(zip((init.seq_id for init in plan.inits), owners, strict=True)) if owners else {}
        return Planned(at_s, to_record(plan, lambda seq_id: whose.get(seq_id, NOBODY)))
    at_s, result, took_s, has_logprobs = told
    scores = result.scores if has_logprobs else ()
    logprobs = tuple([None if score is None else score.logprob for score in scores])
    return Landed(at_s, result.step_id, took_s, result.token_ids, result.num_accepted, result.failed, logprobs)


def to_record(plan: StepPlan, owner: Callable[[SeqId], Owner]) -> Plan:
    """A plan as a record."""
    inits = tuple(_init(init, owner(init.seq_id)) for init in plan.inits) if plan.inits else ()
    drafting = tuple(to_record(step, owner) for step in plan.drafting) if plan.drafting else ()
    return Plan(plan.step_id, plan.slices, inits, plan.block_ops, drafting)


def _init(init: RowInit, owner: Owner) -> Init:
    sampling, (request_id, index, num_prompt) = init.sampling, owner
    return Init(
        row=init.row,
        seq_id=init.seq_id,
        block_ids=init.block_ids,
        columns=tuple(sampling.columns),
        banned_ids=sampling.banned_ids,
        banned_before=sampling.banned_before,
        num_scored=sampling.num_logprobs,
        named_ids=sampling.named_ids,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        controls=sampling.controls,
        adapter=init.adapter,
        has_mask=init.mask is not None,
        request_id=request_id,
        index=index,
        num_prompt=num_prompt,
    )


def from_record(plan: Plan, mask: Callable[[Init], TokenMask | None]) -> StepPlan:
    """The plan that a record tells of. mask: makes one for each row that had one."""
    inits = tuple(_row_init(init, mask(init) if init.has_mask else None) for init in plan.inits)
    drafting = tuple(from_record(step, mask) for step in plan.drafting)
    return StepPlan(plan.step_id, plan.slices, inits, plan.block_ops, drafting)


def _row_init(init: Init, mask: TokenMask | None) -> RowInit:
    sampling = RowSampling(
        columns=SamplingColumns[float](*init.columns),
        banned_ids=init.banned_ids,
        banned_before=init.banned_before,
        num_logprobs=init.num_scored,
        named_ids=init.named_ids,
        num_prompt_logprobs=init.num_prompt_logprobs,
        controls=init.controls,
    )
    return RowInit(init.row, init.seq_id, sampling, init.block_ids, init.adapter, mask)


def hidden(plan: Plan) -> Plan:
    """The same plan, in which every token id is HIDDEN: of prompts, of drafts, and those that parameters name."""
    slices = plan.slices
    if any(piece.token_ids or piece.target_ids for piece in slices):
        slices = tuple(map(_hidden_slice, slices))
    inits = tuple(map(_hidden_init, plan.inits)) if plan.inits else ()
    drafting = tuple(map(hidden, plan.drafting)) if plan.drafting else ()
    return Plan(plan.step_id, slices, inits, plan.block_ops, drafting)


def _hidden_slice(piece: SeqSlice) -> SeqSlice:
    if not (piece.token_ids or piece.target_ids):
        return piece
    return msgspec.structs.replace(piece, token_ids=_hide(piece.token_ids), target_ids=_hide(piece.target_ids))


def _hidden_init(init: Init) -> Init:
    controls = init.controls
    if controls is not None:
        controls = RowControls(
            penalties=controls.penalties,
            logit_bias=tuple((HIDDEN, bias) for _, bias in controls.logit_bias),
            allowed_ids=_hide(controls.allowed_ids),
            bad_words=tuple(map(_hide, controls.bad_words)),
            prompt_ids=_hide(controls.prompt_ids),
            output_ids=_hide(controls.output_ids),
        )
    return msgspec.structs.replace(init, named_ids=_hide(init.named_ids), controls=controls)


def _hide(token_ids: Sequence[int]) -> tuple[int, ...]:
    if TO_COME in token_ids:
        return tuple(TO_COME if token_id == TO_COME else HIDDEN for token_id in token_ids)
    return (HIDDEN,) * len(token_ids)
