"""When a sequence ends by itself. Stop strings are text: the loop finds them later and calls `Scheduler.finish`."""

from aserve.core.outputs import FinishReason
from aserve.scheduler.sequence import Sequence


def reason_to_stop(sequence: Sequence, token_id: int) -> tuple[FinishReason, int | None]:
    """Why the token just appended ends the sequence, and the stop_reason: the id if the request asked for it.

    An ending token is not seen before min_tokens: the runner does not sample it (RowSampling.banned_ids), unless it is
    all that a constraint leaves.
    """
    if token_id in sequence.stop_ids:
        is_eos = token_id in sequence.request.eos_ids
        return FinishReason.STOP, None if is_eos else token_id
    assert len(sequence.token_ids) >= sequence.max_len, f"no reason to stop {sequence!r}"
    return FinishReason.LENGTH, None
