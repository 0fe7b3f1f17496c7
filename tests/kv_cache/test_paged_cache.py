"""The paged cache, to the block id. Blocks are of two positions unless a test says otherwise."""

import pytest

from aserve.kv_cache.paged_cache import PagedCache
from aserve.kv_cache.table import BlockTable


def cache_of(num_blocks: int, **options) -> PagedCache:
    return PagedCache(num_blocks=num_blocks + 1, block_size=2, **options)


def computed(cache: PagedCache, token_ids: list[int], salt: bytes = b"") -> BlockTable:
    """A table whose tokens have all landed."""
    table = cache.new_table(salt)
    assert cache.acquire(table, token_ids) is not None
    cache.seal(table, token_ids, len(token_ids))
    cache.check([table])
    return table


def test_an_empty_cache_gives_new_blocks_for_every_token():
    cache = cache_of(4)
    table = cache.new_table(b"")
    assert cache.acquire(table, [1, 2, 3]) == ()
    assert (table.block_ids, table.capacity, table.num_sealed) == ([1, 2], 4, 0)
    assert (cache.statistics().num_used, cache.statistics().num_free) == (2, 2)


def test_the_longest_cached_prefix_is_pinned_and_the_rest_is_new():
    cache = cache_of(6)
    first = computed(cache, [1, 2, 3, 4, 5])
    second = cache.new_table(b"")
    assert cache.acquire(second, [1, 2, 3, 9, 5]) == (1,)
    assert second.block_ids == [1, 4, 5]
    cache.check([first, second])


def test_the_last_token_is_always_computed_even_where_all_is_cached():
    cache = cache_of(6)
    first = computed(cache, [1, 2, 3, 4])
    second = cache.new_table(b"")
    assert cache.acquire(second, [1, 2, 3, 4]) == (1,)
    assert second.block_ids == [1, 3]
    cache.check([first, second])


def test_a_block_is_found_only_when_it_has_been_sealed():
    cache = cache_of(5)
    first = cache.new_table(b"")
    cache.acquire(first, [1, 2, 3, 4, 5])
    second = cache.new_table(b"")
    assert cache.acquire(second, [1, 2, 3]) == ()
    cache.seal(first, [1, 2, 3, 4, 5], 3)  # three positions have landed: one block is full
    third = cache.new_table(b"")
    assert cache.acquire(third, [1, 2, 3]) is None  # one hit, but no block is left for the third token
    cache.free(second)
    assert cache.acquire(third, [1, 2, 3]) == (1,)
    cache.check([first, third])


def test_other_salts_share_nothing():
    cache = cache_of(6)
    computed(cache, [1, 2, 3], salt=b"mine")
    assert cache.acquire(cache.new_table(b"yours"), [1, 2, 3]) == ()
    assert cache.acquire(cache.new_table(b"mine"), [1, 2, 3]) == (1,)


def test_a_refusal_changes_nothing():
    cache = cache_of(4)
    computed_table = computed(cache, [1, 2, 3, 4])
    cache.free(computed_table)
    before = cache.statistics()
    table = cache.new_table(b"")
    assert cache.acquire(table, [1, 2, 3, 4, 5, 6, 7], num_spare_blocks=1) is None
    assert cache.acquire(table, list(range(9))) is None
    assert (table.block_ids, cache.statistics()) == ([], before)
    assert cache.acquire(table, [1, 2, 3, 4, 5, 6, 7]) == (1, 2)


def test_an_idle_hit_is_not_also_counted_as_free():
    cache = cache_of(2)
    cache.free(computed(cache, [1, 2, 3, 4]))
    table = cache.new_table(b"")
    assert cache.acquire(table, [1, 2, 9, 9, 9]) is None  # needs the hit and two more, of two blocks in all
    assert cache.acquire(table, [1, 2, 9]) == (1,)
    assert table.block_ids == [1, 2]


def test_a_prefix_outlives_its_suffixes():
    cache = cache_of(4)
    cache.free(computed(cache, [1, 2, 3, 4, 5, 6, 7, 8]))
    intruder = cache.new_table(b"")
    cache.acquire(intruder, [9, 9, 9])
    assert intruder.block_ids == [4, 3]  # the deepest first
    table = cache.new_table(b"")
    assert cache.acquire(table, [1, 2, 3, 4, 5]) is None
    cache.free(intruder)
    assert cache.acquire(table, [1, 2, 3, 4, 5]) == (1, 2)


def test_reserve_grows_to_a_number_of_positions_or_not_at_all():
    cache = cache_of(3)
    table = cache.new_table(b"")
    cache.acquire(table, [1])
    assert cache.reserve(table, 2) == ()
    assert cache.reserve(table, 5) == (2, 3)
    assert cache.reserve(table, 7) is None
    assert table.block_ids == [1, 2, 3]


def test_sealing_says_when_it_has_something_to_do_next():
    cache = cache_of(4)
    table = cache.new_table(b"")
    cache.acquire(table, [1, 2, 3])
    assert table.seal_at == 2
    cache.seal(table, [1, 2, 3], 3)
    assert (table.num_sealed, table.seal_at) == (1, 4)
    cache.free(table)
    assert (table.num_sealed, table.capacity, table.block_ids) == (0, 0, [])
    cache.free(table)  # holds nothing, gives nothing
    cache.check([])


def test_a_sequence_that_comes_back_finds_its_own_blocks_and_hashes_nothing_twice():
    cache = cache_of(4)
    table = computed(cache, [1, 2, 3, 4, 5])
    hashes = list(table.hashes)
    cache.free(table)
    assert cache.acquire(table, [1, 2, 3, 4, 5, 6, 7]) == (1, 2)
    assert table.hashes[:3] == hashes
    assert table.num_sealed == 2


def test_without_prefix_caching_nothing_is_hashed_or_found():
    cache = cache_of(8, enable_prefix_caching=False)
    first, second = cache.new_table(b""), cache.new_table(b"")
    assert cache.acquire(first, [1, 2, 3, 4]) == ()
    assert first.seal_at > 10**9
    assert cache.acquire(second, [1, 2, 3, 4]) == ()
    assert len(first.hashes) == 1


def test_statistics_count_tokens_and_evictions():
    cache = cache_of(3)
    cache.free(computed(cache, [1, 2, 3, 4]))
    table = cache.new_table(b"")
    cache.acquire(table, [1, 2, 3, 4, 5])
    cache.free(table)
    cache.acquire(cache.new_table(b""), [9, 9, 9, 9, 9])
    counts = cache.statistics()
    assert (counts.num_queried_tokens, counts.num_hit_tokens, counts.num_evictions) == (14, 4, 2)
    assert (counts.num_used, counts.num_free) == (3, 0)


def test_check_finds_a_table_that_nobody_told_the_pool_about():
    cache = cache_of(3)
    table = cache.new_table(b"")
    cache.acquire(table, [1, 2, 3])
    with pytest.raises(AssertionError, match="I2: block 1: 1 references, 0"):
        cache.check([])
    table.block_ids[1] = table.block_ids[0]
    with pytest.raises(AssertionError, match="I4"):
        cache.check([table])


@pytest.mark.parametrize("block_size", [1, 3, 7])
def test_any_block_size_will_do(block_size):
    cache = PagedCache(num_blocks=30, block_size=block_size)
    tokens = list(range(11))
    first, second = cache.new_table(b""), cache.new_table(b"")
    cache.acquire(first, tokens)
    cache.seal(first, tokens, 11)
    hits = cache.acquire(second, tokens)
    assert hits is not None
    assert len(hits) == 10 // block_size
    cache.check([first, second])
