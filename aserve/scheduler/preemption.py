"""Who gives way when no block is free, and what of him stays.

A victim gives up all of his blocks and computes them again later. His sealed blocks stay in the prefix cache until
somebody needs them, so that coming back is often cheap. What he has sampled he keeps, and a token of his that is still
on the device will be accepted when it lands.
"""

from aserve.scheduler.queue import SequenceQueue
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.states import State, move


def choose_victim(running: SequenceQueue, beneficiary: Sequence) -> Sequence:
    """The newest, even if that is the beneficiary: so the oldest always gets on, and no two chase each other (I16)."""
    victim = running.last
    assert victim.sort_key >= beneficiary.sort_key, f"I16: {victim!r} is older than {beneficiary!r}"
    return victim


def send_back(victim: Sequence, newest_step_id: int | None) -> None:
    """Make it a waiting sequence that has computed nothing. Its row, blocks and place in line are the caller's part.

    newest_step_id: the newest step in flight, None if there is none.
    """
    victim.state = move(victim.state, State.WAITING)
    victim.num_computed = 0
    victim.num_preemptions += 1
    victim.resume_after = newest_step_id
