"""CacheStatistics: what the cache tells about itself."""

import msgspec

from aserve.kv_cache.block_pool import BlockPool
from aserve.kv_cache.host_memory import HostMemory


class CacheStatistics(msgspec.Struct, frozen=True):
    """Blocks now, and counters since the start.

    num_used: blocks held by sequences; those that are merely cached count as free.
    num_queried_tokens, num_hit_tokens: tokens that sequences came with, and of these the ones found in the cache.
    num_evictions: cached blocks that were given to somebody else.
    num_host_used: blocks of the swap space that are held. num_host_kept: those that the host tier has.
    num_host_hits: blocks that came back from the host tier.
    """

    num_used: int
    num_free: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_evictions: int
    num_host_used: int = 0
    num_host_kept: int = 0
    num_host_hits: int = 0


def snapshot(pool: BlockPool, host: HostMemory, num_queried_tokens: int, num_hit_tokens: int) -> CacheStatistics:
    """The counts of this moment."""
    return CacheStatistics(
        num_used=pool.num_held,
        num_free=pool.num_free,
        num_queried_tokens=num_queried_tokens,
        num_hit_tokens=num_hit_tokens,
        num_evictions=pool.num_evictions,
        num_host_used=host.num_held,
        num_host_kept=host.num_kept,
        num_host_hits=host.num_returned,
    )
