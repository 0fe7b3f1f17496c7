"""The scores of prompts' tokens: kept with their sequences until its next delta takes them along."""

from collections.abc import Mapping

from aserve.core.ids import SeqId
from aserve.core.plan import StepPlan, StepResult
from aserve.scheduler.sequence import Sequence


def take_prompt_scores(sequences: Mapping[SeqId, Sequence], plan: StepPlan, result: StepResult) -> None:
    """Keep what is new of a step's prompt scores: after a preemption some come twice.

    sequences: those that have not ended.
    """
    scored = (piece for piece in plan.slices if piece.target_ids)
    for piece, scores in zip(scored, result.prompt_scores, strict=True):
        sequence = sequences.get(piece.seq_id)
        if sequence is not None:
            sequence.prompt_scores += scores[sequence.num_scored - piece.start - 1 :]
            sequence.num_scored = max(sequence.num_scored, piece.start + 1 + len(scores))
