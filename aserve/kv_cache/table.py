"""BlockTable: the blocks of one sequence, in the order of its positions.

    position   0 .. P-1    P .. 2P-1   2P .. 3P-1   3P .. 4P-1        P = block_size
    block_ids  [  7     ,     3      ,     9      ,     4     ]
               |<------ sealed ----->|<- written or reserved ->|
                                                               capacity = 4P

A sealed block is full, has landed and bears a hash, so that others may share it; nobody writes it again (I4).
Blocks that a fork shares are full too, but may still be in flight: they are written no more either.
The table only grows, until the sequence gives it all back or moves to the host. Only `PagedCache` changes one.

Where layers are in G groups (core/layout.py), a span of P positions takes G entries, one per group, and those of a
window's group that nobody sees any more are the null block. With a window in the second group:

    position   0 .. P-1    P .. 2P-1   2P .. 3P-1
    block_ids  [  7 , 0  ,   3 , 0   ,   9 , 4   ]                G = 2
"""

import sys
from collections.abc import Sequence

from aserve.core.ids import BlockHash, BlockId, ExtraKey, HostBlockId

NEVER = sys.maxsize


class BlockTable:
    """Written by `PagedCache`, read by the scheduler, which looks at `capacity` and `seal_at` every step.

    capacity: positions that the blocks hold.
    seal_at: when this many positions have landed, `PagedCache.seal` has something to do.
    num_sealed: leading spans that are sealed. num_shared: those that a fork may share; nobody writes to them any more.
    host_ids: where the blocks' contents are while the sequence is swapped out, in the same order and None for the null
        block; else empty.
    hashes: the root, then one for each full span whose hash was ever needed. They outlive the blocks, so that a
        sequence that is preempted and comes back hashes nothing twice: its tokens are only ever added to.
    extra_keys: what hashes cover besides tokens, see hashing.py.
    """

    __slots__ = ("block_ids", "capacity", "extra_keys", "hashes", "host_ids", "num_sealed", "num_shared", "seal_at")

    def __init__(self, root: BlockHash, extra_keys: Sequence[ExtraKey] = ()) -> None:
        self.block_ids: list[BlockId] = []
        self.capacity = 0
        self.num_sealed = 0
        self.num_shared = 0
        self.host_ids: list[HostBlockId | None] = []
        self.seal_at = NEVER
        self.hashes = [root]
        self.extra_keys = extra_keys
