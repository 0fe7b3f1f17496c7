"""Matcher: which blocks that somebody has already computed a sequence can take instead of computing them.

Looked for by hash, on the device first, then in the host tier. A prompt of three full blocks, of which the second was
evicted and lives on in host memory, and the third is nowhere:

    hashes  [ root, a, b, c ]        device {a: 7}, host {b: 4}        match -> [ 7, OnHost(4) ]

Changes nothing and holds nothing: what is found is there until blocks are next allocated, so it is pinned at once.
"""

from collections.abc import Iterable, Iterator, Sequence

from aserve.core.ids import BlockHash, BlockId
from aserve.core.layout import Footprint
from aserve.kv_cache.block_pool import NULL_BLOCK, BlockPool
from aserve.kv_cache.hashing import extend_chain
from aserve.kv_cache.host_memory import HostMemory, OnHost, SwapIn
from aserve.kv_cache.prefix import block_name, longest_prefix
from aserve.kv_cache.table import BlockTable


class Matcher:
    """Of a device's pool and the host memory beside it. is_on: whether anything is ever found."""

    def __init__(self, pool: BlockPool, host: HostMemory, footprint: Footprint, *, is_on: bool) -> None:
        self._pool = pool
        self._host = host
        self._footprint = footprint
        self._is_on = is_on

    def match(self, table: BlockTable, token_ids: Sequence[int]) -> list[BlockId | OnHost]:
        """The cached blocks of the longest prefix that leaves a token to compute (I9). Extends the table's hashes.

        The null block is among them where the first position after the prefix sees nothing.
        """
        if not self._is_on:
            return []
        block_size = self._footprint.block_size
        num_full = (len(token_ids) - 1) // block_size
        extend_chain(table.hashes, token_ids, num_full, block_size, table.extra_keys)
        if self._footprint.has_windows:
            return self._match_windows(table.hashes[1 : num_full + 1])
        rest = iter(table.hashes[1 : num_full + 1])
        hits: list[BlockId | OnHost] = [*self._pool.lookup_run(rest)]
        while len(hits) < num_full and (place := self._host.find(table.hashes[len(hits) + 1])) is not None:
            hits.append(place)
            hits.extend(self._pool.lookup_run(rest))
        return hits

    def _match_windows(self, span_hashes: list[BlockHash]) -> list[BlockId | OnHost]:
        """As `match`, of those spans."""
        windows, block_size = self._footprint.windows, self._footprint.block_size
        num_hits = longest_prefix(
            span_hashes, windows, block_size, lambda block_hash: self._find(block_hash) is not None
        )
        first_seen = dict(self._footprint.first_visible(num_hits * block_size))
        hits: list[BlockId | OnHost] = []
        for span in range(num_hits):
            for group in range(len(windows)):
                place: BlockId | OnHost | None = NULL_BLOCK
                if span >= first_seen.get(group, 0):
                    place = self._find(block_name(span_hashes[span], group))
                assert place is not None, "it was found a moment ago"
                hits.append(place)
        return hits

    def _find(self, block_hash: BlockHash) -> BlockId | OnHost | None:
        """Where the block is that bears the hash."""
        return self._pool.lookup(block_hash) or self._host.find(block_hash)

    def on_device(self, table: BlockTable, beside: Iterable[BlockTable]) -> Iterator[SwapIn]:
        """Of a table on the host, the blocks that one of the tables `beside` has on the device, or the prefix cache."""
        others = [(other, max(other.num_sealed, other.num_shared)) for other in beside]
        num_groups = len(self._footprint.windows)
        for entry in range(min(table.num_shared, len(table.hashes) - 1) * num_groups):
            host_id = table.host_ids[entry]
            if host_id is None:
                continue
            span, group = divmod(entry, num_groups)
            block_id = self._pool.lookup(block_name(table.hashes[span + 1], group))
            for other, num_full in others:
                if block_id is None and span < num_full and other.hashes[span + 1] == table.hashes[span + 1]:
                    block_id = other.block_ids[entry] or None  # the null block is nobody's
            if block_id is not None:
                yield host_id, block_id
