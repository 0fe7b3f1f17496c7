"""From hidden states to the next tokens. Knows which rows are sampled, not why, nor how a token is drawn (ops.sample).

Letters: kernels/ops.py and rows.py.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from aserve.core.ids import SeqId
from aserve.core.plan import StepPlan
from aserve.kernels.ops import NO_TOKEN, Ops, Scores
from aserve.models.interface import CausalLM
from aserve.runner.batch import StepBatch
from aserve.runner.controls import record_sampled
from aserve.runner.scoring import score_sampled
from aserve.runner.verification import count_accepted, newest, record_accepted, with_history


class Sampled(NamedTuple):
    """ids_N: a token id per sample. scores: of those samples that are scored, as many as the batch has targets, under
    the model's own distribution, before it is masked or controlled. num_accepted_S: of each slice that samples, None in
    a step without drafts.
    """

    ids_N: Tensor
    scores: tuple[Scores, ...]
    num_accepted_S: Tensor | None


def sample_next(model: CausalLM, ops: Ops, hidden_NE: Tensor, last_token_R: Tensor, batch: StepBatch) -> Sampled:
    """One token id per sample. NO_TOKEN where the logits are not finite, and where a mask leaves nothing.

    Each row's last one, of rows with drafts the one behind those that are accepted, is written to last_token_R.

    `Ops.sample` checks each row by itself, whose largest logit it needs anyway. Where something is masked, controlled
    or banned a row is checked before that too (max is NaN if any is), for a ban may hide what is not finite. The check
    stays on the device, and its answer takes the token's place, so that it costs no wait and no copy of its own.
    """
    raw_NV = logits_NV = model.logits(hidden_NE)
    is_changed = batch.controls is not None or batch.masks is not None
    if is_changed or batch.sampled_targets:
        raw_NV = logits_NV = logits_NV.float()
    if is_changed and batch.sampled_targets:
        raw_NV = logits_NV.clone()
    finite_N = None
    if is_changed or batch.sampling.banned_SC is not None:
        finite_N = logits_NV.amax(-1).isfinite()
    if batch.masks is not None:
        ops.mask_logits(logits_NV, batch.masks())
    if batch.controls is not None:
        controls = batch.controls if batch.drafts is None else with_history(batch.controls, batch.drafts)
        ops.control_logits(logits_NV, controls)
    ids_N = ops.sample(logits_NV, batch.sampling)
    if finite_N is not None:
        ids_N = ids_N.masked_fill(~finite_N, NO_TOKEN)
    # The next step, already launched, may look the last token up: it has to be a token.
    last_token_N = ids_N.clamp(min=0)
    num_accepted_S = None if batch.drafts is None else count_accepted(ids_N, batch.drafts)
    record(last_token_N, num_accepted_S, last_token_R, batch)
    scores = tuple(score_sampled(ops, raw_NV, last_token_N, targets) for targets in batch.sampled_targets)
    return Sampled(ids_N, scores, num_accepted_S)


def record(last_token_N: Tensor, num_accepted_S: Tensor | None, last_token_R: Tensor, batch: StepBatch) -> None:
    """Let the rows know what was sampled, as far as it counts."""
    drafts, controls = batch.drafts, batch.controls
    if drafts is None or num_accepted_S is None:
        last_token_R.index_copy_(0, batch.sampled_rows_N, last_token_N)
        if controls is not None:
            record_sampled(controls, last_token_N)
        return
    last_token_R.index_copy_(0, drafts.rows_S, newest(last_token_N, num_accepted_S, drafts))
    if controls is not None:
        record_accepted(controls, drafts, last_token_N, num_accepted_S)


def without_token(plan: StepPlan, token_ids: Sequence[int], num_accepted: Sequence[int] = ()) -> tuple[SeqId, ...]:
    """The sequences whose logits were not finite, or whose mask left nothing.

    token_ids, num_accepted: as in the step's result.
    """
    if NO_TOKEN not in token_ids:
        return ()
    sampled = [piece.seq_id for piece in plan.slices if piece.num_samples]
    ends = accumulate(accepted + 1 for accepted in num_accepted or (0,) * len(sampled))
    return tuple(seq_id for seq_id, end in zip(sampled, ends, strict=True) if token_ids[end - 1] == NO_TOKEN)
