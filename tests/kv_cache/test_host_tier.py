"""The host tier: evicted blocks live on in host memory and come back when asked for. Blocks of two positions."""

import pytest

from aserve.core.ids import BlockHash
from aserve.kv_cache.host_memory import copying_pays
from aserve.kv_cache.paged_cache import PagedCache
from aserve.kv_cache.swap import HostPool
from aserve.kv_cache.table import BlockTable

PROMPT = [1, 2, 3, 4, 5]


def cache_of(num_blocks: int, num_host_blocks: int, **options) -> PagedCache:
    return PagedCache(
        num_blocks=num_blocks + 1, block_size=2, num_host_blocks=num_host_blocks, keeps_evicted=True, **options
    )


def table_of(cache: PagedCache, token_ids: list[int]) -> BlockTable:
    table = cache.new_table(b"")
    assert cache.acquire(table, token_ids) is not None
    return table


def computed(cache: PagedCache, token_ids: list[int]) -> BlockTable:
    table = table_of(cache, token_ids)
    cache.take_host_moves()
    cache.seal(table, token_ids, len(token_ids))
    return table


def evicted(cache: PagedCache) -> None:
    """PROMPT is computed and left, and somebody else has come and gone."""
    cache.free(computed(cache, PROMPT))
    stranger = table_of(cache, [9] * 6)
    cache.free(stranger)


def test_an_evicted_block_is_copied_out_before_its_new_owner_writes():
    cache = cache_of(3, 4)
    cache.free(computed(cache, PROMPT))
    stranger = table_of(cache, [9] * 6)
    assert stranger.block_ids == [3, 2, 1]
    assert cache.take_host_moves() == (((2, 0), (1, 1)), ())  # the third was not full
    assert cache.take_host_moves() == ((), ())
    assert cache.statistics().num_host_kept == 2
    assert cache.statistics().num_host_used == 0
    cache.check([stranger])


def test_it_comes_back_and_is_shared_once_a_step_has_landed_on_it():
    cache = cache_of(3, 4)
    evicted(cache)
    cache.take_host_moves()
    table = cache.new_table(b"")
    assert cache.num_cached(table, PROMPT) == 4
    hits = cache.acquire(table, PROMPT)
    assert hits == (3, 2)
    assert cache.take_host_moves() == ((), ((1, 3), (0, 2)))
    assert (table.num_sealed, table.num_shared, table.seal_at) == (0, 2, 2)
    cache.check([table])
    assert cache.num_cached(cache.new_table(b""), PROMPT) == 4  # it is on the host as well
    cache.seal(table, PROMPT, 5)
    cache.check([table])
    counts = cache.statistics()
    assert (counts.num_hit_tokens, counts.num_host_hits, counts.num_host_kept) == (4, 2, 2)
    other = cache.new_table(b"")
    cache.free(table)
    assert cache.acquire(other, PROMPT) == (3, 2)
    assert cache.take_host_moves() == ((), ())


def test_a_hit_may_begin_on_the_device_and_go_on_on_the_host():
    cache = cache_of(3, 4)
    cache.free(computed(cache, PROMPT))
    blocker = table_of(cache, [9] * 4)  # takes the two blocks that are deepest
    assert blocker.block_ids == [3, 2]
    cache.free(blocker)
    table = cache.new_table(b"")
    assert cache.acquire(table, PROMPT) == (1, 3)
    assert (table.num_sealed, table.num_shared) == (1, 2)
    outs, ins = cache.take_host_moves()
    assert (outs, ins) == (((2, 0),), ((0, 3),))  # out and in again with one plan, in this order
    cache.check([table])


def test_a_block_that_is_on_the_host_already_is_not_copied_again():
    cache = cache_of(3, 4)
    evicted(cache)
    table = computed(cache, PROMPT)
    cache.free(table)
    table_of(cache, [8] * 6)
    assert cache.take_host_moves() == ((), ())


def test_the_least_recently_used_gives_way():
    cache = cache_of(2, 2)
    for prompt in ([1, 1, 1], [2, 2, 2], [3, 3, 3]):
        cache.free(computed(cache, prompt))
    assert cache.num_cached(cache.new_table(b""), [1, 1, 1]) == 2
    table = table_of(cache, [1, 1, 1])  # used again: now the second is the oldest
    cache.take_host_moves()
    cache.free(table)
    table_of(cache, [4, 4, 4])
    assert cache.num_cached(cache.new_table(b""), [1, 1, 1]) == 2
    assert cache.num_cached(cache.new_table(b""), [2, 2, 2]) == 0


