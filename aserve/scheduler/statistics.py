"""Statistics: what the scheduler tells about itself."""

import msgspec


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of this moment, and counters (num_preemptions and below) since the start.

    num_running, num_waiting, num_swapped: sequences. num_host_used_blocks: of the swap space.
    num_blocks: all that sequences can hold. num_used_blocks: those that they do hold; merely cached ones are free.
    num_preemptions: of sequences; num_swap_outs: those of them that were swapped out and not recomputed.
    num_cache_queries, num_cache_hits: tokens that sequences were admitted with, and those of them found in the cache.
    num_copied_blocks: copied on write. num_swapped_blocks: moved to the host or back.
    num_host_kept_blocks: of the swap space, those that the host tier has now. num_host_hit_blocks: came back from it.
    queue_time_s: from arrival to first admission, summed over the num_admitted sequences.
    """

    num_running: int
    num_waiting: int
    num_swapped: int = 0
    num_in_flight: int
    num_blocks: int
    num_used_blocks: int
    num_free_blocks: int
    num_host_used_blocks: int = 0
    num_preemptions: int
    num_swap_outs: int = 0
    num_admitted: int
    queue_time_s: float
    num_cache_queries: int
    num_cache_hits: int
    num_cache_evictions: int
    num_copied_blocks: int = 0
    num_swapped_blocks: int = 0
    num_host_kept_blocks: int = 0
    num_host_hit_blocks: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that sequences hold, in [0, 1]."""
        return self.num_used_blocks / self.num_blocks
