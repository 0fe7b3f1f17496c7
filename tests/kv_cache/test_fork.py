"""Tables with a past in common. Blocks are of two positions."""

from aserve.kv_cache.paged_cache import PagedCache
from aserve.kv_cache.table import BlockTable


def cache_of(num_blocks: int, **options) -> PagedCache:
    return PagedCache(num_blocks=num_blocks + 1, block_size=2, **options)


def table_of(cache: PagedCache, token_ids: list[int]) -> BlockTable:
    table = cache.new_table(b"")
    assert cache.acquire(table, token_ids) is not None
    return table


def test_a_fork_shares_full_blocks_and_copies_the_partial_one():
    cache = cache_of(6)
    source, table = table_of(cache, [1, 2, 3, 4]), cache.new_table(b"")
    assert cache.fork(source, table, 3, 5) == ((2, 3),)
    assert table.block_ids == [1, 3, 4]
    assert (source.num_shared, table.num_shared) == (1, 1)
    cache.check([source, table])


def test_a_shared_block_is_sealed_by_whoever_lands_first():
    cache = cache_of(6)
    source, table = table_of(cache, [1, 2, 3]), cache.new_table(b"")
    cache.fork(source, table, 2, 3)
    assert table.seal_at == 2
    cache.seal(table, [1, 2, 3], 3)
    cache.seal(source, [1, 2, 3], 3)
    cache.check([source, table])
    cache.free(source)
    cache.free(table)
    assert cache.acquire(cache.new_table(b""), [1, 2, 3]) == (1,)


def test_a_fork_that_does_not_fit_changes_nothing():
    cache = cache_of(3)
    source, table = table_of(cache, [1, 2, 3, 4]), cache.new_table(b"")
    assert cache.fork(source, table, 3, 4, num_spare_blocks=1) is None
    assert cache.fork(source, table, 3, 6) is None
    assert (table.block_ids, source.num_shared) == ([], 0)
    cache.check([source])


def test_without_prefix_caching_forks_share_all_the_same():
    cache = cache_of(6, enable_prefix_caching=False)
    source, table = table_of(cache, [1, 2, 3, 4]), cache.new_table(b"")
    assert cache.fork(source, table, 3, 4) == ((2, 3),)
    cache.check([source, table])


def test_a_table_takes_anothers_past_and_keeps_the_block_that_it_writes():
    cache = cache_of(6)
    parent, table = table_of(cache, [1, 2, 3]), table_of(cache, [7, 8, 9])
    assert cache.rebase(table, parent, 3) == ((2, 4),)
    assert table.block_ids == [1, 4]
    cache.check([parent, table])
    assert cache.statistics().num_free == 3


def test_where_all_blocks_are_full_nothing_is_copied():
    cache = cache_of(6)
    parent, table = table_of(cache, [1, 2, 3, 4]), table_of(cache, [7, 8, 9, 9])
    assert cache.rebase(table, parent, 4) == ()
    assert table.block_ids == [1, 2]
    assert table.hashes == parent.hashes[:3]
    cache.check([parent, table])


def test_a_reset_forgets_and_keeps():
    cache = cache_of(4)
    table = table_of(cache, [1, 2, 3, 4, 5])
    cache.seal(table, [1, 2, 3, 4, 5], 5)
    assert cache.reset() == 2
    cache.check([table])
    assert cache.num_cached(cache.new_table(b""), [1, 2, 3, 4, 5]) == 0
    cache.free(table)
    assert cache.acquire(table, [1, 2, 3, 4, 5]) == ()
