"""Who gives way when no block is free, and what of him stays.

Of another request all sequences that run give way together, of one's own only the newest: so the oldest of all always
gets on, and nobody is preempted for the sake of who came after him (I16).

A victim's blocks are given up and computed again later, or moved to the host and back, whichever is estimated to cost
less. Sealed blocks that are given up stay in the prefix cache until somebody needs them, so that coming back is often
cheaper than estimated. What a victim has sampled he keeps, and a token of his that is still on the device will be
accepted when it lands. Beams are always computed again: they wait for each other, not for their own past.
"""

from aserve.core.config import PREEMPTION_MODES, RECOMPUTE_COST_S, SWAP_COST_S, PreemptionMode
from aserve.kv_cache.block_pool import NULL_BLOCK
from aserve.scheduler.queue import SequenceQueue
from aserve.scheduler.sequence import Sequence


def choose_victims(running: SequenceQueue, beneficiary: Sequence | None) -> list[Sequence]:
    """Who came last, even if that is the beneficiary; with all of his group, unless it is the beneficiary's own."""
    victim = running.last
    assert beneficiary is None or victim.sort_key >= beneficiary.sort_key, f"I16: {victim!r} is older"
    if victim.group is None or (beneficiary is not None and victim.group is beneficiary.group):
        return [victim]
    return victim.group.running()


class PreemptionRule:
    """mode: "auto" estimates; the others force.

    recompute_cost_s: seconds of one token's forward pass. swap_cost_s: of one block on its way to the host or back.
    """

    def __init__(
        self,
        mode: PreemptionMode = "auto",
        *,
        recompute_cost_s: float = RECOMPUTE_COST_S,
        swap_cost_s: float = SWAP_COST_S,
    ) -> None:
        assert mode in PREEMPTION_MODES, f"unknown preemption mode {mode}"
        self._mode = mode
        self._recompute_cost_s = recompute_cost_s
        self._swap_cost_s = swap_cost_s

    def prefers_swap(self, victims: list[Sequence]) -> bool:
        """Whether to move what the victims hold to the host, if it has room.

        What several of them share is moved once, and computed once.
        """
        if self._mode == "recompute" or any(v.group is not None and v.group.beams is not None for v in victims):
            return False
        if self._mode == "swap":
            return True
        held = [block_id for victim in victims for block_id in victim.table.block_ids if block_id != NULL_BLOCK]
        num_blocks = len(set(held))
        num_tokens = sum(victim.num_computed for victim in victims) * num_blocks / max(1, len(held))
        return 2 * num_blocks * self._swap_cost_s < num_tokens * self._recompute_cost_s
