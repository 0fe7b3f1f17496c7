"""ForcedMask: where an answer was masked, its recorded tokens are the only ones that the replay may sample.

A mask is no value: the library that made it, the structure that it followed, are not in a recording. What is computed
for such a row, and for all others, is the same; that its tokens agree tells nothing, and is not counted.
"""

from collections.abc import Iterator, Sequence

from aserve.core.ids import SeqId
from aserve.core.plan import SeqSlice
from aserve.recording.files import Recording, landed_plans
from aserve.recording.records import Landed, Plan, Planned

Answers = dict[SeqId, list[int]]


class ForcedMask:
    """A `TokenMask` that allows the next token of an answer, and any token behind its end.

    num_before: tokens that the answer had when the row was set up.
    """

    def __init__(self, answer: Sequence[int], num_before: int, vocab_size: int) -> None:
        self._answer = answer
        self._num = num_before
        self._num_bytes = -(-vocab_size // 32) * 4

    def advance(self, token_ids: Sequence[int]) -> None:
        """As the Protocol says."""
        self._num += len(token_ids)

    def masks(self, draft_ids: Sequence[int]) -> bytes:
        """As the Protocol says."""
        agreed, masks = True, [self._mask(self._num)]
        for place, draft_id in enumerate(draft_ids, start=self._num):
            agreed = agreed and (place >= len(self._answer) or self._answer[place] == draft_id)
            masks.append(self._mask(place + 1) if agreed else bytes(self._num_bytes))
        return b"".join(masks)

    def _mask(self, place: int) -> bytes:
        if place >= len(self._answer):
            return b"\xff" * self._num_bytes
        token_id = self._answer[place]
        return (1 << token_id if token_id >= 0 else 0).to_bytes(self._num_bytes, "little")


def runs(plan: Plan, token_ids: Sequence[int], num_accepted: Sequence[int]) -> Iterator[tuple[SeqSlice, range]]:
    """For each slice that samples, which of a step's tokens are its own."""
    first, accepted = 0, iter(num_accepted)
    for piece in plan.slices:
        if piece.num_samples:
            end = min(len(token_ids), first + 1 + next(accepted, 0))
            yield piece, range(first, end)
            first = end


def masked_answers(recording: Recording) -> Answers:
    """The recorded tokens of every sequence that was masked."""
    answers: Answers = {}
    plans: dict[int, Plan] = {}
    for record in landed_plans(recording):
        if isinstance(record, Planned):
            answers |= {init.seq_id: [] for init in record.plan.inits if init.has_mask and init.seq_id not in answers}
            plans[record.plan.step_id] = record.plan
        elif isinstance(record, Landed) and answers:
            for piece, places in runs(plans[record.step_id], record.token_ids, record.num_accepted):
                if piece.seq_id in answers:
                    answers[piece.seq_id] += record.token_ids[places.start : places.stop]
        if isinstance(record, Landed):
            plans.pop(record.step_id, None)
    return answers
