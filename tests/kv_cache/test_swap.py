"""The host's blocks, and tables on their way there and back. Blocks are of two positions."""

import pytest

from aserve.core.ids import BlockHash
from aserve.kv_cache.paged_cache import PagedCache
from aserve.kv_cache.swap import HostPool
from aserve.kv_cache.table import NEVER, BlockTable


def cache_of(num_blocks: int, num_host_blocks: int, **options) -> PagedCache:
    return PagedCache(num_blocks=num_blocks + 1, block_size=2, num_host_blocks=num_host_blocks, **options)


def table_of(cache: PagedCache, token_ids: list[int]) -> BlockTable:
    table = cache.new_table(b"")
    assert cache.acquire(table, token_ids) is not None
    return table


def test_a_host_block_is_free_when_its_last_holder_lets_go():
    pool = HostPool(2)
    block = pool.allocate()
    pool.pin(block)
    pool.release([block])
    assert (pool.num_held, pool.num_free) == (1, 1)
    pool.check([[block]])
    pool.release([block])
    assert pool.num_held == 0
    with pytest.raises(AssertionError, match="I3: host block 0 released while free"):
        pool.release([block])
    with pytest.raises(AssertionError, match="I3: host block 0 pinned while free"):
        pool.pin(block)


def test_check_counts_the_holders():
    pool = HostPool(1)
    pool.allocate()
    with pytest.raises(AssertionError, match="I2"):
        pool.check([])


def test_a_table_goes_to_the_host_and_back():
    cache = cache_of(4, 4)
    table = table_of(cache, [1, 2, 3])
    cache.seal(table, [1, 2, 3], 3)
    assert cache.swap_out([table]) == ((1, 0), (2, 1))
    cache.check([], [table])
    assert (table.block_ids, table.host_ids, table.capacity, table.seal_at) == ([], [0, 1], 0, NEVER)
    assert cache.statistics().num_host_used == 2
    cache.free(table_of(cache, [9] * 8))  # takes every block, the cached one too
    blocker = table_of(cache, [9])
    assert [host_id for host_id, _ in cache.swap_in([table])] == [0, 1]
    cache.check([table, blocker])
    assert (table.num_sealed, table.seal_at, table.host_ids) == (0, 2, [])
    cache.seal(table, [1, 2, 3], 3)
    assert table.num_sealed == 1


def test_what_the_prefix_cache_still_has_is_not_moved_back():
    cache = cache_of(4, 4)
    table = table_of(cache, [1, 2, 3])
    cache.seal(table, [1, 2, 3], 3)
    (cached, _), (_, host_id) = cache.swap_out([table])
    blocker = table_of(cache, [9] * 5)
    assert cache.statistics().num_free == 1
    assert cache.swap_in([table]) is None  # a hit takes a free block as well
    cache.free(blocker)
    ((moved, _),) = cache.swap_in([table])
    assert moved == host_id
    assert table.block_ids[0] == cached
    cache.check([table])


def test_who_returns_later_shares_with_those_of_the_group_who_are_back():
    cache = cache_of(8, 8)
    one = table_of(cache, [1, 2, 3, 4, 5])
    cache.seal(one, [1, 2, 3, 4, 5], 5)
    other = cache.new_table(b"")
    cache.fork(one, other, 4, 5)
    cache.swap_out([one, other])
    cache.reset()
    assert len(cache.swap_in([one])) == 3  # not sealed yet, so that only its sibling may share it
    assert len(cache.swap_in([other], beside=[one])) == 1
    assert one.block_ids[:2] == other.block_ids[:2]
    cache.check([one, other])


def test_a_block_that_two_share_is_moved_once():
    cache = cache_of(6, 6)
    one = table_of(cache, [1, 2, 3, 4, 5])
    other = cache.new_table(b"")
    assert cache.fork(one, other, 4, 5) == ()
    moves = cache.swap_out([one, other])
    assert moves is not None
    assert len(moves) == 4
    assert one.host_ids[:2] == other.host_ids[:2]
    cache.check([], [one, other])
    assert len(cache.swap_in([one, other]) or ()) == 4
    assert one.block_ids[:2] == other.block_ids[:2]
    cache.check([one, other])


def test_one_of_two_may_give_up_its_place():
    cache = cache_of(6, 6)
    one = table_of(cache, [1, 2, 3, 4, 5])
    other = cache.new_table(b"")
    cache.fork(one, other, 4, 5)
    cache.swap_out([one, other])
    cache.free_host(one)
    cache.check([], [other])
    assert cache.statistics().num_host_used == 3


def test_what_does_not_fit_stays_where_it_is():
    cache = cache_of(3, 1)
    table = table_of(cache, [1, 2, 3])
    assert cache.swap_out([table]) is None
    cache.check([table])
    cache = cache_of(3, 2)
    table = table_of(cache, [1, 2, 3])
    cache.swap_out([table])
    table_of(cache, [9])
    assert cache.swap_in([table], num_spare_blocks=1) is None
    assert cache.swap_in([table]) is not None


def test_who_is_used_is_given_up_last():
    """Caught: `move_to_end` removed from `touch`, by which what was kept first goes first, however often it is used."""
    pool = HostPool(2)
    first, second = BlockHash(b"1" * 32), BlockHash(b"2" * 32)
    used, unused = pool.keep(first), pool.keep(second)
    assert used is not None
    pool.touch(used)
    assert pool.keep(BlockHash(b"3" * 32)) == unused
    assert (pool.lookup(first), pool.lookup(second)) == (used, None)
