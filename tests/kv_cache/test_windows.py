"""Tables of models with sliding windows, to the block id. Spans of two positions; 0 is the null block.

Group 0 sees everything, group 1 the newest four positions, unless a test says otherwise.
"""

import pytest

from aserve.kv_cache.paged_cache import PagedCache
from aserve.kv_cache.table import BlockTable

TOKENS = list(range(40))


def cache_of(num_blocks: int, windows: tuple[int | None, ...] = (None, 4), **options) -> PagedCache:
    return PagedCache(num_blocks=num_blocks + 1, block_size=2, windows=windows, max_chunk=2, **options)


def computed(cache: PagedCache, num_tokens: int, chunk: int = 2) -> BlockTable:
    """A table whose tokens have landed, a chunk at a time."""
    table = cache.new_table(b"")
    hits = cache.acquire(table, TOKENS[:num_tokens])
    assert hits is not None
    start = len(hits) // cache.num_groups * 2
    for end in range(start + chunk, num_tokens + chunk, chunk):
        landed = min(end, num_tokens)
        assert cache.reserve(table, landed) is not None
        if landed >= table.seal_at:
            cache.seal(table, TOKENS, landed)
        cache.check_visible(table, landed)
    return table


def test_a_span_takes_a_block_of_each_group_and_the_table_grows_with_the_chunks():
    cache = cache_of(20)
    table = cache.new_table(b"")
    assert cache.acquire(table, TOKENS[:6]) == ()
    assert (table.block_ids, table.capacity) == ([], 0)
    assert cache.reserve(table, 3) == (1, 2, 3, 4)
    assert table.capacity == 4


def test_what_nobody_sees_any_more_is_given_back():
    cache = cache_of(20)
    table = computed(cache, 8)
    cache.check([table])
    # Position 8 sees 5 to 8: of group 1 the spans from position 4 on.
    assert table.block_ids == [1, 0, 3, 0, 5, 6, 7, 8]
    assert cache.statistics().num_used == 6


def test_the_number_of_blocks_of_a_window_is_bounded_however_long_the_sequence():
    cache = cache_of(30, windows=(6,))
    table = cache.new_table(b"")
    cache.acquire(table, TOKENS[:5])
    held = []
    for landed in range(1, 1001):
        assert cache.reserve(table, landed) is not None
        cache.seal(table, list(range(landed)), landed)
        held.append(cache.statistics().num_used)
    assert max(held) <= cache.footprint.peak(10**9)
    assert max(held[10:]) == 3  # the newest five of six positions lie on three spans at most


def test_without_prefix_caching_too():
    cache = cache_of(20, enable_prefix_caching=False)
    table = computed(cache, 8)
    assert table.block_ids.count(0) == 2
    assert len(table.hashes) == 1
    cache.free(table)
    cache.check([])


def test_blocks_that_were_given_back_are_found_again():
    cache = cache_of(20)
    cache.free(computed(cache, 8))
    table = cache.new_table(b"")
    # Position 4 sees 1 to 4: all of the first two spans. Position 6 sees 3 to 6: not the first.
    assert cache.acquire(table, TOKENS[:5]) == (1, 2, 3, 4)
    cache.free(table)
    assert cache.acquire(table, TOKENS[:7]) == (1, 0, 3, 4, 5, 6)
    assert (table.num_sealed, table.capacity) == (3, 6)
    cache.check([table])
    cache.check_visible(table, 6)


def test_a_prefix_whose_window_is_gone_gives_way_to_a_shorter_one():
    cache = cache_of(9)
    cache.free(computed(cache, 8))
    blocker = cache.new_table(b"")
    cache.acquire(blocker, [99])
    taken = cache.reserve(blocker, 3)
    # One block was never used. Of the others the window gave its first two back long before the table gave the rest.
    assert taken == (9, 2, 4, 8)
    table = cache.new_table(b"")
    assert cache.num_cached(table, TOKENS[:9]) == 0  # every prefix sees one of those that are gone
    cache.free(blocker)
    cache.check([])


def test_a_fork_shares_what_is_left():
    cache = cache_of(30)
    source, table = computed(cache, 7), cache.new_table(b"")
    assert source.block_ids == [1, 0, 3, 4, 5, 6, 7, 8]
    assert cache.can_fork(source, 7)
    assert cache.fork(source, table, 7, 8) == ((7, 9), (8, 10))
    assert table.block_ids == [1, 0, 3, 0, 5, 6, 9, 10]  # position 7 sees 4 to 7
    cache.check([source, table])
    cache.check_visible(table, 7)


def test_a_past_that_the_source_has_given_back_cannot_be_forked():
    cache = cache_of(30)
    source = computed(cache, 12)
    assert cache.can_fork(source, 11)
    assert not cache.can_fork(source, 4)


def test_a_rebase_takes_over_every_group():
    cache = cache_of(30)
    parent, table = computed(cache, 7), computed(cache, 7)
    copies = cache.rebase(table, parent, 7)
    assert table.block_ids[:6] == parent.block_ids[:6]
    assert copies == tuple(zip(parent.block_ids[6:], table.block_ids[6:], strict=True))
    cache.check([parent, table])


def test_null_entries_do_not_travel():
    cache = cache_of(12, num_host_blocks=8)
    table = computed(cache, 8)
    assert cache.swap_out([table]) == ((1, 0), (3, 1), (5, 2), (6, 3), (7, 4), (8, 5))
    assert table.host_ids == [0, None, 1, None, 2, 3, 4, 5]
    cache.check([], [table])
    cache.reset()
    moved = cache.swap_in([table])
    assert moved is not None
    assert [host_id for host_id, _ in moved] == [0, 1, 2, 3, 4, 5]
    assert [block_id == 0 for block_id in table.block_ids] == [False, True, False, True, False, False, False, False]
    cache.check([table])
    cache.seal(table, TOKENS, 8)
    cache.check_visible(table, 8)


def test_a_prompt_is_admitted_where_it_fits_at_its_peak():
    cache = cache_of(7, windows=(4,))
    table = cache.new_table(b"")
    assert cache.footprint.peak(1000) == 6
    assert cache.acquire(table, TOKENS, num_spare_blocks=2) is None
    assert cache.acquire(table, TOKENS, num_spare_blocks=1) == ()


def test_check_finds_what_should_not_be_there_and_what_is_missing():
    cache = cache_of(20)
    table = computed(cache, 12)
    entry = 2 * 5 + 1  # the newest span of the window's group
    table.block_ids[entry] = 0
    with pytest.raises(AssertionError, match="I23: group 1 lacks"):
        cache.check_visible(table, 12)
    table = computed(cache_of(20), 12)
    table.block_ids[1] = 19
    with pytest.raises(AssertionError, match="I23: group 1 holds"):
        cache.check_visible(table, 12)
