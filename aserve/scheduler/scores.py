"""Where a step's scores go: those of prompts to their sequences, until the next delta; those of sampled tokens on."""

from collections.abc import Mapping

from aserve.core.ids import SeqId
from aserve.core.plan import StepPlan, StepResult, TokenScores
from aserve.scheduler.sequence import Sequence


def take_scores(
    sequences: Mapping[SeqId, Sequence], plan: StepPlan, result: StepResult
) -> dict[SeqId, TokenScores | None]:
    """Keep what is new of the prompts' scores: after a preemption some come twice. Returns the sampled tokens'.

    sequences: those that have not ended.
    """
    scored = (piece for piece in plan.slices if piece.target_ids)
    for piece, scores in zip(scored, result.prompt_scores, strict=bool(result.prompt_scores)):
        sequence = sequences.get(piece.seq_id)
        if sequence is not None:
            sequence.prompt_scores += scores[sequence.num_scored - piece.start - 1 :]
            sequence.num_scored = max(sequence.num_scored, piece.start + 1 + len(scores))
    sampled = (piece.seq_id for piece in plan.slices if piece.samples)
    return dict(zip(sampled, result.scores, strict=bool(result.scores)))
