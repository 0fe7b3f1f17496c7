"""BlockPool: who holds each block, which free block goes next, and which block bears which hash.

    a block is   held (refs > 0)            free, empty            free, cached (refs 0, still in the index)
                                            front of the queue     behind, least recently released first

Invariants:
  I1  every block is free or held, and nothing else; the free queue has no duplicates;
  I3  refs > 0 if and only if the block is not in the free queue;
  I5  block 0, the null block, is never free and never held;
  I8  the index names a block by the hash that it bears, and every block that bears one; equal hashes, equal contents;
  I10 but for being forgotten, only a free block loses its hash; a cached one goes after all that were released before.

Knows no tokens, tables or sequences: integers and hashes only.
"""

from collections.abc import Callable, Iterable
from itertools import islice, takewhile

from aserve.core.ids import BlockHash, BlockId
from aserve.kv_cache.free_queue import FreeQueue

NULL_BLOCK = BlockId(0)


class BlockPool:
    """Reference counts, free queue and hash index of `num_blocks` blocks, the null block included."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "the null block and one more"
        self.num_blocks = num_blocks
        self.num_evictions = 0
        """Cached blocks that were given to somebody else."""
        self.on_evict: Callable[[BlockId, BlockHash], None] | None = None
        """Called when a cached block is given to somebody else, who has not written to it yet."""
        self.rehashed: list[tuple[BlockId, bool]] | None = None
        """Blocks that got a hash, or lost theirs, for who looks on; None while nobody does."""
        self._index: dict[BlockHash, BlockId] = {}
        self.restart()

    def restart(self) -> None:
        """Nobody holds a block, and none bears a hash."""
        self._note_losses(self._index.values())
        self._refs = [0] * self.num_blocks
        self._hashes: list[BlockHash | None] = [None] * self.num_blocks
        self._free = FreeQueue(self.num_blocks)
        self._index = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that are cached included."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - 1 - len(self._free)

    def refs(self, block_id: BlockId) -> int:
        """How many hold the block."""
        return self._refs[block_id]

    def lookup(self, block_hash: BlockHash) -> BlockId | None:
        """The block that bears the hash, held or free. It stays so only until the next `allocate`: `pin` it first."""
        return self._index.get(block_hash)

    def lookup_run(self, block_hashes: Iterable[BlockHash]) -> list[BlockId]:
        """The blocks that bear the first hashes, up to one that none bears; that one is consumed, too."""
        found = map(self._index.get, block_hashes)
        return list(takewhile(bool, found))  # type: ignore[arg-type]  # neither None nor the null block is true

    def num_idle(self, block_ids: Iterable[BlockId]) -> int:
        """How many of the blocks nobody holds."""
        return list(map(self._refs.__getitem__, block_ids)).count(0)

    def hash_of(self, block_id: BlockId) -> BlockHash | None:
        """The hash that the block bears in the index."""
        return self._hashes[block_id]

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...]:
        """Take blocks from the front of the free queue, with one reference each. There must be enough."""
        assert num_blocks <= len(self._free), f"I1: {num_blocks} blocks asked for, {len(self._free)} are free"
        taken = self._free.pop(num_blocks)
        refs, hashes = self._refs, self._hashes
        for block_id in taken:
            assert refs[block_id] == 0, f"I10: block {block_id} is given away while it is held"
            refs[block_id] = 1
            block_hash = hashes[block_id]
            if block_hash is not None:
                self._evict(block_id, block_hash)
        return taken

    def pin(self, block_ids: Iterable[BlockId]) -> None:
        """Add one reference each, taking free ones out of the queue."""
        refs = self._refs
        idle = []
        for block_id in block_ids:
            num_refs = refs[block_id]
            if num_refs == 0:
                idle.append(block_id)
            refs[block_id] = num_refs + 1
        self._free.remove(idle)

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """Drop one reference each. Pass a table's blocks tail first, so that a prefix outlives its suffixes.

        A block that nobody holds any more queues up behind the other cached ones, or, when it bears no hash and so
        is of use to nobody, in front of them.
        """
        refs, hashes = self._refs, self._hashes
        cached: list[BlockId] = []
        empty: list[BlockId] = []
        for block_id in block_ids:
            num_refs = refs[block_id] - 1
            assert num_refs >= 0, f"I3: block {block_id} released while free"
            refs[block_id] = num_refs
            if num_refs == 0:
                (empty if hashes[block_id] is None else cached).append(block_id)
        self._free.append(cached)
        self._free.prepend(reversed(empty))  # the last one released is given out first, as if each were prepended alone

    def register(self, block_id: BlockId, block_hash: BlockHash) -> None:
        """Let the block be found by its hash. Of two blocks with equal contents the first stays the one found."""
        assert self._refs[block_id] > 0, f"I6: block {block_id} registered while free"
        assert self._hashes[block_id] is None, f"I4: block {block_id} is registered already"
        if block_hash not in self._index:
            self._index[block_hash] = block_id
            self._hashes[block_id] = block_hash
            if self.rehashed is not None:
                self.rehashed.append((block_id, True))

    def forget(self) -> int:
        """Take every hash out of the index: no block is found any more. Returns how many bore one."""
        num_forgotten = len(self._index)
        self._note_losses(self._index.values())
        for block_id in self._index.values():
            self._hashes[block_id] = None
        self._index.clear()
        return num_forgotten

    def forget_one(self, block_hash: BlockHash) -> None:
        """Nobody finds a block by this hash any more."""
        block_id = self._index.pop(block_hash, None)
        if block_id is not None:
            self._hashes[block_id] = None
            self._note_losses((block_id,))

    def check(self) -> None:
        """Assert I1, I3 and I5, and that index and blocks name each other. Cost: the whole pool."""
        free = [*islice(self._free, self.num_blocks)]  # the null block ends the queue: it cannot be in it (I5)
        is_free = set(free)
        assert len(free) == len(is_free) == len(self._free), "I1: a block is free twice"
        assert self._refs[NULL_BLOCK] == 0, "I5: the null block is held"
        for block_id in map(BlockId, range(1, self.num_blocks)):
            refs = self._refs[block_id]
            assert refs >= 0, f"I1: block {block_id} has {refs} references"
            assert (refs == 0) == (block_id in is_free), f"I3: block {block_id} has {refs} references"
            block_hash = self._hashes[block_id]
            assert block_hash is None or self._index.get(block_hash) == block_id, f"I8: hash of block {block_id}"
        num_hashed = sum(block_hash is not None for block_hash in self._hashes)
        assert num_hashed == len(self._index), "I8: the index names a block that does not bear the hash"

    def _evict(self, block_id: BlockId, block_hash: BlockHash) -> None:
        del self._index[block_hash]
        self._hashes[block_id] = None
        self.num_evictions += 1
        if self.rehashed is not None:
            self.rehashed.append((block_id, False))
        if self.on_evict is not None:
            self.on_evict(block_id, block_hash)

    def _note_losses(self, block_ids: Iterable[BlockId]) -> None:
        """They bear no hash any more."""
        if self.rehashed is not None:
            self.rehashed += [(block_id, False) for block_id in block_ids]
