"""FreeQueue: block ids in the order in which they are to go, as a ring of two lists that never grow.

                 .----------- next ----------.
    next[0] -> first -> ... -> last -> 0 ----'        0, the null block, is never in it: it is where the ring is open

Whatever is done to a block costs the same wherever it is, and nothing is allocated or moved: among a hundred thousand
blocks a dict that things enter and leave rebuilds itself now and then, for as long as several steps take. After vLLM's
`FreeKVCacheBlockQueue`, which links objects.
"""

from collections.abc import Iterable, Iterator, Sequence

from aserve.core.ids import BlockId


class FreeQueue:
    """All blocks but the null block, lowest first. Who adds or removes a block knows whether it is here."""

    def __init__(self, num_blocks: int) -> None:
        last = num_blocks - 1
        self._next = [BlockId(block) for block in (*range(1, num_blocks), 0)]
        self._previous = [BlockId(block) for block in (last, *range(last))]
        self._num = last

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[BlockId]:
        block_id = self._next[0]
        while block_id:
            yield block_id
            block_id = self._next[block_id]

    def pop(self, num_blocks: int) -> tuple[BlockId, ...]:
        """Take the first ones; there are as many."""
        following = self._next
        taken = []
        block_id = BlockId(0)
        for _ in range(num_blocks):
            block_id = following[block_id]
            taken.append(block_id)
        self._link(BlockId(0), following[block_id])
        self._num -= num_blocks
        return tuple(taken)

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        """Take these out, wherever they are."""
        following, previous = self._next, self._previous
        for block_id in block_ids:
            before, after = previous[block_id], following[block_id]
            following[before] = after
            previous[after] = before
        self._num -= len(block_ids)

    def append(self, block_ids: Iterable[BlockId]) -> None:
        """Put these at the end, in their order."""
        self._insert(self._previous[0], block_ids)

    def prepend(self, block_ids: Iterable[BlockId]) -> None:
        """Put these in front, in their order."""
        self._insert(BlockId(0), block_ids)

    def _insert(self, last: BlockId, block_ids: Iterable[BlockId]) -> None:
        following, previous = self._next, self._previous
        after = following[last]
        for block_id in block_ids:
            following[last] = block_id
            previous[block_id] = last
            last = block_id
            self._num += 1
        self._link(last, after)

    def _link(self, block_id: BlockId, after: BlockId) -> None:
        self._next[block_id] = after
        self._previous[after] = block_id
