"""The chain of block hashes."""

from hashlib import sha256
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.kv_cache.hashing import extend_chain, prompt_hashes, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def chain_of(token_ids, block_size, salt=b""):
    chain = [root_hash(salt)]
    extend_chain(chain, token_ids, len(token_ids) // block_size, block_size)
    return chain


def test_a_hash_covers_its_parent_and_its_tokens_and_the_root_is_the_salt():
    tokens = b"".join(token.to_bytes(4, "little") for token in (7, 8))
    assert chain_of([7, 8, 9], 2, b"salt") == [
        sha256(b"salt").digest(),
        sha256(sha256(b"salt").digest() + tokens).digest(),
    ]


def test_only_full_blocks_have_hashes():
    assert len(chain_of([1, 2, 3], 4)) == 1
    assert len(chain_of([1, 2, 3, 4, 5], 4)) == 2


def test_the_same_tokens_at_another_depth_have_another_hash():
    chain = chain_of([5, 6, 5, 6], 2)
    assert chain[1] != chain[2]


def test_a_chain_that_is_long_enough_is_left_alone():
    chain = chain_of([1, 2, 3, 4], 2)
    before = list(chain)
    extend_chain(chain, [], 1, 2)
    assert chain == before


@given(TOKENS, st.integers(1, 5), st.data())
def test_a_chain_grown_in_pieces_equals_one_made_at_once(token_ids, block_size, data):
    chain = [root_hash(b"")]
    for num_blocks in sorted(data.draw(st.lists(st.integers(0, len(token_ids) // block_size)))):
        extend_chain(chain, token_ids, num_blocks, block_size)
    extend_chain(chain, token_ids, len(token_ids) // block_size, block_size)
    assert chain == chain_of(token_ids, block_size)


@given(TOKENS, TOKENS, st.integers(1, 5), st.sampled_from([b"", b"a"]), st.sampled_from([b"", b"a"]))
def test_hashes_agree_exactly_as_far_as_salt_and_tokens_do(one, other, block_size, one_salt, other_salt):
    one_chain, other_chain = chain_of(one, block_size, one_salt), chain_of(other, block_size, other_salt)
    for depth, (one_hash, other_hash) in enumerate(zip(one_chain, other_chain, strict=False)):
        same = one_salt == other_salt and one[: depth * block_size] == other[: depth * block_size]
        assert (one_hash == other_hash) == same


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 5))
def test_hashes_made_beforehand_are_those_of_admission(token_ids, block_size):
    expected = [root_hash(b"salt")]
    extend_chain(expected, token_ids, (len(token_ids) - 1) // block_size, block_size)
    assert [*chain.from_iterable(prompt_hashes(b"salt", token_ids, block_size))] == expected[1:]


@pytest.mark.parametrize("num_tokens", [512, 513, 1024, 1025, 3001])
def test_a_long_prompts_hashes_come_a_piece_at_a_time_and_are_those_of_one_chain(num_tokens):
    token_ids = [number * number % 1000 for number in range(num_tokens)]
    pieces = list(prompt_hashes(b"salt", token_ids, 4))
    assert [*chain.from_iterable(pieces)] == chain_of(token_ids[:-1], 4, b"salt")[1:]
    assert max(map(len, pieces)) <= 128


def keyed(token_ids, extra_keys, block_size=2):
    chain = [root_hash(b"")]
    extend_chain(chain, token_ids, len(token_ids) // block_size, block_size, extra_keys)
    return chain


def test_an_extra_key_changes_the_hash_of_its_block_and_of_all_behind_it():
    plain = keyed([1, 2, 3, 4, 5, 6], ())
    image = keyed([1, 2, 3, 4, 5, 6], ((3, b"image"),))
    assert [one == other for one, other in zip(plain, image, strict=True)] == [True, True, False, False]
    adapter = keyed([1, 2, 3, 4, 5, 6], ((0, b"adapter 1"),))
    assert [one == other for one, other in zip(plain, adapter, strict=True)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("keys", "others"),
    [
        (((0, b"a"),), ((0, b"b"),)),
        (((0, b"a"),), ((1, b"a"),)),  # another position in the same block
        (((0, b"a"), (0, b"b")), ((0, b"ab"),)),
        (((0, b"a"), (1, b"b")), ((0, b"a1 1 b"),)),  # what looks like two
    ],
)
def test_other_extra_keys_make_other_hashes(keys, others):
    assert keyed([1, 2], keys)[1] != keyed([1, 2], others)[1]


def test_extra_keys_are_the_same_in_any_order_and_in_pieces():
    keys = ((0, b"adapter"), (5, b"image"), (4, b"other"))
    whole = keyed([1, 2, 3, 4, 5, 6], keys)
    assert keyed([1, 2, 3, 4, 5, 6], keys[::-1]) == whole
    grown = [root_hash(b"")]
    for num_blocks in (1, 3):
        extend_chain(grown, [1, 2, 3, 4, 5, 6], num_blocks, 2, keys)
    assert grown == whole
    assert [*chain_of_pieces([1, 2, 3, 4, 5, 6, 7], keys)] == whole[1:]


def chain_of_pieces(token_ids, keys):
    """As hashes of a prompt are made beforehand."""
    return chain.from_iterable(prompt_hashes(b"", token_ids, 2, keys))
