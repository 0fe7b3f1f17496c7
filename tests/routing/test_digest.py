"""Digests: what is in them is found, what is not nearly never, and a ledger's are what is cached."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from aserve.core.ids import BlockHash, RequestId
from aserve.core.params import SamplingParams
from aserve.core.request import Request
from aserve.routing.digest import BYTES_PER_HASH, MAX_HASHES, Digest, encode, num_leading
from aserve.routing.keys import ENDS, PromptKeys, keys_of
from aserve.routing.ledger import MAX_PENDING, Ledger, hashes_of

HASHES = st.sets(st.integers(0, 2**32 - 1), max_size=200)


@given(HASHES, HASHES)
def test_a_digest_has_what_was_put_in_and_nothing_else(held: set[int], others: set[int]):
    data = encode(held)
    digest = Digest(data)
    assert (len(data), len(digest)) == (BYTES_PER_HASH * len(held), len(held))
    assert all(key in digest for key in held)
    assert not any(key in digest for key in others - held)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_digest(data: bytes):
    assert len(Digest(data)) == len(data) // BYTES_PER_HASH


def test_a_full_digest_takes_few_strangers_for_its_own_and_has_a_bound():
    random = Random(0)
    data = encode({random.getrandbits(32) for _ in range(MAX_HASHES + 5000)})
    assert len(data) == MAX_HASHES * BYTES_PER_HASH == 128 * 1024
    digest = Digest(data)
    num_asked = 400_000
    num_wrong = sum(random.getrandbits(32) in digest for _ in range(num_asked))
    assert num_wrong / num_asked < 4 * MAX_HASHES / 2**32, "8 in a million are expected: about 3"


@given(st.integers(0, 40), st.integers(0, 40))
def test_of_a_prompt_the_longest_beginning_that_is_held_is_found(num: int, num_held: int):
    hashes = list(range(100, 100 + num))
    held = set(hashes[:num_held])
    assert num_leading(hashes, held.__contains__) == min(num, num_held)


def names(num: int, of: str = "") -> list[BlockHash]:
    """Hashes of a prompt's blocks."""
    return [BlockHash(f"{of}{place}".encode()) for place in range(num)]


def test_a_ledger_tells_what_is_cached_and_forgets_what_is_not():
    ledger, keys = Ledger(), keys_of({"prompt": "x" * 4096})
    ledger.came("r", keys)
    ledger.ended("r", 1024, 16, names(63))  # 4 bytes a token: 16 ends of 256 bytes are 4 blocks each
    assert (len(ledger), ledger.bytes_per_token) == (15, 4.0)  # the last block is not in the hashes
    cached = set(names(40))
    assert num_leading(keys.hashes, Digest(ledger.digest(cached.__contains__)).__contains__) == 10
    assert len(ledger) == 10
    cached.discard(BlockHash(b"3"))  # of the first beginning
    assert ledger.digest(cached.__contains__) == b""
    assert len(ledger) == 0


def test_a_beginning_is_told_only_with_all_that_are_shorter():
    ledger = Ledger()
    for name, text in (("a", "x" * 2048 + "a" * 2048), ("b", "x" * 2048 + "b" * 2048)):
        ledger.came(name, keys_of({"prompt": text}))
        ledger.ended(name, 1024, 16, names(32) + names(31, name))
    gone = names(1, "a")[0]
    digest = Digest(ledger.digest(lambda block: block[:1] != b"a" or block == gone))
    a, b = (keys_of({"prompt": "x" * 2048 + letter * 2048}) for letter in "ab")
    assert num_leading(b.hashes, digest.__contains__) == 15
    assert [key in digest for key in a.hashes] == [True] * 8 + [False] * 8


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3000), st.integers(0, 80)), max_size=30))
def test_a_ledger_is_bounded_and_takes_anything(requests: list[tuple[str, int, int]]):
    ledger = Ledger(max_keys=20)
    for number, (text, num_tokens, num_hashes) in enumerate(requests):
        name = f"{number % 3}"
        if number % 2:
            ledger.came(name, PromptKeys(keys_of({"prompt": text * 9000}).hashes, ENDS[20]))
        ledger.ended(name, num_tokens, 16, names(num_hashes))
        assert len(ledger) <= 20
    assert len(ledger.digest(lambda _: True)) <= 20 * BYTES_PER_HASH


def test_requests_that_never_end_are_forgotten():
    ledger = Ledger()
    for number in range(MAX_PENDING + 1):
        ledger.came(str(number), keys_of({"prompt": "x"}))
    assert (ledger.awaits("0"), ledger.awaits("1"), ledger.awaits(str(MAX_PENDING))) == (False, True, True)


def test_a_short_prompts_hashes_are_made_and_a_long_ones_taken():
    ids = tuple(range(40))
    request = Request(
        id=RequestId("r"), prompt_token_ids=ids, params=SamplingParams(), max_tokens=1, seed=0, arrival_s=0.0
    )
    assert len(hashes_of(request, 16)) == 2
    given_hashes = (BlockHash(b"h"),)
    longer = Request(
        id=RequestId("r"),
        prompt_token_ids=ids,
        params=SamplingParams(),
        max_tokens=1,
        seed=0,
        arrival_s=0.0,
        prompt_hashes=given_hashes,
    )
    assert hashes_of(longer, 16) == given_hashes
