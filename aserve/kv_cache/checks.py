"""The invariants that concern tables, for tests: their numbers are those of `PagedCache`. Cost: the whole pool."""

from collections.abc import Iterable, Sequence

from aserve.core.ids import BlockId
from aserve.core.layout import Window, first_visible_span
from aserve.kv_cache.block_pool import NULL_BLOCK, BlockPool
from aserve.kv_cache.hashing import extend_chain
from aserve.kv_cache.table import BlockTable


def check_tables(pool: BlockPool, tables: Iterable[BlockTable], num_groups: int, block_size: int) -> None:
    """Assert I2 and I4, where `tables` hold blocks of the pool and no others do."""
    num_holders = [0] * pool.num_blocks
    for table in tables:
        held = [block_id for block_id in table.block_ids if block_id != NULL_BLOCK]
        assert len(set(held)) == len(held), "I4: a table holds a block twice"
        num_spans, odd = divmod(len(table.block_ids), num_groups)
        assert (table.capacity, odd) == (num_spans * block_size, 0), "a table's capacity is that of its blocks"
        for block_id in held:
            num_holders[block_id] += 1
        assert not table.host_ids, "I11: a table is in two places"
        for block_id in table.block_ids[max(table.num_sealed, table.num_shared) * num_groups :]:
            assert pool.refs(block_id) == 1, f"I4: block {block_id} is shared and may be written"
            assert pool.hash_of(block_id) is None, f"I4: block {block_id} has a hash before it is sealed"
    for block_id in map(BlockId, range(pool.num_blocks)):
        refs = pool.refs(block_id)
        assert refs == num_holders[block_id], f"I2: block {block_id}: {refs} references, {num_holders[block_id]}"


def check_visible(table: BlockTable, position: int, windows: Sequence[Window], block_size: int) -> None:
    """Assert I23, where `position` is the first of a sequence that has not landed.

    What it does not see is looked at as spans fill up, so that one may still be there; more of them where a step that
    was in flight when the table went to the host has not been sealed.
    """
    is_sealed = table.num_sealed == position // block_size
    for group, window in enumerate(windows):
        blocks = table.block_ids[group :: len(windows)]
        first = 0 if window is None else first_visible_span(position, window, block_size)
        unseen = blocks[: max(0, first - 1)] if is_sealed else []
        assert not any(unseen), f"I23: group {group} holds what position {position} does not see: {blocks}"
        assert all(blocks[first:]), f"I23: group {group} lacks what position {position} sees: {blocks}"


def check_hashes(table: BlockTable, token_ids: Sequence[int], block_size: int) -> None:
    """Assert I22: the table's hashes name these tokens, which have landed, and no others."""
    num_spans = len(table.hashes) - 1
    assert num_spans * block_size <= len(token_ids), f"I22: {num_spans} hashes for {len(token_ids)} tokens"
    chain = table.hashes[:1]
    extend_chain(chain, token_ids, num_spans, block_size, table.extra_keys)
    assert chain == table.hashes, "I22: a hash names other tokens than have landed"
