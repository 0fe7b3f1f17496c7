"""PagedCache: all that the scheduler sees of the KV cache. Knows tables and tokens, no sequences and no time.

Four verbs: `acquire` (match a prefix, pin it, reserve the rest), `reserve` (grow), `seal` (full blocks that have landed
become shareable), `free`. Two for sequences with a past in common: `fork` (a new table beside another) and `rebase` (a
table takes another's past for its own). Two for memory that is short: `swap_out` and `swap_in`. All are synchronous and
whole: nothing comes between lookup and pin (I7). What has to be copied is returned, and done by the runner before the
next step runs.

  I2 a block's references are the tables that hold it;
  I4 whatever is neither sealed nor shared by a fork has one holder, and no hash;
  I9 a hit is a multiple of the block size, and shorter than the prompt: the last token is computed, to be sampled from.

    fork at position 5, P = 4:   source [ 7 , 3 , 9 ]        block 7 is shared, 3 is copied to 8, 9 is not common
                                 table  [ 7 , 8 ]
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from aserve.core.ids import BlockId, HostBlockId
from aserve.kv_cache.block_pool import BlockPool
from aserve.kv_cache.hashing import extend_chain, root_hash
from aserve.kv_cache.swap import HostPool
from aserve.kv_cache.table import NEVER, BlockTable

Copy = tuple[BlockId, BlockId]
"""From a device block to another."""


class CacheStatistics(msgspec.Struct, frozen=True):
    """Blocks now, and counters since the start.

    num_used: blocks held by sequences; those that are merely cached count as free.
    num_queried_tokens, num_hit_tokens: tokens that sequences came with, and of these the ones found in the cache.
    num_evictions: cached blocks that were given to somebody else.
    num_host_used: blocks of the swap space that are held.
    """

    num_used: int
    num_free: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_evictions: int
    num_host_used: int = 0


class PagedCache:
    """`num_blocks` blocks (the null block included) of `block_size` positions, and `num_host_blocks` to swap to."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_host_blocks: int = 0, enable_prefix_caching: bool = True
    ) -> None:
        assert block_size >= 1, "a block holds a position"
        self.block_size = block_size
        self._caches_prefixes = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._host = HostPool(num_host_blocks)
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can hold: all but the null block."""
        return self._pool.num_blocks - 1

    def new_table(self, salt: bytes) -> BlockTable:
        """An empty table whose blocks are shared under equal salts only."""
        return BlockTable(root_hash(salt))

    def num_cached(self, table: BlockTable, token_ids: Sequence[int]) -> int:
        """Tokens that `acquire` would find at this moment."""
        return len(self._match(table, token_ids)) * self.block_size

    def acquire(
        self, table: BlockTable, token_ids: Sequence[int], *, num_spare_blocks: int = 0, reads_cache: bool = True
    ) -> tuple[BlockId, ...] | None:
        """Give an empty table blocks for all of `token_ids`: the longest cached prefix, then new ones.

        Returns the cached ones, or None, with nothing changed, if fewer than `num_spare_blocks` would be left free.
        reads_cache: False computes everything anew, for who needs what comes out on the way.
        """
        assert not table.block_ids, "I11: the table holds blocks"
        hits = self._match(table, token_ids) if reads_cache else ()
        num_new = -(-len(token_ids) // self.block_size) - len(hits)
        num_idle_hits = sum(self._pool.refs(block_id) == 0 for block_id in hits)
        if num_new + num_spare_blocks > self._pool.num_free - num_idle_hits:
            return None
        self._pool.pin(hits)
        self._num_queried_tokens += len(token_ids)
        self._num_hit_tokens += len(hits) * self.block_size
        table.block_ids.extend(hits)
        self._set_sealed(table, len(hits))
        self._grow(table, num_new)
        return hits

    def fork(
        self, source: BlockTable, table: BlockTable, num_common: int, num_positions: int, *, num_spare_blocks: int = 0
    ) -> tuple[Copy, ...] | None:
        """Give an empty table the first `num_common` positions of `source`, and new blocks up to `num_positions`.

        Full blocks are shared; the one that both will write to is copied: the copy to make is returned, if one is.
        None, with nothing changed, if fewer than `num_spare_blocks` would be left free.
        """
        assert not table.block_ids, "I11: the table holds blocks"
        assert num_common <= source.capacity, "the source holds what is forked from it"
        num_full, num_partial = divmod(num_common, self.block_size)
        num_new = -(-num_positions // self.block_size) - num_full
        if num_new + num_spare_blocks > self._pool.num_free:
            return None
        self._share(source, table, num_full)
        self._grow(table, num_new)
        return ((source.block_ids[num_full], table.block_ids[num_full]),) if num_partial else ()

    def rebase(self, table: BlockTable, parent: BlockTable, num_positions: int) -> tuple[Copy, ...]:
        """Make `parent`'s first `num_positions` those of `table`, which holds as many of its own. Needs no free block.

        The block that it was writing to stays, as the place to which the parent's is copied.
        """
        num_full, num_partial = divmod(num_positions, self.block_size)
        written = table.block_ids[num_full:]
        assert len(written) == bool(num_partial), "both hold the same positions"
        old = table.block_ids[:num_full]
        table.block_ids.clear()
        self._share(parent, table, num_full)
        self._pool.release(reversed(old))
        table.block_ids.extend(written)
        return ((parent.block_ids[num_full], written[0]),) if num_partial else ()

    def reserve(self, table: BlockTable, num_positions: int) -> tuple[BlockId, ...] | None:
        """Grow the table until it holds `num_positions`. Returns the new blocks, None if too few are free."""
        num_new = -(-num_positions // self.block_size) - len(table.block_ids)
        return self._grow(table, num_new) if num_new <= self._pool.num_free else None

    def seal(self, table: BlockTable, token_ids: Sequence[int], num_landed: int) -> None:
        """Make the full blocks of the first `num_landed` positions, whose step has landed (I6), shareable."""
        num_full = num_landed // self.block_size
        extend_chain(table.hashes, token_ids, num_full, self.block_size)
        for index in range(table.num_sealed, num_full):
            if self._pool.hash_of(table.block_ids[index]) is None:  # else it is shared, and was sealed by another
                self._pool.register(table.block_ids[index], table.hashes[index + 1])
        self._set_sealed(table, num_full)

    def free(self, table: BlockTable) -> None:
        """Give all blocks back, tail first (I10). An empty table has nothing to give."""
        self._pool.release(reversed(table.block_ids))
        table.block_ids.clear()
        table.capacity = table.num_sealed = table.num_shared = 0
        table.seal_at = NEVER

    def swap_out(self, tables: Sequence[BlockTable]) -> tuple[tuple[BlockId, HostBlockId], ...] | None:
        """Move tables to the host, a block that several share once. None, nothing changed, if it is too full."""
        places: dict[BlockId, HostBlockId] = {}
        if len({block_id for table in tables for block_id in table.block_ids}) > self._host.num_free:
            return None
        for table in tables:
            for block_id in table.block_ids:
                if block_id in places:
                    self._host.pin(places[block_id])
                else:
                    places[block_id] = self._host.allocate()
                table.host_ids.append(places[block_id])
        for table in tables:
            num_shared = max(table.num_shared, table.num_sealed)
            self.free(table)
            table.num_shared = num_shared
        return tuple(places.items())

    def swap_in(
        self, tables: Sequence[BlockTable], *, beside: Sequence[BlockTable] = (), num_spare_blocks: int = 0
    ) -> tuple[tuple[HostBlockId, BlockId], ...] | None:
        """Move tables back. None, nothing changed, if fewer than `num_spare_blocks` would be left free.

        beside: tables of the same group that hold blocks. What they or the prefix cache have is shared, not copied.
        They are sealed anew when a step has landed on them: before, nobody knows that the move went well (I6).
        """
        places: dict[HostBlockId, BlockId] = {}
        for table in tables:
            places.update(self._on_device(table, beside))
        hits = tuple(places.values())
        missing = [h for h in dict.fromkeys(h for table in tables for h in table.host_ids) if h not in places]
        num_idle_hits = sum(self._pool.refs(block_id) == 0 for block_id in set(hits))
        if len(missing) + num_spare_blocks > self._pool.num_free - num_idle_hits:
            return None
        self._pool.pin(hits)
        moved = tuple(zip(missing, self._pool.allocate(len(missing)), strict=True))
        places.update(moved)
        unshared = set(places)
        for table in tables:
            table.block_ids.extend(places[host_id] for host_id in table.host_ids)
            self._pool.pin(places[host_id] for host_id in table.host_ids if host_id not in unshared)
            unshared.difference_update(table.host_ids)
            table.capacity = len(table.block_ids) * self.block_size
            self._set_sealed(table, 0)
            self.free_host(table)
        return moved

    def _on_device(self, table: BlockTable, beside: Sequence[BlockTable]) -> Iterator[tuple[HostBlockId, BlockId]]:
        """Of a table on the host, the blocks that somebody on the device has, or the prefix cache."""
        others = [(other, max(other.num_sealed, other.num_shared)) for other in beside]
        for index in range(min(table.num_shared, len(table.hashes) - 1)):
            block_hash = table.hashes[index + 1]
            block_id = self._pool.lookup(block_hash)
            for other, num_full in others:
                if block_id is None and index < num_full and other.hashes[index + 1] == block_hash:
                    block_id = other.block_ids[index]
            if block_id is not None:
                yield table.host_ids[index], block_id

    def is_held_on_host(self, host_id: HostBlockId) -> bool:
        """Whether a table on the host holds the block."""
        return self._host.is_held(host_id)

    def free_host(self, table: BlockTable) -> None:
        """Give the table's place on the host back."""
        self._host.release(table.host_ids)
        table.host_ids.clear()

    def reset(self) -> int:
        """Forget what is cached: blocks stay with their holders, and nobody finds them. Returns how many it was."""
        return self._pool.forget()

    def statistics(self) -> CacheStatistics:
        """A snapshot."""
        return CacheStatistics(
            num_used=self._pool.num_held,
            num_free=self._pool.num_free,
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_evictions=self._pool.num_evictions,
            num_host_used=self._host.num_held,
        )

    def check(self, tables: Iterable[BlockTable], swapped: Iterable[BlockTable] = ()) -> None:
        """Assert I1 to I5 and I12, where `tables` hold blocks, `swapped` host blocks, and no others do.

        Cost: the whole pool.
        """
        self._pool.check()
        self._host.check(table.host_ids for table in swapped)
        num_holders = [0] * self._pool.num_blocks
        for table in tables:
            assert len(set(table.block_ids)) == len(table.block_ids), "I4: a table holds a block twice"
            assert table.capacity == len(table.block_ids) * self.block_size, "a table's capacity is that of its blocks"
            for block_id in table.block_ids:
                num_holders[block_id] += 1
            assert not table.host_ids, "I11: a table is in two places"
            for block_id in table.block_ids[max(table.num_sealed, table.num_shared) :]:
                assert self._pool.refs(block_id) == 1, f"I4: block {block_id} is shared and may be written"
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

    def _share(self, source: BlockTable, table: BlockTable, num_full: int) -> None:
        """The first blocks of `source` become those of an empty table: its tokens and their hashes are the same."""
        table.block_ids.extend(source.block_ids[:num_full])
        self._pool.pin(table.block_ids)
        table.hashes[:] = source.hashes[: num_full + 1]
        table.num_shared = num_full
        source.num_shared = max(source.num_shared, num_full)
        self._set_sealed(table, min(source.num_sealed, num_full))

    def _set_sealed(self, table: BlockTable, num_sealed: int) -> None:
        table.num_sealed = num_sealed
        table.seal_at = (num_sealed + 1) * self.block_size if self._caches_prefixes else NEVER

    def _grow(self, table: BlockTable, num_new: int) -> tuple[BlockId, ...]:
        new_blocks = self._pool.allocate(num_new)
        table.block_ids.extend(new_blocks)
        table.capacity = len(table.block_ids) * self.block_size
        return new_blocks
