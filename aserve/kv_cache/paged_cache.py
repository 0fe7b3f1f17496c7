"""PagedCache: all that the scheduler sees of the KV cache. Knows tables and tokens, no sequences and no time.

Four verbs: `acquire` (match a prefix, pin it, reserve the rest), `reserve` (grow), `seal` (full blocks that have landed
become shareable), `free`. All are synchronous and whole: nothing comes between lookup and pin (I7).

  I2 a block's references are the tables that hold it;
  I4 whatever is not sealed has one holder, and no hash;
  I9 a hit is a multiple of the block size, and shorter than the prompt: the last token is computed, to be sampled from.
"""

from collections.abc import Iterable, Sequence

import msgspec

from aserve.core.ids import BlockId
from aserve.kv_cache.block_pool import BlockPool
from aserve.kv_cache.hashing import extend_chain, root_hash
from aserve.kv_cache.table import NEVER, BlockTable


class CacheStatistics(msgspec.Struct, frozen=True):
    """Blocks now, and counters since the start.

    num_used: blocks held by sequences; those that are merely cached count as free.
    num_queried_tokens, num_hit_tokens: tokens that sequences came with, and of these the ones found in the cache.
    num_evictions: cached blocks that were given to somebody else.
    """

    num_used: int
    num_free: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_evictions: int


class PagedCache:
    """`num_blocks` blocks (the null block included) of `block_size` positions."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        assert block_size >= 1, "a block holds a position"
        self.block_size = block_size
        self._caches_prefixes = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can hold: all but the null block."""
        return self._pool.num_blocks - 1

    def new_table(self, salt: bytes) -> BlockTable:
        """An empty table whose blocks are shared under equal salts only."""
        return BlockTable(root_hash(salt))

    def acquire(
        self, table: BlockTable, token_ids: Sequence[int], *, num_spare_blocks: int = 0
    ) -> tuple[BlockId, ...] | None:
        """Give an empty table blocks for all of `token_ids`: the longest cached prefix, then new ones.

        Returns the cached ones, or None, with nothing changed, if fewer than `num_spare_blocks` would be left free.
        """
        assert not table.block_ids, "I11: the table holds blocks"
        hits = self._match(table, token_ids)
        num_new = -(-len(token_ids) // self.block_size) - len(hits)
        num_idle_hits = sum(self._pool.refs(block_id) == 0 for block_id in hits)
        if num_new + num_spare_blocks > self._pool.num_free - num_idle_hits:
            return None
        self._pool.pin(hits)
        self._num_queried_tokens += len(token_ids)
        self._num_hit_tokens += len(hits) * self.block_size
        table.block_ids.extend(hits)
        table.num_sealed = len(hits)
        table.seal_at = (len(hits) + 1) * self.block_size if self._caches_prefixes else NEVER
        self._grow(table, num_new)
        return hits

    def reserve(self, table: BlockTable, num_positions: int) -> tuple[BlockId, ...] | None:
        """Grow the table until it holds `num_positions`. Returns the new blocks, None if too few are free."""
        num_new = -(-num_positions // self.block_size) - len(table.block_ids)
        return self._grow(table, num_new) if num_new <= self._pool.num_free else None

    def seal(self, table: BlockTable, token_ids: Sequence[int], num_landed: int) -> None:
        """Make the full blocks of the first `num_landed` positions, whose step has landed (I6), shareable."""
        num_full = num_landed // self.block_size
        extend_chain(table.hashes, token_ids, num_full, self.block_size)
        for index in range(table.num_sealed, num_full):
            self._pool.register(table.block_ids[index], table.hashes[index + 1])
        table.num_sealed = num_full
        table.seal_at = (num_full + 1) * self.block_size

    def free(self, table: BlockTable) -> None:
        """Give all blocks back, tail first (I10). An empty table has nothing to give."""
        self._pool.release(reversed(table.block_ids))
        table.block_ids.clear()
        table.capacity = table.num_sealed = 0
        table.seal_at = NEVER

    def statistics(self) -> CacheStatistics:
        """A snapshot."""
        return CacheStatistics(
            num_used=self._pool.num_held,
            num_free=self._pool.num_free,
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_evictions=self._pool.num_evictions,
        )

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Assert I1 to I5 and I12, where `tables` are all that hold blocks. Cost: the whole pool."""
        self._pool.check()
        num_holders = [0] * self._pool.num_blocks
        for table in tables:
            assert len(set(table.block_ids)) == len(table.block_ids), "I4: a table holds a block twice"
            assert table.capacity == len(table.block_ids) * self.block_size, "a table's capacity is that of its blocks"
            for block_id in table.block_ids:
                num_holders[block_id] += 1
            for block_id in table.block_ids[table.num_sealed :]:
                assert self._pool.refs(block_id) == 1, f"I4: block {block_id} is shared before it is sealed"
                assert self._pool.hash_of(block_id) is None, f"I4: block {block_id} has a hash before it is sealed"
        for block_id in map(BlockId, range(self._pool.num_blocks)):
            refs = self._pool.refs(block_id)
            assert refs == num_holders[block_id], f"I2: block {block_id}: {refs} references, {num_holders[block_id]}"

    def _match(self, table: BlockTable, token_ids: Sequence[int]) -> tuple[BlockId, ...]:
        """The cached blocks of the longest prefix that leaves a token to compute (I9). Pins nothing."""
        if not self._caches_prefixes:
            return ()
        num_full = (len(token_ids) - 1) // self.block_size
        extend_chain(table.hashes, token_ids, num_full, self.block_size)
        hits = []
        for block_hash in table.hashes[1 : num_full + 1]:
            block_id = self._pool.lookup(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return tuple(hits)

    def _grow(self, table: BlockTable, num_new: int) -> tuple[BlockId, ...]:
        new_blocks = self._pool.allocate(num_new)
        table.block_ids.extend(new_blocks)
        table.capacity = len(table.block_ids) * self.block_size
        return new_blocks