def test_what_will_be_read_is_not_overwritten_by_the_same_plan():
    cache = cache_of(2, 1)
    cache.free(computed(cache, [1, 1, 1]))
    cache.free(computed(cache, [2, 2, 2]))
    assert cache.statistics().num_host_kept == 1
    table = table_of(cache, [1, 1, 1])  # evicts the second prompt's block, for which there is no place now
    assert cache.take_host_moves() == ((), ((0, table.block_ids[0]),))
    assert cache.num_cached(cache.new_table(b""), [2, 2, 2]) == 0
    cache.check([table])


def test_tables_come_first():
    cache = cache_of(3, 3)
    evicted(cache)
    table = table_of(cache, [8] * 6)
    assert cache.swap_out([table]) is not None
    assert cache.statistics().num_host_kept == 0
    outs, _ = cache.take_host_moves()
    assert {host_id for _, host_id in outs} == {0, 1, 2}
    assert len(outs) == 3
    cache.check([], [table])


def test_a_move_that_nobody_waits_for_is_dropped():
    cache = cache_of(3, 4)
    evicted(cache)
    cache.take_host_moves()
    table = table_of(cache, PROMPT)
    cache.free(table)
    assert cache.take_host_moves() == ((), ())
    cache.check([])
    table = computed(cache, [7] * 5)
    cache.swap_out([table])
    cache.free_host(table)
    assert not {1, 2, 3} & {host_id for _, host_id in cache.take_host_moves()[0] if cache._host._host.is_held(host_id)}
    cache.check([])


def test_what_a_failed_step_was_to_copy_is_forgotten():
    cache = cache_of(3, 4)
    evicted(cache)
    outs, _ = cache.take_host_moves()
    cache.distrust_host({host_id for _, host_id in outs})
    assert cache.num_cached(cache.new_table(b""), PROMPT) == 0
    assert cache.statistics().num_host_kept == 0
    cache.check([])


def test_a_reset_forgets_the_tier():
    cache = cache_of(3, 4)
    evicted(cache)
    assert cache.reset() == 2
    assert cache.num_cached(cache.new_table(b""), PROMPT) == 0
    assert cache.take_host_moves() == ((), ())
    cache.check([])


def test_windows_come_back_by_group():
    cache = cache_of(8, 16, windows=(None, 2), max_chunk=2)
    table = table_of(cache, PROMPT)
    for landed in (2, 4, 5):
        cache.reserve(table, landed)
        cache.seal(table, PROMPT, landed)
    cache.free(table)
    stranger = table_of(cache, [9] * 8)
    cache.reserve(stranger, 8)
    cache.free(stranger)
    cache.take_host_moves()
    hits = cache.acquire(table, PROMPT)
    assert hits is not None
    assert [hit == 0 for hit in hits] == [False, True, False, False]  # position 4 sees 3 and 4
    assert len(cache.take_host_moves()[1]) == 3
    cache.check([table])


def test_without_a_tier_nothing_is_kept():
    for options in ({"keeps_evicted": False}, {"enable_prefix_caching": False, "keeps_evicted": True}):
        cache = PagedCache(num_blocks=4, block_size=2, num_host_blocks=4, **options)
        evicted(cache)
        assert cache.take_host_moves() == ((), ())
        assert cache.statistics().num_host_kept == 0


def test_it_pays_where_two_copies_cost_less_than_computing():
    assert copying_pays(recompute_cost_s=1e-4, swap_cost_s=1e-4, block_size=16)
    assert not copying_pays(recompute_cost_s=1e-5, swap_cost_s=1e-4, block_size=16)
    assert not copying_pays(recompute_cost_s=1e-4, swap_cost_s=1e-4, block_size=16, num_groups=8)


def test_check_finds_a_block_that_is_kept_and_free():
    pool = HostPool(2)
    host_id = pool.keep(BlockHash(b"a"))
    assert host_id is not None
    assert pool.keep(BlockHash(b"a")) is None
    pool.check([])
    pool._free.append(host_id)
    with pytest.raises(AssertionError, match="I3"):
        pool.check([])
