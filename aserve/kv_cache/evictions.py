"""Evictions: the hashes of the newest blocks that were cached and given to somebody else, for whoever asks why one is
not found. Kept from the first time that somebody asked; a hash says nothing of tokens to who does not have them.
"""

from collections.abc import Callable
from typing import Final

from aserve.core.ids import BlockHash, BlockId

MAX_EVICTIONS: Final = 8192
"""About a megabyte of hashes."""

OnEvict = Callable[[BlockId, BlockHash], None]


class Evictions:
    """before: what else is to be told of each. max_hashes: that are kept, the newest."""

    def __init__(self, before: OnEvict | None, max_hashes: int = MAX_EVICTIONS) -> None:
        self._before = before
        self._max_hashes = max_hashes
        self._hashes: dict[BlockHash, None] = {}

    def __call__(self, block_id: BlockId, block_hash: BlockHash) -> None:
        """A cached block is given to somebody else."""
        self._hashes.pop(block_hash, None)
        self._hashes[block_hash] = None
        if len(self._hashes) > self._max_hashes:
            del self._hashes[next(iter(self._hashes))]
        if self._before is not None:
            self._before(block_id, block_hash)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)
