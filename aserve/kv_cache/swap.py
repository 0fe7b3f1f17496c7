"""HostPool: the blocks of the swap space in host memory, where those of preempted sequences wait.

Several sequences that shared a block on the device share its one copy on the host, by reference count. What is in a
block and when it gets there is the runner's business. Knows no tokens, tables or sequences.
"""

from collections.abc import Iterable

from aserve.core.ids import HostBlockId


class HostPool:
    """Reference counts and free list of `num_blocks` host blocks; 0 where there is no swap space."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, "a number of blocks"
        self._refs = [0] * num_blocks
        self._free = [HostBlockId(block) for block in reversed(range(num_blocks))]

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that swapped sequences hold."""
        return len(self._refs) - len(self._free)

    def is_held(self, host_id: HostBlockId) -> bool:
        """Whether a swapped sequence holds the block."""
        return self._refs[host_id] > 0

    def allocate(self) -> HostBlockId:
        """Take a block, with one reference. There must be one."""
        host_id = self._free.pop()
        self._refs[host_id] = 1
        return host_id

    def pin(self, host_id: HostBlockId) -> None:
        """Add a reference to a held block."""
        assert self._refs[host_id] > 0, f"I3: host block {host_id} pinned while free"
        self._refs[host_id] += 1

    def release(self, host_ids: Iterable[HostBlockId]) -> None:
        """Drop one reference each."""
        for host_id in host_ids:
            assert self._refs[host_id] > 0, f"I3: host block {host_id} released while free"
            self._refs[host_id] -= 1
            if self._refs[host_id] == 0:
                self._free.append(host_id)

    def check(self, holders: Iterable[Iterable[HostBlockId]]) -> None:
        """Assert I1 to I3, where `holders` are the host blocks of each swapped sequence. Cost: the whole pool."""
        num_holders = [0] * len(self._refs)
        for host_ids in holders:
            for host_id in host_ids:
                num_holders[host_id] += 1
        assert self._refs == num_holders, f"I2: host blocks: {self._refs} references, {num_holders} holders"
        idle = [host_id for host_id, refs in enumerate(self._refs) if refs == 0]
        assert sorted(self._free) == idle, "I3: a host block is free and held, or neither"
