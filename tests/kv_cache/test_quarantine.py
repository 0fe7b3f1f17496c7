"""What nobody is to meet again, and how far a table grows: to the block id. Blocks are of two positions."""

import pytest

from aserve.core.ids import BlockId
from aserve.kv_cache.paged_cache import PagedCache
from aserve.kv_cache.table import BlockTable

PROMPT = [1, 2, 3, 4, 5]


def cache_of(num_blocks: int, **options) -> PagedCache:
    return PagedCache(num_blocks=num_blocks + 1, block_size=2, **options)


def computed(cache: PagedCache, token_ids: list[int]) -> BlockTable:
    table = cache.new_table(b"")
    assert cache.acquire(table, token_ids) is not None
    cache.seal(table, token_ids, len(token_ids))
    return table


@pytest.mark.parametrize(("num_trusted", "scrubbed", "num_found"), [(0, [1, 2, 3], 0), (2, [2, 3], 2), (4, [3], 4)])
def test_what_is_behind_the_trusted_positions_is_found_no_more(num_trusted, scrubbed, num_found):
    cache = cache_of(6)
    table = computed(cache, PROMPT)
    assert cache.quarantine([table], num_trusted) == scrubbed
    assert cache.num_cached(cache.new_table(b""), PROMPT) == num_found
    cache.check([table])


def test_a_block_that_another_table_has_is_not_scrubbed_and_one_that_all_share_is():
    cache = cache_of(9)
    one, sibling, stranger = computed(cache, PROMPT), cache.new_table(b""), cache.new_table(b"")
    cache.fork(one, sibling, 4, 5)
    assert cache.acquire(stranger, [1, 2, 9]) == (1,)
    assert (one.block_ids, sibling.block_ids) == ([1, 2, 3], [1, 2, 4])
    assert cache.quarantine([one, sibling], 0) == [2, 3, 4]
    assert cache.num_cached(cache.new_table(b""), PROMPT) == 0
    cache.check([one, sibling, stranger])


def test_the_host_tier_forgets_it_too():
    cache = cache_of(3, num_host_blocks=4, keeps_evicted=True)
    cache.free(computed(cache, PROMPT))
    stranger = cache.new_table(b"")
    cache.acquire(stranger, [9] * 6)
    table = cache.new_table(b"")
    assert cache.num_cached(table, PROMPT) == 4
    assert cache.quarantine([table], 2) == []
    assert cache.num_cached(cache.new_table(b""), PROMPT) == 2
    assert len(cache.take_host_moves()[0]) == 1, "what is forgotten is not copied out"
    cache.check([stranger])


def test_of_a_model_with_windows_the_blocks_of_all_groups_are():
    cache = cache_of(12, windows=(None, 4), max_chunk=8)
    table = cache.new_table(b"")
    assert cache.acquire(table, PROMPT) is not None
    cache.reserve(table, 5)
    cache.seal(table, PROMPT, 5)
    assert cache.quarantine([table], 2) == [3, 4, 5, 6]
    assert cache.num_cached(cache.new_table(b""), PROMPT) == 2
    assert cache.quarantine([table], 0) == [1, 3, 4, 5, 6], "no later position sees the second"
    cache.check([table])


def test_a_table_grows_as_far_as_free_blocks_go():
    cache = cache_of(4)
    table, other = computed(cache, [1]), computed(cache, [9])
    assert cache.reserve(table, 9) is None
    cache.reserve_most(table, 3)
    assert (table.block_ids, table.capacity) == ([1, 3], 4)
    cache.reserve_most(table, 2)
    assert table.capacity == 4
    cache.reserve_most(table, 99)
    assert (table.block_ids, table.capacity) == ([1, 3, 4], 6)
    cache.check([table, other])


@pytest.mark.parametrize(("num_spare_blocks", "fits"), [(2, True), (3, False)])
def test_as_many_blocks_are_left_as_are_to_be_spared(num_spare_blocks, fits):
    """Two hits that nobody holds, and a new block, of five."""
    cache = cache_of(5)
    cache.free(computed(cache, PROMPT))
    table = cache.new_table(b"")
    assert (cache.acquire(table, PROMPT, num_spare_blocks=num_spare_blocks) is not None) == fits
    cache.check([table])


@pytest.mark.parametrize(("num_spare_blocks", "fits"), [(1, True), (2, False)])
def test_a_fork_leaves_as_many_as_are_to_be_spared(num_spare_blocks, fits):
    cache = cache_of(5)
    source, table = computed(cache, [1, 2, 3]), cache.new_table(b"")
    assert (cache.fork(source, table, 3, 5, num_spare_blocks=num_spare_blocks) is not None) == fits
    cache.check([source, table])


def test_what_is_not_whole_is_not_shared_again_after_a_step_that_failed():
    cache = cache_of(6)
    source, table = computed(cache, PROMPT), cache.new_table(b"")
    cache.fork(source, table, 4, 5)
    for num_landed, num_shared in ((5, 2), (3, 1), (1, 0)):
        cache.rewind(source, num_landed)
        assert source.num_shared == num_shared


def test_who_looks_on_learns_of_each_block_that_gets_or_loses_a_name():
    cache = cache_of(6)
    before = computed(cache, PROMPT)
    noted: list[tuple[BlockId, bool]] = []
    cache.note_hashes(noted)
    computed(cache, [7, 8, 9])
    assert noted == [(4, True)]
    cache.quarantine([before], 2)
    assert noted[1:] == [(2, False)]
    assert cache.hashed_blocks() == [1, 4]
    cache.reset()
    assert sorted(noted[2:]) == [(1, False), (4, False)]
    cache.note_hashes(None)
    computed(cache, [5])
    assert len(noted) == 4
