"""The block pool, to the block id."""

import pytest

from aserve.kv_cache.block_pool import NULL_BLOCK, BlockPool

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))


def test_blocks_are_handed_out_in_order_and_never_the_null_block():
    pool = BlockPool(5)
    assert pool.allocate(4) == (1, 2, 3, 4)
    assert (pool.num_free, pool.num_held) == (0, 4)
    assert pool.refs(NULL_BLOCK) == 0
    pool.check()


def test_asking_for_more_than_is_free_is_our_own_bug():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="I1: 3 blocks asked for, 2 are free"):
        pool.allocate(3)


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    held = pool.allocate(1)
    pool.pin(held)
    pool.release(held)
    assert pool.num_held == 1
    pool.release(held)
    assert pool.num_held == 0
    with pytest.raises(AssertionError, match="I3: block 1 released while free"):
        pool.release(held)


def test_a_free_block_can_be_found_and_pinned_until_it_is_evicted():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.register(block, A)
    pool.release([block])
    assert pool.lookup(A) == block
    pool.pin([block])
    assert pool.allocate(1) == (2,)
    pool.check()
    pool.release([block])
    assert pool.allocate(1) == (block,)
    assert pool.lookup(A) is None
    assert pool.num_evictions == 1
    pool.check()


def test_empty_blocks_go_first_then_the_least_recently_released():
    pool = BlockPool(5)
    pool.allocate(4)
    for block, block_hash in ((1, A), (2, B), (3, C)):
        pool.register(block, block_hash)
    pool.release([2])
    pool.release([1, 3])
    pool.release([4])  # bears no hash
    assert [pool.allocate(1)[0] for _ in range(4)] == [4, 2, 1, 3]


def test_a_hit_makes_a_block_the_most_recent_again():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.register(1, A)
    pool.register(2, B)
    pool.release([1, 2])
    pool.pin([1])
    pool.release([1])
    assert pool.allocate(2) == (2, 1)


def test_of_two_blocks_with_equal_contents_the_first_is_found():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.register(1, A)
    pool.register(2, A)
    assert pool.lookup(A) == 1
    assert pool.hash_of(2) is None
    pool.release([2, 1])
    assert pool.allocate(2) == (2, 1)  # the copy is of no use to anybody
    pool.check()


def test_check_finds_a_reference_that_nobody_counts_and_a_hash_that_nobody_bears():
    pool = BlockPool(3)
    pool.allocate(1)
    pool._refs[1] = 0
    with pytest.raises(AssertionError, match="I3"):
        pool.check()
    pool._refs[1] = 1
    pool._index[A] = 1
    with pytest.raises(AssertionError, match="I8"):
        pool.check()
    pool._index.clear()
    pool._refs[NULL_BLOCK] = 1
    with pytest.raises(AssertionError, match="I5"):
        pool.check()
    pool._refs[NULL_BLOCK] = 0
    pool._free.append([NULL_BLOCK])
    with pytest.raises(AssertionError, match="I1"):
        pool.check()


def test_a_block_that_is_held_is_given_to_nobody():
    pool = BlockPool(3)
    pool._refs[1] = 1
    with pytest.raises(AssertionError, match="I10"):
        pool.allocate(2)
