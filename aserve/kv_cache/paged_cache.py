"""PagedCache: all that the scheduler sees of the KV cache. Knows tables and tokens, no sequences and no time.

Four verbs: `acquire` (match a prefix, pin it, reserve the rest), `reserve` (grow), `seal` (full blocks that have landed
become shareable), `free`. Two for sequences with a past in common: `fork` (a new table beside another) and `rebase` (a
table takes another's past for its own). Two for memory that is short: `swap_out` and `swap_in`. All are synchronous and
whole: nothing comes between lookup and pin. What has to be copied is returned, or with the host's memory gathered
until `take_host_moves`, and done by the runner before the next step runs.

  I2 a block's references are the tables that hold it;
  I4 whatever is neither sealed nor shared by a fork has one holder, and no hash;
  I9 a hit is a multiple of the block size, and shorter than the prompt: the last token is computed, to be sampled from;
  I23 a block that no later position sees is given back, and one that some later position sees is not.

    fork at position 5, P = 4:   source [ 7 , 3 , 9 ]        block 7 is shared, 3 is copied to 8, 9 is not common
                                 table  [ 7 , 8 ]

Of models with sliding windows a span of positions takes a block per layer group (core/layout.py, table.py), and the
null block stands for those that nobody sees any more (I23). A table of theirs grows with the chunks of its prompt, not
at once: a long prompt needs all of its blocks at no time.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from aserve.core.ids import BlockHash, BlockId, ExtraKey, HostBlockId
from aserve.core.layout import Footprint, Window
from aserve.kv_cache.block_pool import NULL_BLOCK, BlockPool
from aserve.kv_cache.checks import check_tables, check_visible
from aserve.kv_cache.evictions import Evictions
from aserve.kv_cache.hashing import extend_chain, prompt_hashes, root_hash
from aserve.kv_cache.host_memory import HostMemory, OnHost, SwapIn, SwapOut
from aserve.kv_cache.matching import Matcher
from aserve.kv_cache.prefix import block_name
from aserve.kv_cache.statistics import CacheStatistics, snapshot
from aserve.kv_cache.table import NEVER, BlockTable

Copy = tuple[BlockId, BlockId]
"""From a device block to another."""


class PagedCache:
    """`num_blocks` blocks (the null block included) of `block_size` positions, and `num_host_blocks` to swap to.

    windows: of each layer group. max_chunk: positions of a sequence that a step computes at most.
    keeps_evicted: whether cached blocks live on in host memory when others get them; see host_memory.py.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        windows: Sequence[Window] = (None,),
        max_chunk: int = 1,
        keeps_evicted: bool = False,
    ) -> None:
        assert block_size >= 1, "a block holds a position"
        self.block_size = block_size
        self.num_groups = len(windows)
        """Blocks in a span."""
        self.footprint = Footprint(tuple(windows), block_size, max_chunk)
        self._has_windows = self.footprint.has_windows
        self.caches_prefixes = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self.has_host_memory = num_host_blocks > 0
        self._host = HostMemory(self._pool, num_host_blocks, keeps_evicted=keeps_evicted and enable_prefix_caching)
        self._matcher = Matcher(self._pool, self._host, self.footprint, is_on=enable_prefix_caching)
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._evictions: Evictions | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can hold: all but the null block."""
        return self._pool.num_blocks - 1

    def prompt_hashes(
        self, salt: bytes, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = ()
    ) -> Iterator[list[BlockHash]]:
        """What `acquire` would hash of a prompt, some blocks at a time. Touches nothing: it may be done beforehand."""
        return prompt_hashes(salt, token_ids, self.block_size, extra_keys) if self.caches_prefixes else iter(())

    def new_table(
        self, salt: bytes, prompt_hashes: Iterable[BlockHash] = (), extra_keys: Sequence[ExtraKey] = ()
    ) -> BlockTable:
        """An empty table whose blocks are shared under equal salts and keys only. prompt_hashes: known beforehand."""
        (table := BlockTable(root_hash(salt), extra_keys)).hashes.extend(prompt_hashes)
        return table

    def num_cached(self, table: BlockTable, token_ids: Sequence[int]) -> int:
        """Tokens that `acquire` would find at this moment."""
        return len(self._matcher.match(table, token_ids)) // self.num_groups * self.block_size

    def acquire(
        self, table: BlockTable, token_ids: Sequence[int], *, num_spare_blocks: int = 0, reads_cache: bool = True
    ) -> tuple[BlockId, ...] | None:
        """Give an empty table blocks for all of `token_ids`: the longest cached prefix, then new ones.

        With windows the cached ones alone, if there will be room for the others as it grows.
        Returns the cached ones, or None, with nothing changed, if fewer than `num_spare_blocks` would be left free.
        reads_cache: False takes no cached block, so that every position is computed: a prompt whose tokens are scored
        needs the logits of each, which no block keeps.
        """
        assert not table.block_ids, "I11: the table holds blocks"
        hits = self._matcher.match(table, token_ids) if reads_cache else []
        on_host = [place for place in hits if isinstance(place, OnHost)] if self.has_host_memory else []
        on_device = [place for place in hits if not isinstance(place, OnHost)] if on_host else hits
        held = self._held(on_device)  # type: ignore[arg-type]
        num_needed = max(self.footprint.peak(len(token_ids)) - len(held), len(on_host))
        if num_needed + num_spare_blocks > self._pool.num_free - self._pool.num_idle(held):
            return None
        num_hits = len(hits) // self.num_groups
        self._pool.pin(held)
        self._num_queried_tokens += len(token_ids)
        self._num_hit_tokens += num_hits * self.block_size
        self._take_hits(table, hits, on_host)
        self._grow(table, 0 if self._has_windows else num_needed - len(on_host))
        return tuple(table.block_ids[: len(hits)])

    def can_fork(self, source: BlockTable, num_common: int) -> bool:
        """Whether the source has not given back what the position after its first `num_common` sees."""
        return all(
            first * self.block_size >= min(num_common, source.capacity)
            or source.block_ids[first * self.num_groups + group] != NULL_BLOCK
            for group, first in self.footprint.first_visible(num_common)
        )

    def fork(
        self, source: BlockTable, table: BlockTable, num_common: int, num_positions: int, *, num_spare_blocks: int = 0
    ) -> tuple[Copy, ...] | None:
        """Give an empty table the first `num_common` positions of `source`, and new blocks up to `num_positions`.

        Full blocks are shared; one that both will write to is copied: the copies to make are returned. With windows
        there are no new blocks beyond those, if there will be room for them; see `can_fork`.
        None, with nothing changed, if fewer than `num_spare_blocks` would be left free.
        """
        assert not table.block_ids, "I11: the table holds blocks"
        assert num_common <= source.capacity, "the source holds what is forked from it"
        num_full, num_partial = divmod(num_common, self.block_size)
        num_shared = len(self._held(source.block_ids[: num_full * self.num_groups]))
        num_needed = self.footprint.peak(num_positions) - num_shared
        num_new = num_needed
        if self._has_windows:
            num_new = bool(num_partial) * self.num_groups
            num_needed = max(num_needed, num_new)
        if num_needed + num_spare_blocks > self._pool.num_free:
            return None
        self._share(source, table, num_full)
        if self._has_windows:
            self._give_back_unseen(table, num_common)
        self._grow(table, num_new)
        return self._copies(source, table.block_ids, num_full) if num_partial else ()

    def rebase(self, table: BlockTable, parent: BlockTable, num_positions: int) -> tuple[Copy, ...]:
        """Make `parent`'s first `num_positions` those of `table`, which holds as many of its own. Needs no free block.

        The block that it was writing to stays, as the place to which the parent's is copied.
        """
        num_full, num_partial = divmod(num_positions, self.block_size)
        first_written = num_full * self.num_groups
        written = table.block_ids[first_written:]
        assert len(written) == bool(num_partial) * self.num_groups, "both hold the same positions"
        old = self._held(table.block_ids[:first_written])
        table.block_ids.clear()
        self._share(parent, table, num_full)
        self._pool.release(reversed(old))
        table.block_ids.extend(written)
        return self._copies(parent, table.block_ids, num_full) if num_partial else ()

    def reserve(self, table: BlockTable, num_positions: int) -> tuple[BlockId, ...] | None:
        """Grow the table until it holds `num_positions`. Returns the new blocks, None if too few are free."""
        num_new = max(0, -(-num_positions // self.block_size) * self.num_groups - len(table.block_ids))
        return self._grow(table, num_new) if num_new <= self._pool.num_free else None

    def reserve_most(self, table: BlockTable, num_positions: int) -> None:
        """Grow the table until it holds `num_positions`, or as many as the free blocks allow."""
        num_free_spans = self._pool.num_free // self.num_groups
        self.reserve(table, min(num_positions, table.capacity + num_free_spans * self.block_size))

    def seal(self, table: BlockTable, token_ids: Sequence[int], num_landed: int) -> None:
        """Make the full blocks of the first `num_landed` positions, whose step has landed (I6), shareable.

        Then give back those that no later position sees (I23).
        """
        num_full = num_landed // self.block_size
        if self.caches_prefixes:
            extend_chain(table.hashes, token_ids, num_full, self.block_size, table.extra_keys)
            pool, num_groups = self._pool, self.num_groups
            for entry in range(table.num_sealed * num_groups, num_full * num_groups):
                block_id = table.block_ids[entry]
                if block_id and pool.hash_of(block_id) is None:  # else it is null, or another has sealed it
                    pool.register(block_id, table.hashes[entry + 1] if num_groups == 1 else self._name(table, entry))
        self._set_sealed(table, num_full)
        if self._has_windows:
            self._give_back_unseen(table, num_landed)

    def rewind(self, table: BlockTable, num_landed: int) -> None:
        """What lies behind the first `num_landed` positions never landed: it is written again, and not shared."""
        table.num_shared = min(table.num_shared, num_landed // self.block_size)

    def quarantine(self, tables: Sequence[BlockTable], num_trusted: int) -> list[BlockId]:
        """Nobody finds what is behind the first `num_trusted` positions. Returns the blocks that no other table has."""
        first = num_trusted // self.block_size * self.num_groups
        num_holders: Counter[BlockId] = Counter()
        for table in tables:
            num_holders.update(self._held(table.block_ids[first:]))
            for entry in range(first, (len(table.hashes) - 1) * self.num_groups):
                self._pool.forget_one(self._name(table, entry))
                self._host.forget_one(self._name(table, entry))
        return [block_id for block_id, count in num_holders.items() if count == self._pool.refs(block_id)]

    def free(self, table: BlockTable) -> None:
        """Give all blocks back, tail first (I10). An empty table has nothing to give."""
        self._pool.release(reversed(self._held(table.block_ids)))
        table.block_ids.clear()
        table.capacity = table.num_sealed = table.num_shared = 0
        table.seal_at = NEVER
        if self._host.has_moves:
            self._host.drop_moves_to_free_blocks()

    def swap_out(self, tables: Sequence[BlockTable]) -> tuple[SwapOut, ...] | None:
        """Move tables to the host, a block that several share once. None, nothing changed, if it is too full."""
        moves = self._host.put(tables)
        if moves is None:
            return None
        for table in tables:
            num_shared = max(table.num_shared, table.num_sealed)
            self.free(table)
            table.num_shared = num_shared
        return moves

    def swap_in(
        self, tables: Sequence[BlockTable], *, beside: Sequence[BlockTable] = (), num_spare_blocks: int = 0
    ) -> tuple[SwapIn, ...] | None:
        """Move tables back. None, nothing changed, if fewer than `num_spare_blocks` would be left free.

        beside: tables of the same group that hold blocks. What they or the prefix cache have is shared, not copied.
        They are sealed anew when a step has landed on them: before, nobody knows that the move went well (I6).
        """
        on_device: dict[HostBlockId, BlockId] = {}
        for table in tables:
            on_device.update(self._matcher.on_device(table, beside))
        moves = self._host.fetch(tables, on_device, num_spare_blocks)
        if moves is None:
            return None
        for table in tables:
            table.capacity = len(table.block_ids) // self.num_groups * self.block_size
            self._set_sealed(table, 0)
        return moves

    def free_host(self, table: BlockTable) -> None:
        """Give the table's place on the host back."""
        self._host.leave(table)

    def distrust_host(self, host_ids: Iterable[HostBlockId]) -> None:
        """What was to be copied there may not have come: the host tier forgets it."""
        self._host.distrust(host_ids)

    def take_host_moves(self) -> tuple[tuple[SwapOut, ...], tuple[SwapIn, ...]]:
        """What has to go to the host, and then to come from it, before the next step; a plan takes it along."""
        return self._host.take_moves()

    def is_cached(self, block_hash: BlockHash) -> bool:
        """Whether a block of the first layer group bears the hash, on the device or in the host tier."""
        return self._pool.lookup(block_hash) is not None or self._host.find(block_hash) is not None

    def reset(self) -> int:
        """Forget what is cached: blocks stay with their holders, and nobody finds them. Returns how many it was."""
        num_kept = self._host.num_kept
        self._host.forget_kept()
        return self._pool.forget() + num_kept

    def restart(self) -> None:
        """Nobody holds anything, here or on the host, and nothing is found any more. Tables are to be thrown away."""
        self._pool.restart()
        self._host.restart()

    # For who looks on.

    def note_hashes(self, into: list[tuple[BlockId, bool]] | None) -> None:
        """From now on append here which blocks get a hash (True) or lose it (False); None: note nothing any more."""
        self._pool.rehashed = into

    def hashed_blocks(self) -> list[BlockId]:
        """All that bear a hash. Cost: the whole pool."""
        return [block for block in map(BlockId, range(1, self._pool.num_blocks)) if self._pool.hash_of(block)]

    def note_evictions(self) -> None:
        """From now on remember which hashes were evicted, for `was_evicted`."""
        if self._evictions is None:
            self._evictions = self._pool.on_evict = Evictions(self._pool.on_evict)

    def was_evicted(self, table: BlockTable, span: int) -> bool:
        """Whether a block of a span of which the table has the hash was cached, and is remembered to be evicted."""
        evictions = self._evictions
        if evictions is None:
            return False
        return any(block_name(table.hashes[span + 1], group) in evictions for group in range(self.num_groups))

    def kept_on_host(self) -> frozenset[HostBlockId]:
        """The blocks of the host tier."""
        return frozenset(self._host.kept_ids)

    @property
    def num_kept_on_host(self) -> int:
        """How many they are."""
        return self._host.num_kept

    def statistics(self) -> CacheStatistics:
        """A snapshot."""
        return snapshot(self._pool, self._host, self._num_queried_tokens, self._num_hit_tokens)

    def check_visible(self, table: BlockTable, position: int) -> None:
        """Assert I23, where `position` is the first of a sequence that has not landed."""
        check_visible(table, position, self.footprint.windows, self.block_size)

    def check(self, tables: Collection[BlockTable], swapped: Collection[BlockTable] = ()) -> None:
        """Assert I1 to I5 and I12, where `tables` hold blocks, `swapped` host blocks, and no others do."""
        self._pool.check()
        self._host.check(swapped)
        check_tables(self._pool, tables, self.num_groups, self.block_size)

    def _take_hits(self, table: BlockTable, hits: list[BlockId | OnHost], on_host: list[OnHost]) -> None:
        """They become an empty table's. What comes from the host is sealed when a step has landed on it (I6)."""
        num_sealed = num_hits = len(hits) // self.num_groups
        if on_host:
            num_sealed = hits.index(on_host[0]) // self.num_groups
            table.num_shared = num_hits
            came_back = iter(self._host.bring_back(on_host))
            hits = [next(came_back) if isinstance(place, OnHost) else place for place in hits]
        table.block_ids.extend(hits)  # type: ignore[arg-type]  # all are on the device by now
        self._set_sealed(table, num_sealed)

    def _share(self, source: BlockTable, table: BlockTable, num_full: int) -> None:
        """The first spans of `source` become those of an empty table: its tokens and their hashes are the same."""
        table.block_ids.extend(source.block_ids[: num_full * self.num_groups])
        self._pool.pin(self._held(table.block_ids))
        table.hashes[:] = source.hashes[: num_full + 1]
        table.num_shared = num_full
        source.num_shared = max(source.num_shared, num_full)
        self._set_sealed(table, min(source.num_sealed, num_full))

    def _set_sealed(self, table: BlockTable, num_sealed: int) -> None:
        table.num_sealed = num_sealed
        table.seal_at = (num_sealed + 1) * self.block_size if self.caches_prefixes or self._has_windows else NEVER

    def _grow(self, table: BlockTable, num_new: int) -> tuple[BlockId, ...]:
        new_blocks = self._pool.allocate(num_new)
        table.block_ids.extend(new_blocks)
        table.capacity = len(table.block_ids) * self.block_size // self.num_groups
        return new_blocks

    # Layer groups.

    def _give_back_unseen(self, table: BlockTable, num_landed: int) -> None:
        """Release the blocks before those that the next position sees. They keep their hashes, for others to find."""
        dropped = []
        for group, first in self.footprint.first_visible(num_landed):
            entry = (first - 1) * self.num_groups + group
            while entry >= 0 and table.block_ids[entry] != NULL_BLOCK:
                dropped.append(table.block_ids[entry])
                table.block_ids[entry] = NULL_BLOCK
                entry -= self.num_groups
        self._pool.release(dropped)

    def _held(self, block_ids: Sequence[BlockId]) -> Sequence[BlockId]:
        """Without the null block, which nobody holds."""
        return [block_id for block_id in block_ids if block_id != NULL_BLOCK] if self._has_windows else block_ids

    def _name(self, table: BlockTable, entry: int) -> BlockHash:
        """The hash of what is in a block of the table."""
        span, group = divmod(entry, self.num_groups)
        return block_name(table.hashes[span + 1], group)

    def _copies(self, source: BlockTable, targets: Sequence[BlockId], span: int) -> tuple[Copy, ...]:
        """One for each group's block of the span."""
        entries = slice(span * self.num_groups, (span + 1) * self.num_groups)
        return tuple(zip(source.block_ids[entries], targets[entries], strict=True))
