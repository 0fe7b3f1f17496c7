"""HostPool: the blocks of the swap space in host memory, held by preempted sequences or kept for whoever needs them.

    a block is   free      held (refs > 0)      kept: it bears a hash, like a cached block on the device

Several sequences that shared a block on the device share its one copy on the host, by reference count. Kept blocks give
way to what has to be held, least recently used first; one that is being read is held too. What is in a block and when
it gets there is the runner's business. Knows no tokens, tables or sequences.
"""

from collections import OrderedDict
from collections.abc import Iterable

from aserve.core.ids import BlockHash, HostBlockId


class HostPool:
    """Reference counts, free list and hash index of `num_blocks` host blocks; 0 where there is no swap space."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, "a number of blocks"
        self.num_held = 0
        """Blocks with references."""
        self._refs = [0] * num_blocks
        self._free = [HostBlockId(block) for block in reversed(range(num_blocks))]
        self._kept: OrderedDict[BlockHash, HostBlockId] = OrderedDict()
        self._hashes: dict[HostBlockId, BlockHash] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that are merely kept included."""
        return len(self._refs) - self.num_held

    @property
    def num_kept(self) -> int:
        """Blocks that bear a hash."""
        return len(self._kept)

    def kept_ids(self) -> Iterable[HostBlockId]:
        """The blocks that bear a hash."""
        return self._kept.values()

    def is_held(self, host_id: HostBlockId) -> bool:
        """Whether somebody holds the block."""
        return self._refs[host_id] > 0

    def allocate(self) -> HostBlockId:
        """Take a block, with one reference. There must be one."""
        host_id = self._take()
        assert host_id is not None, "I1: no host block is free"
        self._refs[host_id] = 1
        self.num_held += 1
        return host_id

    def pin(self, host_id: HostBlockId) -> None:
        """Add a reference to a held or kept block."""
        assert self._refs[host_id] > 0 or host_id in self._hashes, f"I3: host block {host_id} pinned while free"
        self.num_held += self._refs[host_id] == 0
        self._refs[host_id] += 1

    def release(self, host_ids: Iterable[HostBlockId]) -> None:
        """Drop one reference each."""
        for host_id in host_ids:
            assert self._refs[host_id] > 0, f"I3: host block {host_id} released while free"
            self._refs[host_id] -= 1
            if self._refs[host_id] == 0:
                self.num_held -= 1
                if host_id not in self._hashes:
                    self._free.append(host_id)

    def keep(self, block_hash: BlockHash) -> HostBlockId | None:
        """A block for what bears the hash; None where it is kept already, or where all blocks are held."""
        if block_hash in self._kept:
            self._kept.move_to_end(block_hash)
            return None
        host_id = self._take()
        if host_id is not None:
            self._kept[block_hash] = host_id
            self._hashes[host_id] = block_hash
        return host_id

    def lookup(self, block_hash: BlockHash) -> HostBlockId | None:
        """The kept block that bears the hash. It stays so only until the next `allocate` or `keep`: `pin` it first."""
        return self._kept.get(block_hash)

    def touch(self, host_id: HostBlockId) -> None:
        """A kept block is being used."""
        self._kept.move_to_end(self._hashes[host_id])

    def forget(self, host_ids: Iterable[HostBlockId]) -> None:
        """Those of the blocks that are kept are so no more."""
        for host_id in host_ids:
            block_hash = self._hashes.pop(host_id, None)
            if block_hash is not None:
                del self._kept[block_hash]
                if self._refs[host_id] == 0:
                    self._free.append(host_id)

    def forget_all(self) -> tuple[HostBlockId, ...]:
        """No block is kept any more. Returns those that were."""
        kept = tuple(self._hashes)
        self.forget(kept)
        return kept

    def check(self, holders: Iterable[Iterable[HostBlockId]]) -> None:
        """Assert I1 to I3 and I8, where `holders` are the host blocks that each holder has. Cost: the whole pool."""
        num_holders = [0] * len(self._refs)
        for host_ids in holders:
            for host_id in host_ids:
                num_holders[host_id] += 1
        assert self._refs == num_holders, f"I2: host blocks: {self._refs} references, {num_holders} holders"
        assert self.num_held == sum(refs > 0 for refs in self._refs), "I1: host blocks are miscounted"
        assert self._hashes == {host_id: block_hash for block_hash, host_id in self._kept.items()}, "I8: host blocks"
        idle = [host_id for host_id, refs in enumerate(self._refs) if refs == 0 and host_id not in self._hashes]
        assert sorted(self._free) == idle, "I3: a host block is free and held, or neither"

    def _take(self) -> HostBlockId | None:
        """A free block, or the least recently used of those that nobody holds."""
        if self._free:
            return self._free.pop()
        unused = next((host_id for host_id in self._kept.values() if self._refs[host_id] == 0), None)
        if unused is not None:
            del self._kept[self._hashes.pop(unused)]
        return unused
